"""lab/docs/selection.md: which tokens matter, from the results of `lab/experiments/selection.py`, which `build.py` passes."""

from collections.abc import Iterable, Sequence

from markdown_parts import NOT_MEASURED, Result, folded, header, row

from kvweave_lab.eval.selection.measure import DEPTHS, FACTORS, SELECTIONS

_SWEPT = ("question_stale", "question_stale_last", "deviation", "position", "random")


def selection_page(found: Result | None, images: Iterable[str]) -> str:
    """Return the text of the page; `images` are the names of the files in lab/docs/images."""
    drawn = set(images)
    lines = [
        "# Which tokens matter",
        "",
        *(_what_follows(found) if found else []),
        "Recomputing a token helps if its stale KV differs much from the exact KV *and* later tokens attend to it. `kvweave eval selection` finds",
        "for every prompt the tokens that the question and the decoded answer attend to, the tokens that an ideal selector would recompute, the",
        "error of stale KV, and how many of these tokens each selection finds (ProphetKV figs. 3, 4, 6, 7, 9; FusionRAG figs. 3, 7, 8; CacheClip",
        "fig. 2). `lab/pages/build.py` writes this page. It is about the shipped model; with `--model` the command analyses another one.",
        "",
    ]
    if found is None:
        return "\n".join([*lines, NOT_MEASURED, ""])
    tasks = ", ".join(f"`{task}`" for task in found["tasks"])
    lines += [
        f"Repeat it: `{found['command']}`.",
        "",
        f"{found['samples']} prompts of {tasks} (`test` split), {found['context_tokens']:.0f} tokens of context on average in chunks of "
        f"{found['chunk_tokens']:.0f}, of which each selection takes {found['ratio']:.0%}. Unless stated otherwise, KV is stale because chunks "
        "were prepared after the system prefix alone, and figures are means over tasks with 95 % intervals by bootstrap over prompts.",
        "",
        *_selections(found),
        *_figure(drawn, "decoding-by-ratio", "What each selection finds of the tokens decoding attends to"),
        *_answers(found),
        *_layers(found),
        *_figure(drawn, "decoding-by-layer", "What one layer alone finds, task by task"),
        *_factors(found),
        *_figure(drawn, "loss-by-factor", "Loss left when one factor selects"),
        *_deviation(found),
        *_figure(drawn, "kv-deviation", "KV deviation by layer and by place in the chunk"),
        *_places(found),
        *_figure(drawn, "places", "Where the selected tokens are"),
        *_settings(found),
        *_auxiliary(found),
        "## Commands",
        "",
        *folded([found["command"], *found["evaluations"]], f"the first one runs the others, {found['date']}"),
        "",
    ]
    return "\n".join(lines)


def _what_follows(found: Result) -> list[str]:
    """Return the main results of the tables below."""
    loss = {name: one["loss_left"]["value"] for name, one in found["selections"].items()}
    off = {kind: one["relative"][-1]["value"] for kind, one in found["deviation"].items()}
    of_decoding = found["of_decoding"]
    lines = [
        f"Recomputing {found['ratio']:.0%} of the tokens by the question's attention over stale KV leaves {loss['question_stale']:.2f} of the loss; "
        f"the deviation of values leaves {loss['deviation']:.2f}, the first tokens of chunks {loss['position']:.2f}, random tokens "
        f"{loss['random']:.2f}, the ideal ones {loss['optimal']:.2f}.",
        f"The question's attention over stale KV finds {of_decoding['question_stale']['value']:.0%} of the tokens that decoding attends to, "
        f"and under full attention {of_decoding['question_full']['value']:.0%}.",
    ]
    answers = found["answers"]
    if answers:
        scores = {
            name: values[0]["value"]
            for name, values in zip(answers["selections"], answers["score"], strict=True)
        }
        less_loss = (
            "Less loss does not mean better answers. "
            if scores["deviation"] > scores["question_stale"]
            else ""
        )
        lines.append(
            f"{less_loss}With {answers['ratios'][0]:.0%} recomputed, `deviation` scores {scores['deviation']:.3f} and "
            f"`question_stale` {scores['question_stale']:.3f}; full attention scores {answers['full_score']['value']:.3f}, nothing recomputed "
            f"{answers['stale_score']['value']:.3f}."
        )
    lines.append(
        "The KV of the last layer deviates from the exact KV by "
        + ", ".join(f"{value:.1%} (`{kind}`)" for kind, value in off.items())
        + " of its squared length, depending on the preparation."
    )
    auxiliary = found["auxiliary"]
    if auxiliary:
        lines.append(
            f"The auxiliary model predicts the last layer's attention better than the first layer does: KL {auxiliary['kl']['value']:.2f} against "
            f"{auxiliary['own_kl']['value']:.2f} nats."
        )
    lines.append(
        f"These are numbers of the shipped 10 MB model with {found['samples'] // len(found['tasks'])} prompts per task. That is enough for means over all "
        "tasks, not for a single task."
    )
    return [*(f"- {line}" for line in lines), ""]


