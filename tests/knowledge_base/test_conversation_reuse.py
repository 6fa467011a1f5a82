"""Every turn of a conversation reuses stored chunk KV, also after earlier turns."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.answering.generation import Decoded
from kvweave.answering.pipeline import prefill_turn
from kvweave.chat import Conversation, ConversationSettings
from kvweave.config import GenerationConfig
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import PrefillResult
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt

FIRST, LATER = (
    ("The lamp is in the hall.",),
    ("The key is under the stone.", "Rain fell on the tin roof. " * 3),
)
NEW_TOKENS = 6
SMALL = {
    "window": 8,
    "clusters": ClusterSettings(8, 16),
    "disk": DiskSettings(page_bytes=512),
}
WHOLE, TIGHT = OffloadSettings(1.0, **SMALL), OffloadSettings(0.5, 120_000, **SMALL)


class Talk(Conversation):
    """Two turns with different chunks; the chunks of the second are stored."""

    def __init__(
        self, adapter: Adapter, folder: Path, store: ChunkStore, recipe: Recipe, kv: OffloadSettings
    ) -> None:
        self.results: list[PrefillResult] = []
        self.ends: list[int] = []

        def prefill(prompt, sink, earlier):
            self.results.append(prefill_turn(adapter, store, recipe, prompt, sink, earlier))
            return self.results[-1]

        manner = ConversationSettings("Read.", GenerationConfig(temperature=0.0), NEW_TOKENS, kv)
        super().__init__(adapter, folder, manner, prefill)

    def turn(self, number: int) -> str:
        question, chunks = (("Where is it?", FIRST), ("And the other?", LATER))[number]
        said = "".join(self.send(question, chunks, Decoded()))
        self.ends.append(len(self.token_ids))
        return said


@pytest.fixture(params=["qwen2", "gemma2"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return tiny_adapter(request.param)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore(tmp_path / "store") as store:
        yield store


def stored(adapter: Adapter, store: ChunkStore, recipe: str = "reuse") -> None:
    prepare(adapter, store, LATER, recipe=recipe, system="Read.")


def test_reused_kv_is_at_the_position_of_its_chunk(adapter, store, tmp_path):
    """By definition: a fused cache of the whole text with that KV in its place, and every other row computed."""
    stored(adapter, store)
    with Talk(adapter, tmp_path / "talk", store, recipe_named("reuse"), WHOLE) as talk:
        talk.turn(0)
        talk.turn(1)
    assert [span.origin for span in talk.results[1].plan.spans] == ["fresh", "reused", "reused", "fresh"]
    text, start = talk.token_ids, talk.ends[0]
    end = start + talk.results[1].request.prompt.tokens
    spans = []
    for chunk in LATER:
        ids = adapter.template.chunk_ids(chunk)
        (at,) = (at for at in range(start, end) if tuple(text[at : at + len(ids)]) == tuple(ids))
        spans.append(PlacedSpan(isolated(adapter, ids), at, at))
    computed = torch.ones(end, dtype=torch.bool)
    for span in spans:
        computed[span.start : span.start + span.kv.tokens] = False
    kv_cache = adapter.new_cache(end, spans)
    logits = [adapter.compute(kv_cache, text[:end], adapter.rows(computed.nonzero()[:, 0]))]
    for token in text[end:-1]:
        logits.append(adapter.step(kv_cache, token))
    torch.testing.assert_close(talk.results[1].logits, logits[0], atol=5e-4, rtol=5e-4)
    assert torch.cat(logits).argmax(-1).tolist() == text[end:]


def isolated(adapter: Adapter, ids: tuple[int, ...]):
    prefix = adapter.template.prefix_ids("Read.")
    return adapter.encode(ids, adapter.encode(prefix))


def test_recomputing_everything_is_plain_full_attention(adapter, store, tmp_path):
    stored(adapter, store)
    with Talk(adapter, tmp_path / "talk", store, replace(recipe_named("reuse"), ratio=1.0), WHOLE) as talk:
        talk.turn(0)
        talk.turn(1)
    assert talk.results[1].plan.recomputed_tokens == sum(len(adapter.template.chunk_ids(c)) for c in LATER)
    end = talk.ends[0] + talk.results[1].request.prompt.tokens
    with torch.no_grad():
        plain = adapter.model(torch.tensor([talk.token_ids]), use_cache=False).logits[0, end - 1 : -1]
    torch.testing.assert_close(talk.results[1].logits, plain[:1], atol=5e-4, rtol=5e-4)
    assert plain.argmax(-1).tolist() == talk.token_ids[end:]


@pytest.mark.parametrize(
    "recipe", ["prophetkv", "cacheblend-gradual", "qcfuse", "cachecraft", "naive", "fusionrag"]
)
def test_recipes_use_their_budget_in_a_later_turn_which_can_be_resumed(recipe, store, tmp_path):
    adapter = tiny_adapter()
    stored(
        adapter, store, "naive" if recipe == "naive" else "reuse"
    )  # naive takes chunks that were prepared alone
    with Talk(adapter, tmp_path / "whole", store, recipe_named(recipe), TIGHT) as talk:
        expected = [talk.turn(0), talk.turn(1)]
        assert talk.held is not None
        assert talk.held.counts.peak_resident_bytes <= TIGHT.resident_bytes
    (later,) = talk.results[1:]
    assert later.plan.reused_tokens > 0
    assert later.selected.numel() == later.request.budget.max_rows(
        later.plan.reused_tokens + later.selected.numel()
    )
    assert later.new_entries == ()
    got = []
    for number in range(2):
        with Talk(adapter, tmp_path / "parts", store, recipe_named(recipe), TIGHT) as talk:
            got.append(talk.turn(number))
    assert got == expected


def test_damage_is_found_before_the_text_changes(store, tmp_path):
    adapter = tiny_adapter()
    stored(adapter, store)
    store.forget_recent()
    ids = torch.tensor(adapter.template.chunk_ids(LATER[0])).numpy().tobytes()
    (file,) = [each for each in store.folder.glob("??/*.safetensors") if ids in each.read_bytes()]
    content = bytearray(file.read_bytes())
    content[-3] ^= 4  # in the last layer
    file.write_bytes(content)
    with Talk(adapter, tmp_path / "talk", store, recipe_named("reuse"), WHOLE) as talk:
        talk.turn(0)
        talk.turn(1)
        assert talk.held is not None
        assert talk.held.usable
    origins = [span.origin for span in talk.results[1].plan.spans if span.kind == "chunk"]
    assert origins == ["fresh", "reused"]


def test_exact_versions_of_a_prompt_are_not_used_in_a_turn(store, tmp_path):
    """KV that is exact after the system prefix of a prompt is not used after other text."""
    adapter = tiny_adapter()
    recipe = recipe_named("prefix")
    with Talk(adapter, tmp_path / "first", store, recipe, WHOLE) as talk:
        talk.turn(1)  # its chunks are stored as exact after the system prefix
    assert store.versions(adapter.fingerprint, [adapter.template.chunk_ids(LATER[0])]) != [[]]
    with Talk(adapter, tmp_path / "second", store, recipe, WHOLE) as talk:
        talk.turn(0)
        talk.turn(1)
    assert {span.origin for span in talk.results[1].plan.spans} == {"fresh"}


def test_a_turn_has_the_spans_of_a_prompt():
    adapter = tiny_adapter()
    turn = adapter.template.render_turn(Prompt("Why?", LATER, "Read."))
    assert [span.kind for span in turn.spans] == ["system", "chunk", "chunk", "question"]
    assert [turn.ids(span) for span in turn.spans[1:3]] == [
        adapter.template.chunk_ids(text) for text in LATER
    ]
