from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import EntryKey, digest_tokens, has_queries
from kvweave.types import KVProvenance

KEY = EntryKey("default", "a" * 32, digest_tokens([1, 2, 3]), KVProvenance("isolated", ("s", "t")))


@given(st.lists(st.integers(0, 2**40)), st.lists(st.integers(0, 2**40)))
def test_token_digests_are_equal_exactly_for_equal_ids(one: list[int], other: list[int]) -> None:
    assert (digest_tokens(one) == digest_tokens(tuple(other))) == (one == other)


def test_token_digest_is_pinned() -> None:
    # Changing it would orphan every store: then FORMAT_VERSION must change too.
    assert digest_tokens([1, 2, 3]) == "abccad42d03c940bc2b249bf5a4e1e3d"
    assert KEY.digest == "6f2ee0965938600e211175b6608bbf8d"


def test_every_field_but_the_label_changes_the_key_of_exact_kv() -> None:
    made = KEY.provenance
    others = [
        replace(KEY, namespace="other"),
        replace(KEY, model="b" * 32),
        replace(KEY, tokens=digest_tokens([1, 2])),
        replace(KEY, content="note"),
        replace(KEY, provenance=replace(made, exact=False)),
        replace(KEY, provenance=replace(made, rope_regime="long")),
        replace(KEY, provenance=replace(made, context=("s",))),
        replace(KEY, provenance=replace(made, context=("t", "s"))),
        replace(KEY, provenance=replace(made, context=("s,t",))),
        replace(KEY, provenance=replace(made, context=('s","t',))),
    ]
    digests = {key.digest for key in others}
    assert len(digests) == len(others)
    assert KEY.digest not in digests
    assert replace(KEY, provenance=replace(made, kind="observed")).digest == KEY.digest


def test_the_kind_distinguishes_entries_that_their_context_does_not() -> None:
    kinds = ["isolated", "observed", "similar-10", "similar-5", "following-1"]
    tainted = [replace(KEY, provenance=replace(KEY.provenance, kind=kind, exact=False)) for kind in kinds]
    features = [replace(key, content="note") for key in tainted]
    exact_notes = [
        replace(KEY, provenance=replace(KEY.provenance, kind=kind), content="note") for kind in kinds
    ]
    digests = {key.digest for key in (KEY, *tainted, *features, *exact_notes)}
    assert len(digests) == 1 + 3 * len(kinds)


def test_kv_with_queries_is_another_entry() -> None:
    isolated, observed = (replace(KEY.provenance, kind=kind) for kind in ("isolated-qkv", "observed-qkv"))
    assert has_queries(isolated)
    assert not has_queries(KEY.provenance)
    digest = replace(KEY, provenance=isolated).digest
    assert digest != KEY.digest
    # Apart from that, its context determines it, as without queries.
    assert replace(KEY, provenance=observed).digest == digest


@pytest.mark.parametrize("kind", ["bare", "similar-10", "following-1", "digest-12.5", "layer-13b-keys"])
def test_kinds_are_words_joined_by_hyphens(kind: str) -> None:
    assert replace(KEY, provenance=KVProvenance(kind, ())).provenance.kind == kind


@pytest.mark.parametrize(
    "kind", ["", "Bare", "similar10", "similar_10", "-10", "similar-", "a--b", "a b", "bare\n"]
)
def test_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="does not name a kind"):
        replace(KEY, provenance=KVProvenance(kind, ()))
