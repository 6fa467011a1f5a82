"""lab/docs/selection.md: which tokens matter, from what `lab/experiments/selection.py` left. Reads no files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tables import NOT_MEASURED, folded, header, row

from kvweave_lab.eval.selection.measure import DEPTHS
from kvweave_lab.eval.selection.rankings import FACTORS, SELECTIONS

FoundChunk = Mapping[str, Any]

_SWEPT = ("question_stale", "question_stale_last", "deviation", "position", "random")


def selection_page(found: FoundChunk | None, images: Iterable[str]) -> str:
    """The page; `images` are the names of files in docs/images."""
    drawn = set(images)
    lines = [
        "# Which tokens matter",
        "",
        "Recomputing pays where stale KV is far off *and* somebody looks. `kvweave eval selection` takes every prompt apart: which tokens",
        "the question and the decoded answer attend to, which ones an ideal selector would recompute, how far stale KV is off, and what each",
        "way of selecting finds of that (ProphetKV figs. 3, 4, 6, 7, 9; FusionRAG figs. 3, 7, 8; CacheClip fig. 2). This page is written by",
        "`lab/pages/build.py`. It is about the model that ships; with `--model` the command takes any other one apart.",
        "",
    ]
    if found is None:
        return "\n".join([*lines, NOT_MEASURED, ""])
    tasks = ", ".join(f"`{task}`" for task in found["tasks"])
    lines += [
        f"{found['samples']} prompts of {tasks} (`test` split), {found['context_tokens']:.0f} tokens of context on the mean in chunks of "
        f"{found['chunk_tokens']:.0f}, of which each selection takes {found['ratio']:.0%}. Where nothing else is said, KV is stale as chunks "
        "prepared behind the system prefix alone leave it, and figures are means over tasks with 95 % intervals by bootstrap over prompts.",
        "",
        *_selections(found),
        *_figure(drawn, "decoding-by-ratio", "What each selection finds of the tokens decoding attends to"),
        *_answers(found),
        *_layers(found),
        *_figure(drawn, "decoding-by-layer", "What one layer alone finds, task by task"),
        *_factors(found),
        *_figure(drawn, "loss-by-factor", "Loss left when one factor chooses"),
        *_deviation(found),
        *_figure(drawn, "kv-deviation", "KV deviation by layer and by place in the chunk"),
        *_places(found),
        *_figure(drawn, "places", "Where the selected tokens lie"),
        *_settings(found),
        *_auxiliary(found),
        "## Commands",
        "",
        *folded(
            [found["command"], *found["evaluations"]], f"the first of which runs the others, {found['date']}"
        ),
        "",
    ]
    return "\n".join(lines)


def _figure(drawn: set[str], name: str, said: str) -> list[str]:
    file = f"selection-{name}.png"
    return [f"![{said}](images/{file})", ""] if file in drawn else []


def _selections(found: FoundChunk) -> list[str]:
    lines = [
        "## What each selection finds",
        "",
        "*Of decoding*: the share that it has of the equally many tokens to which the decoded answer attends most. *Of the ideal*: the same for the "
        "tokens whose residual (ProphetKV eq. 5) is largest, layer by layer, mean over layers from the second on. *Loss left*: the share of "
        "ProphetKV's loss (eq. 4) that recomputing its tokens leaves.",
        "",
        *header("tokens are ranked by", "of decoding", "of the ideal", "loss left"),
    ]
    for name, one in found["selections"].items():
        lines.append(
            row(
                f"`{name}`: {SELECTIONS[name]}",
                _estimate(found["of_decoding"][name]),
                _estimate(one["of_optimal"]),
                _estimate(one["loss_left"]),
            )
        )
    return [*lines, ""]


def _answers(found: FoundChunk) -> list[str]:
    answers = found["answers"]
    if answers is None:
        return []
    lines = [
        "Recomputing those tokens and answering (ProphetKV fig. 9), scores:",
        "",
        *header("recomputed", *(f"{ratio:.0%}" for ratio in answers["ratios"])),
        *(
            row(f"`{name}`", *map(_estimate, scores))
            for name, scores in zip(answers["selections"], answers["score"], strict=True)
        ),
    ]
    return [
        *lines,
        "",
        f"Full attention scores {_estimate(answers['full_score'])}, nothing recomputed {_estimate(answers['stale_score'])}. The first row's "
        "tokens can only be known by computing everything; what recipes reach stands on the page of [methods](methods.md).",
        "",
    ]


def _layers(found: FoundChunk) -> list[str]:
    by_task = found["layers_by_task"]
    count = len(found["layers"]["stale"])
    lines = [
        "## Which layers foresee decoding",
        "",
        "What the question's most attended tokens of one layer alone find of the tokens to which decoding attends, mean over layers:",
        "",
        *header("layer", "over stale KV", "under full attention"),
    ]
    for layer in range(count):
        lines.append(
            row(
                f"{layer + 1}",
                *(_estimate(found["layers"][curve][layer]) for curve in ("stale", "full")),
            )
        )
    best = {task: _best(curve) for task, curve in by_task.items()}
    between = [found["agreement"][a][b] for a in range(len(by_task)) for b in range(a + 1, len(by_task))]
    within = [found["agreement"][a][a] for a in range(len(by_task))]
    said = ", ".join(f"layer {layer} in `{task}`" for task, layer in best.items())
    if len({*best.values()}) == 1:
        said = f"layer {next(iter(best.values()))} on all of them"
    return [
        *lines,
        "",
        f"Are they the same layers on every task? With {found['samples'] // len(by_task)} prompts of each, which is enough for a first look: the best one is "
        f"{said}. Ranked by what they find, the layers of two tasks correlate by {_range(between)}; those of two halves of one task's prompts by "
        f"{_range(within)}. (Resampled prompts rank close layers otherwise more often than they rank them the same, so the intervals reach low.) The first layer's "
        "keys know their own token alone: what it finds are words of the question, and recomputing those leaves "
        f"{found['selections']['question_stale_first']['loss_left']['value']:.2f} of the loss.",
        "",
    ]


def _range(estimates: Sequence[FoundChunk]) -> str:
    """The smallest and the largest."""
    ordered = sorted(estimates, key=lambda one: float(one["value"]))
    return f"{_estimate(ordered[0])} to {_estimate(ordered[-1])}"


def _best(curve: Sequence[FoundChunk]) -> int:
    """The number of the layer that finds most, from 1."""
    return 1 + max(range(len(curve)), key=lambda layer: float(curve[layer]["value"]))


def _factors(found: FoundChunk) -> list[str]:
    return [
        "## What the loss is made of",
        "",
        "The factors of ProphetKV eq. 6 and the residual itself (eq. 5), each choosing tokens for every layer on its own: the share of the loss left, by "
        "the share of tokens recomputed.",
        "",
        *header("factor", *(f"{ratio:.0%}" for ratio in found["ratios"])),
        *(
            row(f"`{name}`: {FACTORS[name]}".replace("|", "\\|"), *map(_estimate, losses))
            for name, losses in found["factors"].items()
        ),
        "",
    ]


def _deviation(found: FoundChunk) -> list[str]:
    kinds = found["deviation"]
    layers = range(len(next(iter(kinds.values()))["relative"]))
    return [
        "## How far stale KV is off",
        "",
        "Squared deviation of keys and values from full attention's (FusionRAG eq. 7), as a share of their squared length. *Bare* chunks are "
        "prefilled alone, *isolated* ones behind the system prefix, *similar* ones behind the chunks most similar to them, *following* ones behind the "
        "chunk before them in their document.",
        "",
        *header("layer", *(f"`{kind}`" for kind in kinds)),
        *(
            row(f"{layer + 1}", *(_estimate(kind["relative"][layer]) for kind in kinds.values()))
            for layer in layers
        ),
        "",
    ]


def _places(found: FoundChunk) -> list[str]:
    off = next(iter(found["deviation"].values()))
    chunks = max(len(one["chunks"]) for one in found["selections"].values())
    lines = ["## Where the selected tokens lie", ""]
    for said, part, count in (("By tenth of the chunk", "depths", DEPTHS), ("By chunk", "chunks", chunks)):
        lines += [
            f"{said}, as shares of the selected tokens; the last line has the deviation of the second layer's keys and values:",
            "",
            *header("tokens are ranked by", *(f"{number}" for number in range(1, count + 1)), "widest ±"),
            *(row(f"`{name}`", *_shares(one[part])) for name, one in found["selections"].items()),
            row("*KV deviation*", *_shares(off[part])),
            "",
        ]
    return lines


def _shares(shares: Sequence[FoundChunk]) -> list[str]:
    """The shares, and half of the widest of their intervals."""
    widest = max((share["high"] - share["low"]) / 2 for share in shares)
    return [*(f"{share['value']:.2f}" for share in shares), f"{widest:.3f}"]


def _settings(found: FoundChunk) -> list[str]:
    settings = sorted(
        [found, *found["others"]], key=lambda one: (round(one["context_tokens"], -2), one["chunk_tokens"])
    )
    kinds = list(settings[0]["last_layer_off"])
    lines = [
        "## Other chunks and lengths",
        "",
        "Each with as many prompts. *Off*: how far KV of the last layer is off, as above.",
        "",
        *header(
            "",
            *(
                f"{one['context_tokens']:,.0f} tokens in chunks of {one['chunk_tokens']:.0f}"
                for one in settings
            ),
        ),
        *(
            row(f"of decoding: `{name}`", *(_estimate(one["of_decoding"][name]) for one in settings))
            for name in _SWEPT
        ),
        row("loss left: `question_stale`", *(_estimate(one["loss_left"]) for one in settings)),
        *(
            row(f"off: `{kind}`", *(_estimate(one["last_layer_off"][kind]) for one in settings))
            for kind in kinds
        ),
        row(
            "auxiliary model's KL minus the first layer's",
            *(_estimate(one["auxiliary_kl"]) for one in settings),
        ),
    ]
    return [*lines, ""]


def _auxiliary(found: FoundChunk) -> list[str]:
    one = found["auxiliary"]
    if one is None:
        return []
    return [
        "## The auxiliary model",
        "",
        "How well the reference model's last layer under full attention is foreseen (CacheClip §2.8), over the "
        f"{one['samples']} prompts that both can be laid side by side on:",
        "",
        *header("foreseen by", "KL, nats", "Jaccard, top 20 %"),
        row("the auxiliary model's last layer", _estimate(one["kl"]), _estimate(one["jaccard"])),
        row("the reference model's first layer", _estimate(one["own_kl"]), _estimate(one["own_jaccard"])),
        row("difference, paired", _estimate(one["kl_difference"]), _estimate(one["jaccard_difference"])),
        "",
    ]


def _estimate(one: FoundChunk) -> str:
    low, high = sorted((one["low"], one["high"]))
    return f"{one['value']:.3f} ({low:.3f} to {high:.3f})"
