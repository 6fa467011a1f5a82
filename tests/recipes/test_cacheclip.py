"""CacheClip against its definition: plain passes of the auxiliary model, with windows and mapping spelled out."""

import math
import os
from collections import defaultdict
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvweave
from kvweave.kvstore.layers import VerifiedLayers
from kvweave.models import loading
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheclip import AuxiliaryModel, load_auxiliary
from kvweave.recipes.recipe import run
from kvweave.testing import tiny_model, tiny_tokenizer

WORDS = "the river in the north and the größe inn of 1984 were – there on the road when rain began 🌧 again".split()
SHIPPED = loading.Path(loading.__file__).parent / loading.AUXILIARY_NAME


def text(number: int, words: int = 22) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(number)).tolist()
    return f"{number} " + " ".join(WORDS[i] for i in picks)


@pytest.fixture
def prompt():
    return kvweave.Prompt("Where is the inn, in 1984?", tuple(text(i) for i in range(4)), system="Answer.")


@pytest.fixture(scope="module")
def small_auxiliary(tmp_path_factory):
    """A folder with another auxiliary model, whose context is 64 tokens."""
    folder = tmp_path_factory.mktemp("auxiliary")
    model = tiny_model("llama", seed=7)
    model.config.max_position_embeddings = 64
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@cache
def plain_model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, attn_implementation="eager", dtype=torch.float32)


@cache
def plain_scores(chunk: str, question: str) -> tuple[list[float], list[tuple[int, int]]]:
    """Return scores and characters of a chunk's tokens, by one ordinary pass over prefix ++ chunk ++ question."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)

    def encode(part):
        found = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    parts = (
        "Read the notes below and answer the questions.\n\n", chunk, "\n\n", "Question: ", question, " Answer:",
    )  # fmt: skip
    ids = [[tokenizer.bos_token_id], *(encode(part)[0] for part in parts)]
    edges = torch.tensor([0, *(len(part) for part in ids)]).cumsum(0).tolist()
    with torch.no_grad():
        out = plain_model()(torch.tensor([[token for part in ids for token in part]]), output_attentions=True)
    asked = out.attentions[-1][0][:, edges[5] : edges[6]]  # (H, rows, tokens)
    scores = asked[:, :, edges[2] : edges[4]].mean(dim=(0, 1)).tolist()
    own, between = encode(chunk)[1], encode("\n\n")[1]
    return scores, [*own, *((len(chunk) + a, len(chunk) + b) for a, b in between)]


def kept(scores: list[list[float]], count: int, window: int, more_than: int) -> set[tuple[int, int]]:
    """Return chunk and number of the auxiliary's tokens that are selected and kept (CacheClip §3.3)."""
    ranked = sorted(
        (-score, chunk, token) for chunk, part in enumerate(scores) for token, score in enumerate(part)
    )
    windows = defaultdict(list)
    for _, chunk, token in ranked[:count]:
        windows[chunk, token // window].append((chunk, token))
    return {each for inside in windows.values() if len(inside) > more_than for each in inside}


def expected(adapter, prompt, ratio: float, *, refill: bool) -> list[int]:
    rendered = adapter.template.render(prompt)
    stale = [span for span in rendered.spans if span.kind == "chunk"][1:]
    texts = [prompt.chunks[span.chunk] for span in stale]
    scores, characters = zip(*(plain_scores(each, prompt.question) for each in texts), strict=True)
    tokens = sum(map(len, scores))
    budget = math.ceil(ratio * sum(span.tokens for span in stale))
    shared = {  # the auxiliary's tokens that share a character with each row
        span.start + number: {
            (chunk, token) for token, (a, b) in enumerate(characters[chunk]) if a < end and start < b
        }
        for chunk, span in enumerate(stale)
        for number, (start, end) in enumerate(adapter.template.chunk_offsets(texts[chunk]))
    }
    rows: list[int] = []
    for count in range(1, (tokens if refill else math.ceil(ratio * tokens)) + 1):
        found = kept(scores, count, window=8, more_than=5)
        rows += [row for row, own in shared.items() if row not in rows and own & found]
    return sorted(rows[:budget])


def selected(adapter, store, prompt, name, **budget) -> list[int]:
    result = kvweave.prefill(adapter, store, prompt, recipe=name, **budget)
    assert result.plan.recomputed_tokens == len(result.selected)
    return result.selected.tolist()


@pytest.mark.parametrize("name", ["cacheclip", "cacheclip-windows"])
def test_rows_are_those_of_the_definition(adapter, store, prompt, name):
    kvweave.prepare(adapter, store, prompt.chunks, recipe=name, system=prompt.system)
    for ratio in (0.3, 0.6, 0.8):
        rows = selected(adapter, store, prompt, name, ratio=ratio)
        assert rows == expected(adapter, prompt, ratio, refill=name == "cacheclip")
        assert rows


def test_the_whole_budget_is_spent(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system)
    stale = sum(len(adapter.template.chunk_ids(chunk)) for chunk in prompt.chunks[1:])
    for ratio in (0.01, 0.1, 0.2, 0.5, 0.99):
        assert len(selected(adapter, store, prompt, "cacheclip", ratio=ratio)) == math.ceil(ratio * stale)


def test_a_selection_fixed_before_windows_drop_from_it_recomputes_next_to_nothing(adapter, store, prompt):
    """Six of a tenth of the tokens hardly ever fall into one window of eight: why `cacheclip` selects on."""
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system)
    stale = sum(len(adapter.template.chunk_ids(chunk)) for chunk in prompt.chunks[1:])
    assert len(selected(adapter, store, prompt, "cacheclip-windows", ratio=0.1)) < 0.1 * stale / 2
    assert len(selected(adapter, store, prompt, "cacheclip", ratio=0.1)) == math.ceil(0.1 * stale)


