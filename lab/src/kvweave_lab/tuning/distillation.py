"""What an auxiliary model learns: the attention of the model that answers, its own attention, and their distance.

Training runs plain PyTorch through the unmodified model with the library's eager attention. Measuring runs the model as
recipes do. Knows nothing of steps or files.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter
from kvweave.models.attention import ATTENTION_NAME
from kvweave.models.hooks import AttentionProbe
from kvweave.models.prompt import SEPARATOR
from kvweave.ops.scores import Offsets, top_tokens
from kvweave.recipes.methods.cacheclip import AuxiliaryModel
from kvweave.recipes.request import Budget
from kvweave.recipes.select import last_layer
from kvweave.types import Prompt
from kvweave_lab.eval.selection.layer_attention import TOP_SHARE
from kvweave_lab.eval.selection.measure import attention_divergence, jaccard
from kvweave_lab.scores import transfer_scores


@dataclass(frozen=True, slots=True)
class TeacherExample:
    """A prompt, and how much the primary's question attends to its chunks' tokens in the last layer that sees them all.

    `attended` has (n,) for each chunk, under full attention: the weights of the rows that the user wrote, averaged over
    rows and heads, with the softmax over the context alone. `offsets` are the characters of those tokens.
    """

    question: str
    chunks: tuple[str, ...]
    attended: tuple[Tensor, ...]
    offsets: tuple[Offsets, ...]

    def transferred(self, scores: Sequence[Tensor], offsets: Sequence[Offsets]) -> Tensor:
        """Return scores of another tokenizer's tokens of every chunk as scores of the primary's, (N,)."""
        return _transfer(self.chunks, scores, offsets, self.offsets)

    def wanted(self, offsets: Sequence[Offsets]) -> Tensor:
        """Return the primary's attention as a distribution over another tokenizer's tokens of all chunks, (N′,) float32."""
        shares = _transfer(self.chunks, self.attended, self.offsets, offsets)
        return (shares / shares.sum().clamp_min(1e-12)).float()


def observe_teacher(primary: Adapter, prompt: Prompt) -> TeacherExample | None:
    """Run a full prefill of the primary; return None for a prompt that is too long or has no chunks."""
    rendered = primary.template.render(prompt)
    spans = [span for span in rendered.spans if span.kind == "chunk"]
    if not spans or rendered.tokens > primary.geometry.context_tokens:
        return None
    first, end = spans[0].start, spans[-1].end
    start, stop = rendered.user_rows
    question = rendered.spans[-1]
    asked = torch.arange(start, stop) if stop > start else torch.arange(question.start, question.end)
    votes = last_layer(primary.geometry, int(asked[-1]) + 1 - first)
    probe = AttentionProbe(asked, columns=(first, end), layers=votes.layers, lift_windows=votes.lift_windows)
    plan = primary.rows(torch.arange(rendered.tokens))
    plan.hooks.append(probe)
    primary.compute(primary.new_cache(rendered.tokens), rendered.token_ids, plan)
    weights = probe.weights[0].cpu()
    return TeacherExample(
        prompt.question,
        prompt.chunks,
        tuple(weights[span.start - first : span.end - first] for span in spans),
        tuple(
            primary.template.token_offsets(rendered.ids(span), prompt.chunks[span.chunk]) for span in spans
        ),
    )


@dataclass(frozen=True, slots=True)
class StudentExample:
    """An example in the auxiliary's tokens: one pass for each of C chunks, prefix ++ chunk ++ question.

    `ids` (C, T) are padded after the question, where no row attends. `chunks` and `asked` are the rows of each chunk,
    and of the user's words, in its pass. `wanted` (N,) is the target distribution over all chunks' tokens.
    """

    ids: Tensor
    chunks: tuple[slice, ...]
    asked: tuple[slice, ...]
    wanted: Tensor


def student_example(auxiliary: AuxiliaryModel, example: TeacherExample) -> StudentExample:
    """Return the passes with which `AuxiliaryModel.attention` scores the example's chunks, without stored KV."""
    prefix = auxiliary.prefix.token_ids
    question, words = auxiliary.question_tokens(example.question)
    first, end, _ = words.indices(len(question))
    read = [auxiliary.tokenize(text) for text in example.chunks]
    passes = [torch.tensor((*prefix, *ids, *question)) for ids, _ in read]
    ends = [len(prefix) + len(ids) for ids, _ in read]
    return StudentExample(
        torch.nn.utils.rnn.pad_sequence(passes, batch_first=True),
        tuple(slice(len(prefix), edge) for edge in ends),
        tuple(slice(edge + first, edge + end) for edge in ends),
        example.wanted([offsets for _, offsets in read]),
    )


