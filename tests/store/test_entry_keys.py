from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvweave.core import Making
from kvweave.store.keys import EntryKey, digest_tokens

KEY = EntryKey("default", "a" * 32, digest_tokens([1, 2, 3]), Making("isolated", ("s", "t")))


@given(st.lists(st.integers(0, 2**40)), st.lists(st.integers(0, 2**40)))
def test_token_digests_are_equal_exactly_for_equal_ids(one: list[int], other: list[int]) -> None:
    assert (digest_tokens(one) == digest_tokens(tuple(other))) == (one == other)


def test_token_digest_is_pinned() -> None:
    # Changing it would orphan every store: then FORMAT_VERSION must change too.
    assert digest_tokens([1, 2, 3]) == "abccad42d03c940bc2b249bf5a4e1e3d"
    assert KEY.digest == "3b585026b0a8eca24ae132e65d04d040"


def test_every_field_but_the_label_changes_the_key() -> None:
    made = KEY.making
    others = [
        replace(KEY, namespace="other"),
        replace(KEY, model="b" * 32),
        replace(KEY, tokens=digest_tokens([1, 2])),
        replace(KEY, making=replace(made, exact=False)),
        replace(KEY, making=replace(made, rope_regime="long")),
        replace(KEY, making=replace(made, context=("s",))),
        replace(KEY, making=replace(made, context=("t", "s"))),
        replace(KEY, making=replace(made, context=("s,t",))),
        replace(KEY, making=replace(made, context=('s","t',))),
    ]
    digests = {key.digest for key in others}
    assert len(digests) == len(others)
    assert KEY.digest not in digests
    assert replace(KEY, making=replace(made, kind="observed")).digest == KEY.digest
