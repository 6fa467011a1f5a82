"""What must be true of a home, step by step."""

from random import Random

from kvweave_lab.faults.workload import Step, Truth, draw, marker, text_of

ADDED = Step("add", "a", 1)


def test_a_step_is_certain_once_it_is_acknowledged_and_open_while_it_runs():
    assert Truth().during(ADDED).documents == {"a": {0, 1}}
    there = Truth().after(ADDED)
    assert there.documents == {"a": {1}}
    assert there.during(Step("add", "a", 2)).documents == {"a": {1, 2}}
    assert there.after(Step("remove", "a")).documents == {"a": {0}}
    assert there.after(Step("remove", "a")).written == {("a", 1)}


def test_a_conversation_keeps_its_turns_until_a_document_is_changed_or_removed():
    said = Truth().after(ADDED).after(Step("chat", question="why"))
    assert (said.questions, said.kept) == (("why",), True)
    assert said.during(Step("chat", question="when")).questions == ("why",)
    assert said.after(Step("add", "b", 2)).kept
    assert not said.during(Step("add", "a", 2)).kept
    assert not said.after(Step("remove", "a")).kept


def test_a_limit_is_certain_once_it_is_set():
    assert Truth().during(Step("limit", limit_bytes=5)).limits == frozenset()
    limited = Truth().after(Step("limit", limit_bytes=5))
    assert limited.limits == {5}
    assert limited.during(Step("limit", limit_bytes=7)).limits == {5, 7}


def test_workloads_are_drawn_by_seed_and_use_what_is_there():
    assert draw(Random(3), 30) == draw(Random(3), 30)
    for seed in range(20):
        listed, versions = set(), []
        for step in draw(Random(seed), 30):
            if step.kind == "add":
                versions.append(step.version)
                listed.add(step.name)
            else:
                assert listed
            if step.kind == "remove":
                listed.remove(step.name)
        assert versions == sorted(set(versions))


def test_texts_and_markers_are_each_versions_own():
    words = {marker(name, version) for name in "abcd" for version in range(1, 100)}
    assert len(words) == 4 * 99
    assert all(marker("a", version) in text_of("a", version) for version in range(1, 50))
