"""Which layers count in a score: the rule, and where selected rows are on every family with sliding windows."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.hooks import AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheclip import AuxiliaryModel
from kvweave.recipes.methods.fusionrag import AttentionInEachChunk
from kvweave.recipes.methods.qcfuse import DigestAttention, Importance
from kvweave.recipes.methods.weave import ContextSensitivity
from kvweave.recipes.select import LayerVotes, QuestionAttention, last_layer, voting_layers
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model, tiny_tokenizer
from kvweave.types import Prompt
from support.contract import prepare, state_of

WINDOW = 16
SLIDING = [name for name, (_, settings) in FAMILIES.items() if settings.get("sliding_window") == WINDOW]
HYBRID = [name for name in SLIDING if {"layer_types", "max_window_layers"} & FAMILIES[name][1].keys()]
ASKING = ("prophetkv", "weave", "qcfuse", "kvshare", "fusionrag")
RATIO = 0.1
CHUNKS = 10
WORDS = "the river in the north and the inn on the road were there when the rain began again".split()


GEOMETRY = tiny_adapter().geometry


def with_windows(*windows):
    return replace(GEOMETRY, layers=len(windows), windows=windows)


@pytest.mark.parametrize(
    ("windows", "distance", "chosen", "layers", "lifted"),
    [
        ((None, None, None), 100, None, (0, 1, 2), None),
        ((16, 16, None), 15, None, (0, 1, 2), None),  # a window of 16 tokens reaches 15 tokens back
        ((16, 16, None), 16, None, (2,), None),
        ((16, 64, None), 40, None, (1, 2), None),
        ((16, 16, 16), 16, None, (0, 1, 2), 16),
        ((16, 64, 16, 64), 99, None, (1, 3), 64),  # those that see furthest
        (
            (16, None, 16, 16, None),
            99,
            (1, 2, 3),
            (1,),
            None,
        ),  # chosen layers that do not see it all are left out
        (
            (16, None, 16, 16, None),
            99,
            (0, 3),
            (1, 4),
            None,
        ),  # or replaced, if none of the chosen sees it all
        ((16, None, 16, None, 16), 99, (2,), (1,), None),  # by the nearest; the earlier of two
        ((16, None, 16, None, 16), 99, (-1,), (3,), None),
        ((16, 64, 16), 99, (0,), (1,), 64),
        ((16, 64, 16), 15, (0, -1), (0, 2), None),
    ],
)
def test_layers_count_that_see_everything_else_those_that_see_furthest(
    windows, distance, chosen, layers, lifted
):
    assert voting_layers(with_windows(*windows), 7, 7 + distance, chosen) == LayerVotes(layers, lifted)


def test_the_last_layer_is_the_last_one_whose_window_holds_all_tokens():
    geometry = with_windows(None, 16)
    assert [last_layer(geometry, tokens).layers for tokens in (0, 16, 17)] == [(1,), (1,), (0,)]


def named_windows(config, layers):
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_that_the_configuration_names(family):
    adapter = tiny_adapter(family)
    windows = named_windows(adapter.model.config, adapter.geometry.layers)
    assert (adapter.geometry.windows or (None,) * adapter.geometry.layers) == windows
    assert len(adapter.geometry.windows) in (0, adapter.geometry.layers)
    assert (WINDOW in windows) == (family in SLIDING)
    assert (WINDOW in windows and None in windows) == (family in HYBRID)


def adapter_with_windows(family: str, window: int | None) -> Adapter:
    """Return the tiny model with another window, None for no window, in the layers that slide."""
    model = tiny_model(family)
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = window
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = window
    return Adapter(model, tiny_tokenizer(), name=f"{family}-{window}")


def sliding_prompt(place: int = 0) -> Prompt:
    """Return chunks of more than eight windows together, the same ones in turn, and a question with a word of one of them."""
    picks = torch.randint(len(WORDS), (CHUNKS, 4), generator=torch.Generator().manual_seed(1)).tolist()
    chunks = [f"{number} " + " ".join(WORDS[i] for i in pick) for number, pick in enumerate(picks)]
    chunks[0] += " lamp"
    return Prompt("Lamp?", (*chunks[CHUNKS - place :], *chunks[: CHUNKS - place]))


@contextmanager
def hidden_windows(adapter):
    """Hide the windows from the scores, so that every layer counts; the model attends as before."""
    geometry = adapter.geometry
    adapter.geometry = replace(geometry, windows=())
    yield
    adapter.geometry = geometry


PROMPTS = range(0, CHUNKS, 2)  # the evidence is in every second chunk, once in each


class Shares:
    """Shares of selected rows in the last window of the context, means over prompts whose evidence is anywhere.

    The prompts have the same chunks in turn, so that each chunk's KV is computed once.
    """

    def __init__(self, adapter):
        self.adapter = adapter
        self.prompts, self.store = [sliding_prompt(place) for place in PROMPTS], MemoryStore()

    def of(self, name, score=None):
        """Return the share for a recipe, or for another score over the recipe's KV."""
        return sum(self._share(prompt, name, score) for prompt in self.prompts) / len(self.prompts)

    def before(self, name, score=None):
        with hidden_windows(self.adapter):
            return self.of(name, score)

    def _share(self, prompt, name, score):
        prepare(self.adapter, self.store, prompt, name)
        state = state_of(self.adapter, self.store, prompt, name)
        scores = (score or recipe_named(name).select.score).scores(state)
        self.rows = math.ceil(RATIO * state.stale.numel()) * len(self.prompts)
        selected = state.stale[top_tokens(scores, math.ceil(RATIO * state.stale.numel()))]
        last = state.context[1] - WINDOW
        self.even = float((state.stale >= last).double().mean())
        return float((selected >= last).double().mean())

    def noise(self, share):
        """Return three standard deviations of a share, of as many rows drawn independently."""
        return 3 * math.sqrt(max(share, self.even) * (1 - share) / self.rows)