def _figure(drawn: set[str], name: str, title: str) -> list[str]:
    file = f"selection-{name}.png"
    return [f"![{title}](images/{file})", ""] if file in drawn else []


def _selections(found: Result) -> list[str]:
    lines = [
        "## What each selection finds",
        "",
        "Each selection takes the same number of tokens. *Of decoding* is the share of the tokens with the most attention from the decoded answer "
        "that the selection contains. *Of the ideal* is the same share for the tokens with the largest residual (ProphetKV eq. 5), layer by layer, as a mean over the layers "
        "from the second on. *Loss left* is the share of ProphetKV's loss (eq. 4) that remains after recomputing the selected tokens.",
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


def _answers(found: Result) -> list[str]:
    answers = found["answers"]
    if answers is None:
        return []
    lines = [
        "Scores of answers after recomputing those tokens (ProphetKV fig. 9):",
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
        f"Full attention scores {_estimate(answers['full_score'])}; with nothing recomputed the score is {_estimate(answers['stale_score'])}. The tokens of the first "
        "row are known only after computing everything. The page of [methods](methods.md) has the scores of recipes.",
        "",
    ]


def _layers(found: Result) -> list[str]:
    by_task = found["layers_by_task"]
    count = len(found["layers"]["stale"])
    lines = [
        "## Which layers predict decoding",
        "",
        "Here the tokens that the question attends to most in a single layer are selected. The table has the share of the tokens to which decoding "
        "attends that this selection contains, as a mean over layers:",
        "",
        *header("layer", "over stale KV", "under full attention"),
    ]
    for layer in range(count):
        lines.append(
            row(f"{layer + 1}", *(_estimate(found["layers"][curve][layer]) for curve in ("stale", "full")))
        )
    best = {task: _best(curve) for task, curve in by_task.items()}
    between = [found["agreement"][a][b] for a in range(len(by_task)) for b in range(a + 1, len(by_task))]
    within = [found["agreement"][a][a] for a in range(len(by_task))]
    best_layers = ", ".join(f"layer {layer} in `{task}`" for task, layer in best.items())
    if len({*best.values()}) == 1:
        best_layers = f"layer {next(iter(best.values()))} on all of them"
    return [
        *lines,
        "",
        f"With {found['samples'] // len(by_task)} prompts of each task, which is enough for a first impression, the best one is "
        f"{best_layers}. If layers are ranked by the share they find, the ranks of two tasks correlate by {_range(between)}, and those of two halves of "
        f"one task's prompts by {_range(within)}. (Resampled prompts often rank similar layers in another order, so the intervals are wide.) The "
        "keys of the first layer depend only on their own token. This layer therefore finds the words of the question, and recomputing those leaves "
        f"{found['selections']['question_stale_first']['loss_left']['value']:.2f} of the loss.",
        "",
    ]


def _range(estimates: Sequence[Result]) -> str:
    """Return the smallest and the largest estimate."""
    ordered = sorted(estimates, key=lambda one: float(one["value"]))
    return f"{_estimate(ordered[0])} to {_estimate(ordered[-1])}"


def _best(curve: Sequence[Result]) -> int:
    """Return the number of the layer that finds most, from 1."""
    return 1 + max(range(len(curve)), key=lambda layer: float(curve[layer]["value"]))


def _factors(found: Result) -> list[str]:
    return [
        "## The factors of the loss",
        "",
        "Each factor of ProphetKV eq. 6, and the residual itself (eq. 5), selects tokens for every layer separately. The cells have the share of the loss "
        "that is left, by the share of tokens recomputed.",
        "",
        *header("factor", *(f"{ratio:.0%}" for ratio in found["ratios"])),
        *(
            row(f"`{name}`: {FACTORS[name]}".replace("|", "\\|"), *map(_estimate, losses))
            for name, losses in found["factors"].items()
        ),
        "",
    ]


def _deviation(found: Result) -> list[str]:
    kinds = found["deviation"]
    layers = range(len(next(iter(kinds.values()))["relative"]))
    return [
        "## The error of stale KV",
        "",
        "The table has the squared deviation of keys and values from full attention's (FusionRAG eq. 7), as a share of their squared length. *Bare* chunks are "
        "prefilled alone, *isolated* ones after the system prefix, *similar* ones after the chunks most similar to them, *following* ones after the "
        "previous chunk of their document.",
        "",
        *header("layer", *(f"`{kind}`" for kind in kinds)),
        *(
            row(f"{layer + 1}", *(_estimate(kind["relative"][layer]) for kind in kinds.values()))
            for layer in layers
        ),
        "",
    ]


def _places(found: Result) -> list[str]:
    off = next(iter(found["deviation"].values()))
    chunks = max(len(one["chunks"]) for one in found["selections"].values())
    lines = ["## Where the selected tokens are", ""]
    for title, part, count in (("By tenth of the chunk", "depths", DEPTHS), ("By chunk", "chunks", chunks)):
        lines += [
            f"{title}, as shares of the selected tokens; the last line has the deviation of the second layer's keys and values:",
            "",
            *header("tokens are ranked by", *(f"{number}" for number in range(1, count + 1)), "widest ±"),
            *(row(f"`{name}`", *_shares(one[part])) for name, one in found["selections"].items()),
            row("*KV deviation*", *_shares(off[part])),
            "",
        ]
    return lines


def _shares(shares: Sequence[Result]) -> list[str]:
    """Return the shares, and half the width of their widest interval."""
    widest = max((share["high"] - share["low"]) / 2 for share in shares)
    return [*(f"{share['value']:.2f}" for share in shares), f"{widest:.3f}"]


def _settings(found: Result) -> list[str]:
    settings = sorted(
        [found, *found["others"]], key=lambda one: (round(one["context_tokens"], -2), one["chunk_tokens"])
    )
    kinds = list(settings[0]["last_layer_off"])
    lines = [
        "## Other chunks and lengths",
        "",
        "Each column has the same number of prompts. *Error* is the deviation of the last layer's KV, as above.",
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
            row(f"error: `{kind}`", *(_estimate(one["last_layer_off"][kind]) for one in settings))
            for kind in kinds
        ),
        row(
            "auxiliary model's KL minus the first layer's",
            *(_estimate(one["auxiliary_kl"]) for one in settings),
        ),
    ]
    return [*lines, ""]


def _auxiliary(found: Result) -> list[str]:
    one = found["auxiliary"]
    if one is None:
        return []
    return [
        "## The auxiliary model",
        "",
        "The table shows how well other layers predict the attention of the reference model's last layer under full attention (CacheClip §2.8), on the "
        f"{one['samples']} prompts whose tokens can be aligned between both models:",
        "",
        *header("predicted by", "KL, nats", "Jaccard, top 20 %"),
        row("the auxiliary model's last layer", _estimate(one["kl"]), _estimate(one["jaccard"])),
        row("the reference model's first layer", _estimate(one["own_kl"]), _estimate(one["own_jaccard"])),
        row("difference, paired", _estimate(one["kl_difference"]), _estimate(one["jaccard_difference"])),
        "",
    ]


def _estimate(one: Result) -> str:
    low, high = sorted((one["low"], one["high"]))
    return f"{one['value']:.3f} ({low:.3f} to {high:.3f})"
