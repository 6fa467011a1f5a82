"""eval: the commands for special workloads: decode (long texts), lookalikes (question matching), personas (users)."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave.errors import InvalidRequest
from kvweave.recipes.names import UNCALIBRATED
from kvweave.version import __version__
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter
    from kvweave_lab.eval.decoding.equal_reads import Request as ReadsRequest
    from kvweave_lab.eval.decoding.measure import Request as DecodingRequest
    from kvweave_lab.eval.long_texts import LongText
    from kvweave_lab.eval.personas.run import Request as PersonasRequest
    from kvweave_lab.eval.personas.users import User

Name = TypeVar("Name", bound=str)
LENGTHS = (512, 1024, 1792)
BUDGETS = (0.15,)


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The options of `eval decode` except the model's: the texts, and how they are decoded."""

    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="reasoning, dialogue or story; repeatable. Default: all."),
    ] = None
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="A strategy, or dynakv/ABLATION; repeatable. Default: every strategy with a cost; with --text, those that are "
            "compared at equal bytes read.",
        ),
    ] = None
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations", help="Run every strategy and every ablation of dynakv, in addition to --strategy."
        ),
    ] = False
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            min=16,
            help="Number of decoded tokens; repeatable, with a row for each. Default: 512, 1024, 1792.",
        ),
    ] = None
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="As --kv-budget; repeatable. Default: 15 %."),
    ] = None
    storage: Annotated[
        list[str] | None, typer.Option("--storage", help="exact, int8 or int4; repeatable. Default: exact.")
    ] = None
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="Seed of the texts; repeatable. Default: 0, 1, 2.")
    ] = None
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Texts per kind and seed, or per file.")
    ] = 4
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=32, help="Tokens before decoding begins.")
    ] = 256
    cluster_entries: Annotated[
        int | None,
        typer.Option(
            "--cluster-entries",
            min=1,
            help="Mean entries of a cluster; short texts and small budgets need small clusters. Default: 32.",
        ),
    ] = None
    resident_bytes: Annotated[
        str | None,
        typer.Option(
            "--resident-bytes", help="Limit of KV in memory. Default: 30 % of the KV of the longest text."
        ),
    ] = None
    split: Annotated[
        str, typer.Option("--split", help="Pool of names, phrases and texts: dev, test or hidden.")
    ] = "dev"
    haystack: Annotated[
        Path | None, typer.Option("--haystack", help="Folder of .txt and .md files as natural text.")
    ] = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            help="Read texts from KIND=PATH instead of generating them. KIND: mmlu, arc, writingprompts or sharegpt.",
        ),
    ] = None
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="Compare strategies at equal bytes read on pieces of this file, or of a folder's .txt and .md files; "
            "repeatable. A piece is --prompt-tokens and --length long.",
        ),
    ] = None
    skip: Annotated[
        int, typer.Option("--skip", min=0, help="With --text: pieces left out at the beginning.")
    ] = 0
    folder: bench.Folder = None
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for JSON, plots and report. The same command resumes there."),
    ] = None

    def equal_reads(self, adapter: "Adapter") -> "ReadsRequest":
        """Return the comparison on `text` that the options ask for; raises InvalidRequest for impossible options."""
        from kvweave_lab.eval.decoding import equal_reads

        length, *more = self.length or (64,)
        if more:
            raise InvalidRequest("with --text, --length is one number: of the tokens that are decoded")
        texts = equal_reads.given_texts(
            adapter, self.text or (), self.prompt_tokens, length, self.skip, self.samples
        )
        variants = tuple(self.strategy or equal_reads.COMPARED)
        return equal_reads.Request(texts, variants, tuple(self.budget or equal_reads.BUDGETS), self.output)

    def request(self, adapter: "Adapter") -> "DecodingRequest":
        """Return the decoding that the options ask for; raises InvalidRequest for impossible options."""
        from kvweave_lab.eval.decoding.measure import Request
        from kvweave_lab.eval.long_texts import LONG_TASKS

        lengths = tuple(self.length or LENGTHS)
        return Request(
            tasks=() if self.file else tuple(self.task or LONG_TASKS),
            lengths=lengths,
            variants=_variants(self.strategy or (), ablations=self.ablations),
            budgets=tuple(self.budget or BUDGETS),
            storages=tuple(bench.storages_named(self.storage or ["exact"])),
            seeds=tuple(self.seed or (0, 1, 2)),
            samples=self.samples,
            prompt_tokens=self.prompt_tokens,
            cluster_entries=self.cluster_entries,
            resident_bytes=None if self.resident_bytes is None else opt.size_bytes(self.resident_bytes),
            split=self.split,
            haystack=self.haystack,
            texts=_file_texts(adapter, self.file or (), self.samples, lengths[-1]),
            folder=self.folder,
            output=self.output,
        )


