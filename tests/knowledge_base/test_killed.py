"""Indexing, asking and removing in processes that are killed at random moments, on a whole knowledge base.

`KVWEAVE_KILL_ROUNDS=200` kills that often, which takes about four minutes on an idle machine.
"""

import itertools
import os
from pathlib import Path

import pytest

from support.killed_processes import victims
from support.tiny_kb import load, open_tiny, text

QUESTION = "what about 2"
KILLS = int(os.environ.get("KVWEAVE_KILL_ROUNDS", "15"))


def add_ask_and_remove(loaded, acknowledge, home, documents, first):
    base = open_tiny(home)
    for number in itertools.count(first):
        document = Path(documents, f"{number}.txt")
        document.write_text(text(number))
        base.add(document)
        acknowledge(f"+ {document}")
        base.ask(f"what about {number}", recipe="prefix")
        acknowledge(f"? {document}")
        if number % 3 == 2:
            base.remove(document)
            acknowledge(f"- {document}")


@pytest.mark.timeout(30 * KILLS)
def test_nothing_acknowledged_is_lost_and_nothing_half_written_is_used(tmp_path, tiny):
    home, documents = tmp_path / "home", tmp_path / "documents"
    documents.mkdir()
    there, gone, asked = set(), set(), 0
    with victims(tmp_path, load, add_ask_and_remove, seed=13) as processes:
        for kill in range(KILLS):
            told = processes.killed_within(6, str(home), str(documents), kill * 1000)
            for sign, source in (line.split() for line in told):
                asked += sign == "?"
                there |= {source} if sign == "+" else set()
                gone |= {source} if sign == "-" else set()
            with open_tiny(home) as base:
                check(base, there, gone)
    assert asked > KILLS // 2
    with open_tiny(home) as base:
        base.add(documents)  # unfinished work is done, and removed documents are added again
        assert base.missing_kv() == 0
        assert {document.source for document in base.documents()} >= there
        answers = [base.ask(QUESTION, recipe=recipe) for recipe in ("prefix", "full")]
    with open_tiny(tmp_path / "fresh") as fresh:
        fresh.add(documents)
        answers += [fresh.ask(QUESTION, recipe=recipe) for recipe in ("prefix", "full")]
    for answer in answers:
        assert [(each.document, each.start) for each in answer.sources] == [
            (each.document, each.start) for each in answers[0].sources
        ]
        assert answer.text == answers[0].text


def check(base, there, gone):
    report = base.store.verify()
    assert report.sound
    assert report.checked == base.store.stats().entries
    listed = {document.source for document in base.documents()}
    assert not listed & gone
    unsure = {source for source in there - gone if source not in listed}
    assert len(unsure) <= 1  # only one that was being removed when its process was killed
    assert all(int(Path(source).stem) % 3 == 2 for source in unsure)
    assert base.lost_documents() == []
    there -= unsure
    if listed:
        answer = base.ask("what about the river", recipe="prefix")
        assert {source.document for source in answer.sources} <= listed
