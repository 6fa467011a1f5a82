"""The part of docs/evaluation.md on which tokens matter, from what `benchmarks/selection.py` left. Reads no files."""

from collections.abc import Mapping
from typing import Any

from kvweave.evaluation.selection.rankings import SELECTIONS

Found = Mapping[str, Any]


def selection_part(found: Found) -> str:
    """Selections and layers against decoding, and the auxiliary model against the first layer."""
    tasks = ", ".join(f"`{task}`" for task in found["tasks"])
    return "\n".join(
        [
            f"Seen on {found['samples']} prompts of {tasks}, {found['context_tokens']:.0f} tokens of context on the mean, of which each selection takes "
            f"{found['ratio']:.0%}; 95 % intervals. *Of decoding*: the share of the tokens to which the decoded answer attends most "
            "that the selection has. *Loss left*: the share of ProphetKV's loss (eq. 4) that recomputing its tokens leaves.",
            "",
            "| tokens are ranked by | of decoding | loss left |",
            "|---|---|---|",
            *(
                f"| {SELECTIONS[name]} | {_estimate(one['of_decoding'])} | {_estimate(one['loss_left'])} |"
                for name, one in found["selections"].items()
            ),
            "",
            "Layer by layer, what the question's most attended tokens of that layer alone find of the tokens to which decoding attends:",
            "",
            *_layers(found["layers"]),
            "",
            *_auxiliary(found),
            f"`{found['command']}`, which runs `{found['evaluation']}`, {found['date']}.",
        ]
    )


def _layers(curves: Found) -> list[str]:
    lines = ["| layer | over stale KV | under full attention |", "|---|---|---|"]
    for layer, (stale, full) in enumerate(zip(curves["stale"], curves["full"], strict=True), 1):
        lines.append(f"| {layer} | {_estimate(stale)} | {_estimate(full)} |")
    return lines


def _auxiliary(found: Found) -> list[str]:
    one = found["auxiliary"]
    if one is None:
        return []
    return [
        "How well the reference model's last layer under full attention is foreseen (CacheClip §2.8), over the "
        f"{one['samples']} prompts that both can be laid side by side on:",
        "",
        "| foreseen by | KL, nats | Jaccard, top 20 % |",
        "|---|---|---|",
        f"| the auxiliary model's last layer | {_estimate(one['kl'])} | {_estimate(one['jaccard'])} |",
        f"| the reference model's first layer | {_estimate(one['own_kl'])} | {_estimate(one['own_jaccard'])} |",
        f"| difference, paired | {_estimate(one['kl_difference'])} | {_estimate(one['jaccard_difference'])} |",
        "",
    ]


def _estimate(one: Found) -> str:
    low, high = sorted((one["low"], one["high"]))
    return f"{one['value']:.3f} ({low:.3f} to {high:.3f})"
