"""Cache-Craft against its definition: plain passes with eager attention, versions and scores spelled out."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

import kvweave
from kvweave.kvstore.keys import digest_tokens
from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.match import MatchExactPath
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cachecraft import RequestVersions
from kvweave.recipes.offline import missing_bytes, prepare_chunks
from kvweave.recipes.place import Causal
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.simulated_requests import SimulatedRequests
from kvweave.testing import tiny_model
from kvweave.types import KVProvenance

CRAFT = recipe_named("cachecraft")


@pytest.fixture(scope="module")
def plain():
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def ctx_of(adapter, store, prompt):
    return PrepareContext(adapter, store, adapter.template.prefix_ids(prompt.system))


def ids_of(adapter, prompt):
    return [adapter.template.chunk_ids(chunk) for chunk in prompt.chunks]


def observed(adapter, store, chunks):
    """The observed versions of each chunk."""
    found = store.versions(adapter.fingerprint, chunks)
    return [[provenance for provenance in made if provenance.kind == "observed"] for made in found]


def shares(adapter, store, chunk, provenance):
    """The attention feature of a version, (P + 2, n)."""
    (feature,) = store.find_features(adapter.fingerprint, [(chunk, replace(provenance, kind="attention"))])
    return feature.tensors["shares"]


def request_of(adapter, store, prompt, ratio=0.0):
    return PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(ratio))


def plain_shares(plain, parts):
    """How the last part's tokens divide their attention among the parts, (parts, n), averaged over layers and heads."""
    with torch.no_grad():
        out = plain(torch.tensor([[token for part in parts for token in part]]), output_attentions=True)
    weights = torch.cat(out.attentions).mean(dim=(0, 1))[-len(parts[-1]) :]  # (n, keys)
    return torch.stack([part.sum(dim=1) for part in weights.split([len(part) for part in parts], dim=1)])