def test_chunks_encoded_at_indexing_time_are_not_encoded_again(adapter, store, prompt, monkeypatch):
    assert kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system) == 4
    assert kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system) == 0
    with monkeypatch.context() as patched:
        patched.setattr(AuxiliaryModel, "encode", lambda *_: pytest.fail("a chunk is encoded again"))
        rows = selected(adapter, store, prompt, "cacheclip", ratio=0.5)
    assert rows
    with kvweave.ChunkStore(
        store.folder / "bare"
    ) as other:  # no features: the request encodes the chunks itself
        kvweave.prepare(adapter, other, prompt.chunks, recipe="reuse", system=prompt.system)
        assert selected(adapter, other, prompt, "cacheclip", ratio=0.5) == rows


def test_the_auxiliary_model_runs_while_kv_is_loading(adapter, store, prompt, monkeypatch):
    """While the auxiliary model runs, the kernel has been asked for every file and no layer has been awaited."""
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system)
    seen = []

    def record(owner, name, what):
        plain = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, **named: (seen.append(what), plain(*given, **named))[1]
        )

    record(os, "posix_fadvise", "loading starts")
    record(VerifiedLayers, "layer", "used")
    record(AuxiliaryModel, "attention", "auxiliary")
    with kvweave.ChunkStore(store.folder) as reopened:
        assert selected(adapter, reopened, prompt, "cacheclip", ratio=0.5)
    at_work = seen.index("auxiliary")
    assert seen[:at_work].count("loading starts") >= len(prompt.chunks) + 1  # the system prefix
    assert "used" not in seen[:at_work]
    assert seen[at_work:].count("used") >= adapter.geometry.layers * (len(prompt.chunks) + 1)


def test_features_do_not_depend_on_the_users_instruction(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system="Another.")
    features = store.stats().entries
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system)
    assert store.stats().entries == features + 4 + 1  # the chunks' KV and the prefix's, and no more features


def test_each_auxiliary_model_has_its_own_features(adapter, store, prompt, small_auxiliary):
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system)
    other = recipe_named("cacheclip", auxiliary=small_auxiliary)
    assert kvweave.prepare(adapter, store, prompt.chunks, recipe=other, system=prompt.system) == 4
    kinds = [kind for kind in store.stats().by_kind if kind.startswith("auxiliary-")]
    assert len(kinds) == 2
    assert load_auxiliary(small_auxiliary) is load_auxiliary(small_auxiliary)
    assert load_auxiliary(small_auxiliary).adapter.geometry.device.type == "cpu"


def test_only_the_beginning_of_a_chunk_beyond_the_auxiliary_context_is_selected(
    adapter, store, prompt, small_auxiliary
):
    recipe = recipe_named("cacheclip-windows", auxiliary=small_auxiliary)
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    rendered = adapter.template.render(prompt)
    auxiliary = load_auxiliary(small_auxiliary)
    seen = 64 - auxiliary.prefix.tokens  # both tokenizers are the same here
    assert 0 < seen < min(span.tokens for span in rendered.spans[2:5])
    rows = run(recipe, adapter, store, rendered, ratio=0.95).selected.tolist()
    spans = rendered.spans[2:5]
    inside = {row for span in spans for row in range(span.start, span.start + seen)}
    assert rows
    assert inside.issuperset(rows)
    filled = recipe_named("cacheclip", auxiliary=small_auxiliary)  # spends its budget, with the rest at last
    assert inside.issubset(run(filled, adapter, store, rendered, ratio=0.95).selected.tolist())


@pytest.mark.parametrize("name", ["cacheclip", "cacheclip-windows"])
def test_a_coverage_selects_within_its_bounds(adapter, store, prompt, name):
    kvweave.prepare(adapter, store, prompt.chunks, recipe=name, system=prompt.system)
    stale = sum(len(adapter.template.chunk_ids(chunk)) for chunk in prompt.chunks[1:])
    counts = [len(selected(adapter, store, prompt, name, coverage=share)) for share in (0.3, 0.6, 0.9, 1.0)]
    assert counts == sorted(counts)
    assert counts[-1] <= math.ceil(0.5 * stale)
    assert counts[-1] > 0


ODD = {
    "empty": "",
    "blank": " \n",
    "control": "<bos>x<pad> <eos>",
    "unknown": "東京 ﷽ \x00\x7f",
    "bytes": "🌧" * 30,
    "combining": "a\u0301" * 40,
}


@pytest.mark.parametrize("chunk", ODD.values(), ids=ODD)
def test_unusual_texts_are_accepted(adapter, store, chunk):
    for question in ("", "<eos> größer 🌧\x00?"):
        prompt = kvweave.Prompt(question, ("the inn", chunk, chunk, text(1)), system="Answer.")
        kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheclip", system=prompt.system)
        for name in ("cacheclip", "cacheclip-windows"):
            result = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=0.5)
            assert result.logits.isfinite().all()


def test_a_tokenizer_without_offsets_gives_the_same_rows(adapter, store, monkeypatch):
    letters = tuple(" ".join(f"kvw{n}j{m}pm" for m in range(9)) for n in range(4))  # a token each
    prompt = kvweave.Prompt("Where is kvw2?", letters, system="Answer.")
    kvweave.prepare(adapter, store, prompt.chunks, recipe="reuse", system=prompt.system)
    rows = selected(adapter, store, prompt, "cacheclip", ratio=0.6)
    assert rows
    monkeypatch.setattr(adapter.template, "chunk_offsets", lambda text: None)
    assert selected(adapter, store, prompt, "cacheclip", ratio=0.6) == rows