@pytest.fixture(scope="module", params=SLIDING)
def shares(request):
    return Shares(tiny_adapter(request.param))


def test_the_prompts_are_eight_windows_long():
    adapter = tiny_adapter()
    for place in PROMPTS:
        tokens = adapter.template.render(sliding_prompt(place))
        chunks = [span for span in tokens.spans if span.kind == "chunk"]
        assert chunks[-1].end - chunks[1].start > 8 * WINDOW
        assert (
            tokens.user_rows[0] - chunks[-1].end < WINDOW
        )  # layers with a window see the end of the context


ATTENDING = ("prophetkv", "weave", "qcfuse", "fusionrag")


def full_layers(adapter):
    return tuple(layer for layer, window in enumerate(adapter.geometry.windows) if window is None)


def alone(name, layers):
    """Return the score of a recipe with some layers alone."""
    return {
        "prophetkv": QuestionAttention(layers),
        "weave": QuestionAttention(layers, ContextSensitivity()),
        "qcfuse": DigestAttention(layers=layers),
        "fusionrag": AttentionInEachChunk(layers[-1:]),
    }[name]


@pytest.mark.parametrize("name", ATTENDING)
def test_the_last_window_gets_what_layers_that_see_everything_give_it(shares, name):
    """Or its even share, if no layer does. When every layer counts, it gets far more."""
    layers, after = full_layers(shares.adapter), shares.of(name)
    expected = shares.before(name, alone(name, layers)) if layers else shares.even
    assert abs(after - expected) <= shares.noise(expected)
    assert shares.before(name) > after + shares.noise(after)


def test_kvshare_does_not_favour_the_last_window(shares):
    assert shares.of("kvshare") <= shares.even + shares.noise(shares.even)


@pytest.mark.parametrize("family", HYBRID)
def test_fusionrag_ends_at_the_last_layer_that_sees_the_whole_context(family):
    adapter, store = tiny_adapter(family), MemoryStore()
    prompt, ran = sliding_prompt(), []
    prepare(adapter, store, prompt, "fusionrag")
    state = state_of(adapter, store, prompt, "fusionrag")
    for layer, module in enumerate(adapter.model.model.layers):
        module.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    scores = AttentionInEachChunk().scores(state)
    assert ran == list(range(full_layers(adapter)[-1]))  # the pass ends inside that layer, before it attends
    chunks = [found.span.tokens for found in state.matched if found.origin == "reused"]
    assert [float(part.sum()) for part in scores.split(chunks)] == pytest.approx([1.0] * len(chunks))