class TestSimulatedRequests:
    def test_give_exact_kv_and_its_attention(self, adapter, store, prompt, plain):
        ctx, chunks = ctx_of(adapter, store, prompt), ids_of(adapter, prompt)
        assert prepare_chunks(ctx, chunks, CRAFT) == len(chunks)
        by_digest = {digest_tokens(ids): ids for ids in chunks}
        for chunk, versions in zip(chunks, observed(adapter, store, chunks), strict=True):
            assert 1 <= len(versions) <= 3
            for provenance in versions:
                assert provenance.exact
                assert provenance.context[0] == digest_tokens(ctx.prefix)
                parts = [ctx.prefix, *(by_digest[digest] for digest in provenance.context[1:]), chunk]
                assert len({*parts}) == len(parts) > 2
                whole = adapter.encode([token for part in parts for token in part])
                kv = store.get(adapter.fingerprint, chunk, provenance).kv
                torch.testing.assert_close(kv, whole.kv[:, :, :, -len(chunk) :], atol=1e-4, rtol=1e-4)
                recorded = shares(adapter, store, chunk, provenance)
                torch.testing.assert_close(recorded, plain_shares(plain, parts), atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(recorded.sum(dim=0), torch.ones(len(chunk)))

    def test_give_the_mean_attention_to_one_earlier_chunk(self, adapter, store, prompt):
        ctx, chunks = ctx_of(adapter, store, prompt), ids_of(adapter, prompt)
        prepare_chunks(ctx, chunks, CRAFT)
        for chunk, versions in zip(chunks, observed(adapter, store, chunks), strict=True):
            paid = torch.cat([shares(adapter, store, chunk, provenance)[1:-1] for provenance in versions])
            provenance = SimulatedRequests().provenance(adapter, ctx.prefix, len(chunk))
            (feature,) = store.find_features(adapter.fingerprint, [(chunk, provenance)])
            torch.testing.assert_close(feature.tensors["inter"], paid.mean(dim=0))

    def test_do_not_depend_on_the_order_and_run_once(self, adapter, prompt, tmp_path):
        chunks, contents = ids_of(adapter, prompt), []
        for number, order in enumerate((chunks, chunks[::-1])):
            with kvweave.ChunkStore(tmp_path / str(number)) as store:
                ctx = ctx_of(adapter, store, prompt)
                prepare_chunks(ctx, order, CRAFT)
                assert missing_bytes(ctx, [(digest_tokens(ids), len(ids)) for ids in chunks], CRAFT) == {}
                assert prepare_chunks(ctx, order, CRAFT) == 0
                versions = observed(adapter, store, chunks)
                contents.append(
                    {
                        provenance: store.get(adapter.fingerprint, chunk, provenance).kv.clone()
                        for chunk, made in zip(chunks, versions, strict=True)
                        for provenance in made
                    }
                )
        assert contents[0].keys() == contents[1].keys()
        assert all(
            torch.equal(contents[0][provenance], contents[1][provenance]) for provenance in contents[0]
        )

    def test_need_a_second_chunk_and_run_later_after_another_recipe(self, adapter, store, prompt):
        ctx, chunks = ctx_of(adapter, store, prompt), ids_of(adapter, prompt)[:2]
        named = [(digest_tokens(ids), len(ids)) for ids in chunks]
        prepare_chunks(ctx, chunks[:1], CRAFT)
        assert list(missing_bytes(ctx, named, CRAFT)) == [0, 1]  # the first one came after no other yet
        prepare_chunks(ctx, chunks[1:], recipe_named("reuse"))
        assert missing_bytes(ctx, named, recipe_named("reuse")) == {}
        assert prepare_chunks(ctx, chunks, CRAFT) == 2
        assert missing_bytes(ctx, named, CRAFT) == {}
        assert all(observed(adapter, store, chunks))

    def test_of_few_chunks_are_filled_up_from_the_corpus(self, adapter, store, prompt):
        """A chunk added alone comes after others too; these get no new features."""
        chunks = ids_of(adapter, prompt)
        corpus = ChunkList(
            [prompt.chunks], adapter.template.chunk_ids, lambda given: np.eye(4, dtype=np.float32)
        )
        ctx = replace(ctx_of(adapter, store, prompt), corpus=corpus)
        prepare_chunks(ctx, chunks[:3], CRAFT)
        before = store.stats().entries
        assert prepare_chunks(ctx, chunks[3:], CRAFT) == 1
        assert missing_bytes(ctx, [(digest_tokens(ids), len(ids)) for ids in chunks], CRAFT) == {}
        (versions,) = observed(adapter, store, chunks[3:])
        preceding = {digest for provenance in versions for digest in provenance.context[1:]}
        assert preceding == {digest_tokens(ids) for ids in chunks[:3]}
        # its isolated KV, both features of its attention to others, and the versions with a feature each
        assert store.stats().entries == before + 3 + 2 * len(versions)

    def test_without_versions_are_repeated_for_a_recipe_with_versions(self, adapter, store, prompt):
        ctx, chunks = ctx_of(adapter, store, prompt), ids_of(adapter, prompt)
        named = [(digest_tokens(ids), len(ids)) for ids in chunks]
        assert prepare_chunks(ctx, chunks, recipe_named("isolated+cachecraft")) == len(chunks)
        assert not any(observed(adapter, store, chunks))
        assert list(missing_bytes(ctx, named, CRAFT)) == [0, 1, 2, 3]
        assert prepare_chunks(ctx, chunks, CRAFT) == len(chunks)
        assert all(observed(adapter, store, chunks))
        assert missing_bytes(ctx, named, CRAFT) == {}
        assert missing_bytes(ctx, named, recipe_named("isolated+cachecraft")) == {}

    def test_have_at_most_max_chunks_and_fit_the_context(self, adapter, store, prompt):
        ctx = ctx_of(adapter, store, prompt)
        texts = [f"{number} {'the inn ' * words}" for number, words in enumerate((45, 45, 45, 2, 2))]
        chunks = [adapter.template.chunk_ids(text) for text in texts]
        assert len(ctx.prefix) + sum(map(len, chunks)) > adapter.geometry.context_tokens
        lengths = {digest_tokens(ids): len(ids) for ids in (ctx.prefix, *chunks)}
        for entry in SimulatedRequests(max_chunks=3, max_versions=5).extract(ctx, chunks):
            if entry.provenance.kind == "observed":
                assert len(entry.sources) <= 3
                length = sum(lengths[digest] for digest in entry.provenance.context) + len(
                    entry.content.token_ids
                )
                assert length <= adapter.geometry.context_tokens


class TestBestVersion:
    def test_is_the_one_whose_attention_went_to_chunks_in_the_prompt(self, adapter, store, prompt):
        ctx, chunks = ctx_of(adapter, store, prompt), ids_of(adapter, prompt)
        prepare_chunks(ctx, chunks, CRAFT)
        prefix = digest_tokens(ctx.prefix)
        origins = set()
        for order in permutations(prompt.chunks):
            asked = kvweave.Prompt(prompt.question, order, system=prompt.system)
            request = request_of(adapter, store, asked)
            for number, found in enumerate(CRAFT.match.find(request, CRAFT.prepare)[1:-1], 1):
                origins.add(found.origin)
                ids = request.prompt.ids(found.span)
                here = [digest_tokens(request.prompt.ids(span)) for span in request.prompt.spans[1:number]]
                (versions,) = observed(adapter, store, [ids])
                if (prefix, *here) in [(prefix,), *(provenance.context for provenance in versions)]:
                    assert found.origin == "exact"
                    continue
                worth = {(prefix,): 0.0}
                for provenance in versions:
                    paid = shares(adapter, store, ids, provenance)[1:-1].mean(dim=1)
                    signs = torch.tensor([1.0 if chunk in here else -1.0 for chunk in provenance.context[1:]])
                    worth[provenance.context] = float((paid * signs).sum())
                assert found.origin == "reused"
                assert found.provenance.context == max(worth, key=lambda context: worth[context])
        assert origins == {"exact", "reused"}

    def test_is_explained_with_the_number_of_versions(self, adapter, store, prompt):
        prepare_chunks(ctx_of(adapter, store, prompt), ids_of(adapter, prompt), CRAFT)
        reasons = set()
        for order in permutations(prompt.chunks):
            request = request_of(adapter, store, kvweave.Prompt(prompt.question, order, system=prompt.system))
            for number, found in enumerate(CRAFT.match.find(request, CRAFT.prepare)):
                if found.origin != "reused":
                    continue
                (provenances,) = CRAFT.prepare.candidates(request, [number])
                others = len(found.provenance.context) > 1  # in addition to the prefix
                where = "after other chunks (observed)" if others else "for any position (isolated)"
                assert len(provenances) > 1
                assert found.reason == (
                    f"no KV after exactly this text; stored {where}, the best of {len(provenances)} versions"
                )
                reasons.add(where)
        assert len(reasons) == 2

    def test_serves_any_selector(self, adapter, store, prompt):
        recipe = recipe_named("prophetkv", "observed")
        prepare_chunks(ctx_of(adapter, store, prompt), ids_of(adapter, prompt), recipe)
        request = request_of(adapter, store, prompt)
        kinds = {
            found.provenance.kind for found in recipe.match.find(request, recipe.prepare) if found.provenance
        }
        assert "observed" in kinds
        assert run(recipe, adapter, store, request.prompt, ratio=0.2).selected.numel() > 0

    def test_has_the_same_instruction_and_an_attention_feature(self, adapter, store, prompt):
        chunks = ids_of(adapter, prompt)
        prepare_chunks(ctx_of(adapter, store, prompt), chunks, CRAFT)
        other = kvweave.Prompt(prompt.question, prompt.chunks, system="Be brief.")
        first = chunks[0]
        prefix = adapter.template.prefix_ids(other.system)
        unnoted = KVProvenance("observed", (digest_tokens(prefix), digest_tokens(first)))
        assert store.put(adapter.fingerprint, adapter.encode(chunks[1]), unnoted, ())
        assert unnoted in store.versions(adapter.fingerprint, [chunks[1]])[0]
        request = request_of(adapter, store, other)
        assert all(
            len(provenances) == 1 for provenances in RequestVersions().candidates(request, range(1, 5))
        )
        assert RequestVersions().candidates(request, [2])[0][0].context == (digest_tokens(prefix),)


class TestScores:
    @pytest.mark.parametrize("prepared", ["observed", "isolated"])
    def test_are_the_attention_to_chunks_that_differ(self, adapter, store, prompt, prepared):
        recipe = recipe_named("cachecraft", prepared)
        ctx, chunks = ctx_of(adapter, store, prompt), ids_of(adapter, prompt)
        prepare_chunks(ctx, chunks, recipe)
        assert any(observed(adapter, store, chunks)) == (prepared == "observed")
        for order in (prompt.chunks, prompt.chunks[::-1], prompt.chunks[1:]):
            request = request_of(
                adapter, store, kvweave.Prompt(prompt.question, order, system=prompt.system), 0.3
            )
            matched = recipe.match.find(request, recipe.prepare)
            expected = []
            for number, found in enumerate(matched):
                if found.origin != "reused":
                    continue
                ids = request.prompt.ids(found.span)
                here = {digest_tokens(request.prompt.ids(span)) for span in request.prompt.spans[1:number]}
                then = found.provenance.context[1:]
                mean = SimulatedRequests().provenance(adapter, ctx.prefix, len(ids))
                score = store.find_features(adapter.fingerprint, [(ids, mean)])[0].tensors["inter"]
                score = score * len(here - {*then})
                for place, chunk in enumerate(then):
                    if chunk not in here:
                        score = score + shares(adapter, store, ids, found.provenance)[1 + place]
                expected.append(score)
            state = PrefillState(request, adapter.new_cache(request.prompt.tokens), matched, Causal())
            scores = recipe.select.score.scores(state)
            torch.testing.assert_close(scores, torch.cat(expected))
            assert (scores > 0).any()
            result = run(recipe, adapter, store, request.prompt, ratio=0.3)
            best = scores.argsort(descending=True, stable=True)[: result.selected.numel()]
            assert set(result.selected.tolist()) == set(state.stale[best].tolist())

    def test_are_zero_if_the_same_chunks_come_before_in_another_order(self, adapter, store, prompt):
        a, b, c, _ = prompt.chunks
        kvweave.prefill(adapter, store, kvweave.Prompt("?", (a, b, c), system=prompt.system), recipe=CRAFT)
        request = request_of(adapter, store, kvweave.Prompt("?", (b, a, c), system=prompt.system))
        matched = CRAFT.match.find(request, CRAFT.prepare)
        assert [found.origin for found in matched] == ["exact", "reused", "reused", "reused", "fresh"]
        state = PrefillState(request, adapter.new_cache(request.prompt.tokens), matched, Causal())
        of_b, of_a, of_c = CRAFT.select.score.scores(state).split(
            [found.span.tokens for found in matched[1:4]]
        )
        assert (of_b > 0).all()  # it was computed after a, which is not before it here
        assert not of_c.any()
        # a lacks b, whose share is unknown: it gets the mean that other tokens pay to an earlier chunk
        known = [
            shares(adapter, store, request.prompt.ids(matched[n].span), matched[n].provenance) for n in (1, 3)
        ]
        usual = torch.cat([recorded[1:-1].mean(dim=0) for recorded in known]).mean()
        torch.testing.assert_close(of_a, usual.expand_as(of_a))

    def test_of_chunks_without_features_are_positive_and_equal(self, adapter, store, prompt):
        kvweave.prepare(adapter, store, prompt.chunks, recipe="reuse", system=prompt.system)
        request = request_of(adapter, store, prompt)
        matched = CRAFT.match.find(request, CRAFT.prepare)
        state = PrefillState(request, adapter.new_cache(request.prompt.tokens), matched, Causal())
        preceding = [
            number for number, found in enumerate(matched[1:-1]) for _ in range(found.span.tokens) if number
        ]
        assert (
            CRAFT.select.score.scores(state).tolist() == preceding
        )  # the number of chunks before each token


class TestRequests:
    def test_give_versions_with_features_like_simulated_ones(self, adapter, store, prompt, plain):
        tokens = adapter.template.render(prompt)
        result = run(CRAFT, adapter, store, tokens)
        parts = [tokens.ids(span) for span in tokens.spans[:-1]]
        features = {
            entry.provenance: entry.content
            for entry in result.new_entries
            if entry.provenance.kind == "attention"
        }
        kv = {entry.provenance: entry for entry in result.new_entries if entry.provenance.kind != "attention"}
        assert len(features) == len(kv) - 1 == len(prompt.chunks)  # the prefix needs none
        for number in range(1, len(parts)):
            provenance = result.request.exact_provenance(number)
            assert kv[provenance].max_versions == 5
            found = features[replace(provenance, kind="attention")].tensors["shares"]
            torch.testing.assert_close(found, plain_shares(plain, parts[: number + 1]), atol=1e-5, rtol=1e-4)

    def test_keep_at_most_limit_versions(self, adapter, store, prompt):
        recipe = Recipe("paths", prepare=RequestVersions(max_versions=2), match=MatchExactPath())
        a, b, c, d = prompt.chunks
        for before in ((a, b), (b, c), (c, a), (a, c)):
            kvweave.prefill(
                adapter, store, kvweave.Prompt("?", (*before, d), system=prompt.system), recipe=recipe
            )
        assert len(observed(adapter, store, [adapter.template.chunk_ids(d)])[0]) == 2

    def test_of_recipes_without_versions_give_no_features(self, adapter, store, prompt):
        result = run(recipe_named("prefix"), adapter, store, adapter.template.render(prompt))
        assert {entry.provenance.kind for entry in result.new_entries} == {"observed"}