@contextmanager
def differentiable(adapter: Adapter) -> Iterator[None]:
    """Let the model attend with the library's eager function, which returns its weights, during training."""
    adapter.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        adapter.model.set_attn_implementation(ATTENTION_NAME)


def loss(adapter: Adapter, given: StudentExample) -> Tensor:
    """Return KL(primary ‖ auxiliary) over the auxiliary's context tokens, in nats."""
    predicted, wanted = predicted_attention(adapter, given), given.wanted.to(adapter.geometry.device)
    floor = 1e-9
    return (wanted * (wanted.clamp_min(floor).log() - predicted.clamp_min(floor).log())).sum()


def predicted_attention(adapter: Adapter, given: StudentExample) -> Tensor:
    """Return last-layer attention from the question to the chunks' tokens, normalised over all passes to sum 1, (N,).

    The layer is the one that `AuxiliaryModel.attention` looks at. The library's function keeps its window.
    """
    longest = max(asked.stop - chunk.start for asked, chunk in zip(given.asked, given.chunks, strict=True))
    (layer,) = last_layer(adapter.geometry, longest).layers
    out = adapter.model(
        input_ids=given.ids.to(adapter.geometry.device),
        use_cache=False,
        output_attentions=True,
        logits_to_keep=1,
    )
    weights = out.attentions[layer]  # (C, H, T, T)
    scores = [
        weights[number, :, rows, columns].mean(dim=(0, 1))
        for number, (rows, columns) in enumerate(zip(given.asked, given.chunks, strict=True))
    ]
    together = torch.cat(scores)
    return together / together.sum()


@dataclass(frozen=True, slots=True)
class Agreement:
    """How similarly the auxiliary and the primary attend, as means over prompts (CacheClip §2.8).

    `kl` is KL(primary ‖ auxiliary) in nats over the primary's context tokens; `jaccard` is that of their top 20 %.
    """

    kl: float
    jaccard: float


def measure_agreement(adapter: Adapter, examples: Sequence[TeacherExample]) -> Agreement:
    """Measure agreement with every chunk encoded alone and the question over each, as in indexing and in a request."""
    auxiliary = AuxiliaryModel(adapter)
    found = [_agreement(auxiliary, example) for example in examples]
    count = len(found)
    return Agreement(sum(one.kl for one in found) / count, sum(one.jaccard for one in found) / count)


def _agreement(auxiliary: AuxiliaryModel, example: TeacherExample) -> Agreement:
    kv, offsets = zip(*(auxiliary.encode(text) for text in example.chunks), strict=True)
    predicted = example.transferred(auxiliary.attention(kv, example.question), offsets)
    attended = torch.cat(example.attended)
    count = Budget(TOP_SHARE).max_rows(attended.numel())
    same = jaccard(top_tokens(predicted, count), top_tokens(attended, count))
    return Agreement(attention_divergence(attended, predicted), float(same))


def _transfer(
    chunks: Sequence[str], scores: Sequence[Tensor], source: Sequence[Offsets], target: Sequence[Offsets]
) -> Tensor:
    parts = [
        transfer_scores(one, have, want, len(text) + len(SEPARATOR))
        for text, one, have, want in zip(chunks, scores, source, target, strict=True)
    ]
    return torch.cat(parts)