@bench.keeps_output
@opt.with_options(
    *opt.MODEL,
    model="Hub id or local folder. Default: longer, the shipped model that was trained on texts of 8K tokens.",
)
def decode(
    *, model: opt.SharedOptions, options: DecodeOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """Long texts under every decoding strategy: recall, output error, answers, and reads from the disk."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.eval.decoding.measure import evaluate_decoding
    from kvweave_lab.eval.decoding.report import comparison_table, content, quality_table, reuse_table, write

    opt.quiet_libraries()
    adapter = model.load_model("longer")
    about = {
        "command": bench.this_command(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    if options.text:
        _compare_reads(adapter, options.equal_reads(adapter), about, json=json, quiet=quiet)
        return
    request = options.request(adapter)
    with progress_bar(quiet or json) as report:
        done = evaluate_decoding(adapter, request, report)
    files = write(options.output, done, about) if options.output else []
    if json:
        print_json(content(done, about))
        return
    for table in (quality_table(done), comparison_table(done), reuse_table(done)):
        STDOUT.print(table)
    bench.print_paths(files)


def _compare_reads(
    adapter: "Adapter", request: "ReadsRequest", about: dict[str, str], *, json: bool, quiet: bool
) -> None:
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.eval.decoding.equal_reads import compare
    from kvweave_lab.eval.decoding.reads_report import content, reads_table
    from kvweave_lab.report import json_bytes, write_files

    with progress_bar(quiet or json) as report:
        runs = compare(adapter, request, report)
    found = content(adapter, request, runs, about)
    files = write_files(request.output, {"equal_reads.json": json_bytes(found)}) if request.output else []
    if json:
        print_json(found)
        return
    STDOUT.print(reads_table(adapter.fingerprint.name, runs))
    bench.print_paths(files)


def _variants(names: Sequence[str], *, ablations: bool) -> tuple[str, ...]:
    from kvweave_lab.eval.decoding.measure import all_variants
    from kvweave_lab.strategies import INDEXED, STRATEGIES

    all_but_indexed = [name for name in all_variants() if name not in INDEXED]
    return tuple(dict.fromkeys([*(all_but_indexed if ablations else ()), *names])) or STRATEGIES


def _file_texts(
    adapter: "Adapter", files: Sequence[str], samples: int, decode_tokens: int
) -> "tuple[LongText, ...]":
    from kvweave_lab.eval.long_readers import LONG_READERS, read_long

    texts: list[LongText] = []
    for file in files:
        kind, _, path = file.partition("=")
        if kind not in LONG_READERS or not path:
            raise InvalidRequest(
                f"--file {file}: give KIND=PATH with one of {', '.join(LONG_READERS)} as kind"
            )
        texts += read_long(kind, Path(path), adapter.template, samples, decode_tokens)
    return tuple(texts)


@keeps_nothing
@opt.with_options(
    *("home", "embedding_model", *opt.MODEL),
    model="Also judge what passes the guard with this model: hub id or local folder. Default: no judge.",
)
def lookalikes_command(
    split: Annotated[
        str, typer.Option("--split", help="Pool of phrasings: dev (to tune on) or test (to report).")
    ] = "dev",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the pairs.")] = 0,
    paraphrases: Annotated[
        int,
        typer.Option(
            "--paraphrases",
            min=1,
            help="Number of pairs of questions that ask the same and should share an answer.",
        ),
    ] = 1000,
    lookalikes: Annotated[
        int,
        typer.Option(
            "--lookalikes",
            min=1,
            help="Number of pairs that must not share an answer, with equally many of each kind.",
        ),
    ] = 5000,
    pairs: Annotated[
        Path | None,
        typer.Option(
            "--pairs",
            help="Read the pairs from this file: JSON lines with a and b (the questions), same, and kind.",
        ),
    ] = None,
    *,
    model: opt.SharedOptions,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for JSON and plot.")] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Paraphrases that should share an answer, look-alikes that must not: hit rates of every matcher and threshold."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.embedding import TextEncoder
    from kvweave.state.judge import Judge
    from kvweave_lab.eval.question_judging import judge_pairs, judging_content, judging_table
    from kvweave_lab.eval.question_matching import (
        content,
        evaluate_matchers,
        kind_table,
        threshold_table,
        write,
    )
    from kvweave_lab.eval.question_pairs import make_pairs, read_pairs

    opt.quiet_libraries()
    environment = bench.environment()
    with progress_bar(quiet or json) as report:
        drawn = read_pairs(pairs) if pairs else make_pairs(split, paraphrases, lookalikes, seed)
        pool = pairs.name if pairs else split
        encoder = TextEncoder(model.embedding_model)
        done = evaluate_matchers(encoder, drawn, pool, seed, report)
        judged = None
        if model.model is not None:
            judged = judge_pairs(Judge(model.load_model(), model.config().home), encoder, drawn, report)
    judging = None if judged is None else judging_content(judged)
    files = write(output, done, environment, judging) if output else []
    if json:
        print_json(content(done, environment, judging))
        return
    rows = [] if judged is None else [row for row in judged.rows if row.is_default]
    name = "" if judged is None else judged.model
    STDOUT.print(threshold_table(done, [(name, row.bound, row.hit_rate, row.false_hit_rate) for row in rows]))
    STDOUT.print(kind_table(done))
    if judged is not None:
        STDOUT.print(judging_table(judged))
    bench.print_paths(files)


@dataclass(frozen=True, slots=True)
class PersonasOptions:
    """The options of `eval personas` except the model's: the users, and the compared systems."""

    split: Annotated[
        str, typer.Option("--split", help="Pool of phrasings: dev (to tune on) or test (to report).")
    ] = "dev"
    users: Annotated[int, typer.Option("--users", min=1, help="Users per seed, or per file.")] = 20
    questions: Annotated[
        int,
        typer.Option(
            "--questions", min=2, help="Questions per user; for users from a file, the largest number."
        ),
    ] = 14
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of seeds 0, 1, …, each with its own users.")
    ] = 5
    further: Annotated[
        int,
        typer.Option(
            "--further",
            min=0,
            help="Number of users for whom the sweeps of stride, threshold and storage run too, with the last length of answers.",
        ),
    ] = 4
    ablations: Annotated[
        int,
        typer.Option(
            "--ablations",
            min=0,
            help="Number of users for whom the ablations and the scheduler's experiments run too, with the last length of answers.",
        ),
    ] = 20
    answers: Annotated[
        list[str] | None,
        typer.Option(
            "--answers",
            help="short (a few words, as the model answers) or long (60 to 150 tokens around those); repeatable. Default: both.",
        ),
    ] = None
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            "--decoding",
            help="How every system decodes: token (by token) or lookup (drafts from the prompt); repeatable. Default: both.",
        ),
    ] = None
    execute: Annotated[
        int,
        typer.Option(
            "--execute",
            min=0,
            help="Number of users whose requests are also executed in the model shape, all systems in turn. Takes hours.",
        ),
    ] = 0
    execute_every: Annotated[
        int,
        typer.Option("--execute-every", min=1, help="Execute every n-th question of these users only."),
    ] = 1
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="kvweave's recipe for chunk KV. Default: as in a knowledge base."),
    ] = None
    shape: Annotated[
        str,
        typer.Option(
            "--shape",
            help="Model shape whose latency is computed, with random weights; reference is the shipped model, for a quick check.",
        ),
    ] = "qwen2.5-0.5b"
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repeats of each timing.")] = 3
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            help="personas.json of an earlier run in the same shape; its times of operations are used as prices.",
        ),
    ] = None
    enronqa: Annotated[
        list[Path] | None,
        typer.Option(
            "--enronqa",
            help="Read users from this jsonl file of EnronQA instead of generating them; repeatable.",
        ),
    ] = None
    mised: Annotated[
        list[Path] | None,
        typer.Option(
            "--mised", help="Read users from this jsonl file of MISeD instead of generating them; repeatable."
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for JSON and plots. The same command resumes there."),
    ] = None

    def request(self) -> "PersonasRequest":
        """Return the comparison that the options ask for; raises InvalidRequest for files with the same user twice."""
        from kvweave_lab.eval.personas.costs import read_costs
        from kvweave_lab.eval.personas.pricing import DECODINGS
        from kvweave_lab.eval.personas.run import Request
        from kvweave_lab.eval.personas.systems import ANSWERS

        users, about = _users(self)
        recipe = self.recipe or UNCALIBRATED
        costs, measured = (None, {"shape": self.shape}) if self.costs is None else read_costs(self.costs)
        if measured["shape"] != self.shape:
            raise InvalidRequest(
                f"--costs {self.costs} has the times of {measured['shape']}, not of {self.shape}; choose --shape"
            )
        return Request(
            users,
            about | {"shape": self.shape},
            self.further,
            recipe,
            self.output,
            self.repeats,
            self.ablations,
            _chosen("--answers", self.answers, ANSWERS),
            _chosen("--decoding", self.decoding, DECODINGS),
            self.execute,
            self.execute_every,
            costs,
            {name: measured[name] for name in ("commit", "date", "threads") if name in measured},
        )

    def timed_model(self, device: str | None) -> "Adapter":
        """Load the model whose latency is computed."""
        from kvweave.models.loading import REFERENCE_NAME, load_model
        from kvweave_lab.shapes import random_model

        if self.shape == REFERENCE_NAME:
            return load_model(None)
        return random_model(self.shape, device=device or "cpu")


@bench.keeps_output
@opt.with_options(
    *opt.MODEL, model="Model that answers: hub id or local folder. Default: the shipped reference model."
)
def personas(
    *, model: opt.SharedOptions, options: PersonasOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """No cache, published caches, PerCache and kvweave on the same users: latency, hits, quality, operations, bytes."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.eval.personas.report import content, tables, write
    from kvweave_lab.eval.personas.run import compare

    opt.quiet_libraries()
    request = options.request()
    timed = options.timed_model(model.device)
    answering = model.load_model()
    with progress_bar(quiet or json) as report:
        done = compare(answering, timed, request, report)
    environment = bench.environment()
    files = write(options.output, done, environment) if options.output else []
    if json:
        print_json(content(done, environment))
        return
    for table in tables(done):
        STDOUT.print(table)
    bench.print_paths(files)


def _chosen(option: str, given: Sequence[str] | None, known: Sequence[Name]) -> tuple[Name, ...]:
    """Return the chosen names in the known order, or all if none was chosen. Raises InvalidRequest for unknown names."""
    unknown = [name for name in given or () if name not in known]
    if unknown:
        raise InvalidRequest(f"{option} {unknown[0]}: choose among {', '.join(known)}")
    return tuple(name for name in known if not given or name in given)


def _users(options: PersonasOptions) -> tuple[list["User"], dict[str, Any]]:
    """Return the users, and their description for the report."""
    from kvweave_lab.eval.personas.users import make_users, read_enronqa, read_mised

    split, users, questions, seeds = options.split, options.users, options.questions, options.seeds
    enronqa, mised = options.enronqa or [], options.mised or []
    if not (enronqa or mised):
        generated = [user for seed in range(seeds) for user in make_users(split, users, questions, seed)]
        return generated, {"split": split, "seeds": seeds, "questions of a user": questions}
    read = [user for path in enronqa for user in read_enronqa(path, users, questions)]
    read += [user for path in mised for user in read_mised(path, users, questions)]
    if len({user.name for user in read}) < len(read):
        raise InvalidRequest("two of the files hold a user of the same name; give each file once")
    names = [path.name for path in (*enronqa, *mised)]
    return read, {"files": names, "users of a file": users, "questions of a user": questions}