@pytest.mark.parametrize("family", SLIDING)
def test_windows_that_cover_the_context_change_nothing(family):
    adapter = adapter_with_windows(family, 256)
    prompt, store = sliding_prompt(), MemoryStore()
    assert 256 in adapter.geometry.windows
    for name in ASKING:
        prepare(adapter, store, prompt, name)
        score = recipe_named(name).select.score
        found = score.scores(state_of(adapter, store, prompt, name))
        with hidden_windows(adapter):
            assert torch.equal(found, score.scores(state_of(adapter, store, prompt, name)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_windows_in_the_way_the_score_is_the_mean_over_all_layers(family):
    adapter, store = adapter_with_windows(family, 256), MemoryStore()
    prompt = sliding_prompt()
    prepare(adapter, store, prompt, "prophetkv")
    state, other = (state_of(adapter, store, prompt, "prophetkv") for _ in range(2))
    probe = AttentionProbe(other.question_rows, columns=other.context)
    rows = other.fresh[other.fresh <= other.question_rows[-1]]
    adapter.run_partial(other.kv_cache, other.request.prompt.token_ids, other.plan(rows, probe))
    expected = probe.weights.mean(dim=0)[other.stale - other.context[0]]
    assert torch.equal(QuestionAttention().scores(state), expected)


def test_the_pass_ends_at_the_last_layer_that_counts():
    adapter, store = tiny_adapter("gemma3"), MemoryStore()
    prompt, ran = sliding_prompt(), []
    prepare(adapter, store, prompt, "prophetkv")
    state = state_of(adapter, store, prompt, "prophetkv")
    for layer, module in enumerate(adapter.model.model.layers):
        module.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    QuestionAttention().scores(state)
    assert ran == [0]  # the pass ends inside layer 1, the only one without a window, before it attends


def test_far_keys_are_moved_to_half_a_window_and_near_ones_stay():
    adapter, store = tiny_adapter("mistral-sliding"), MemoryStore()
    prompt = sliding_prompt()
    prepare(adapter, store, prompt, "prophetkv")
    state = state_of(adapter, store, prompt, "prophetkv")
    like = torch.empty(1, adapter.geometry.kv_heads, 0, adapter.geometry.head_width)
    moved, true = (
        kv_cache.layer_kv(1, like)[0] for kv_cache in (state.cache_within_window(100), state.kv_cache)
    )
    edge, tokens = int(state.question_rows[-1]) - 50, state.request.prompt.tokens
    assert torch.equal(moved[:, :, edge:], true[:, :, edge:])
    stored = torch.cat([m.kv.layer(1)[0] for m in state.matched if m.kv is not None], dim=1)[None, :, :edge]
    angles = adapter.rotation.angles(torch.full((edge,), edge), tokens, stored)
    torch.testing.assert_close(moved[:, :, :edge], angles.rotate(1, stored))
    assert not torch.equal(moved[:, :, : edge - 1], true[:, :, : edge - 1])


def test_a_digest_is_made_from_layers_that_see_the_whole_chunk():
    adapter, store = tiny_adapter("gemma3"), MemoryStore()
    plain = tiny_model("gemma3")
    plain.set_attn_implementation("eager")
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids("Answer."))
    for tokens, layers, kind in ((8, (0, 1, 2), "importance"), (9, (1,), "importance-whole")):
        chunk = tuple(range(20, 20 + tokens))
        (entry,) = Importance().extract(ctx, [chunk])
        with torch.no_grad():
            out = plain(torch.tensor([[*ctx.prefix, *chunk, *chunk]]), output_attentions=True)
        start = len(ctx.prefix)
        paid = torch.cat([out.attentions[layer] for layer in layers])[:, :, -tokens:, start : start + tokens]
        torch.testing.assert_close(
            entry.content.tensors["importance"], paid.amax(dim=(0, 1, 2)), atol=1e-5, rtol=1e-4
        )
        assert entry.provenance.kind == kind


@pytest.mark.parametrize(("window", "layer"), [(WINDOW, 1), (256, 2)])
def test_an_auxiliary_model_is_asked_at_its_last_layer_that_sees_the_longest_chunk(window, layer):
    adapter = adapter_with_windows("gemma3", window)
    auxiliary = AuxiliaryModel(adapter)
    chunks = [auxiliary.encode(text)[0] for text in ("the inn", " ".join(WORDS))]
    question = "Lamp?"
    ids, words = auxiliary.question_tokens(question)
    for chunk, found in zip(chunks, auxiliary.attention(chunks, question), strict=True):
        before = (*auxiliary.prefix.token_ids, *chunk.token_ids)
        rows = torch.arange(len(before), len(before) + len(ids))
        probe, plan = AttentionProbe(rows[words], layers={layer}), adapter.rows(torch.arange(rows[-1] + 1))
        plan.hooks.append(probe)
        adapter.compute(adapter.new_cache(len(before) + len(ids)), (*before, *ids), plan)
        own = slice(auxiliary.prefix.tokens, len(before))
        torch.testing.assert_close(found, probe.weights[0, own], atol=1e-5, rtol=1e-4)
