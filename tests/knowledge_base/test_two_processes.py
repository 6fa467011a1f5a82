"""Two processes that index, ask and remove in one knowledge base at the same time."""

from pathlib import Path

import pytest

from support.killed_processes import PATIENCE_S
from support.processes import child_processes
from support.tiny_kb import load, open_tiny, text

EVEN, ODD, BOTH = range(0, 12, 2), range(1, 12, 2), range(12, 16)


def index_and_ask(home, documents, own, together):
    """Add own documents and some that the other process adds too; remove every other own document again."""
    load()
    together.wait()
    with open_tiny(home) as base:
        for number in (*own, *BOTH):
            document = Path(documents, f"{number}.txt")
            base.add(document)
            assert str(document) in {listed.source for listed in base.documents()}
            assert base.ask(f"what about {number}", recipe="prefix" if number % 3 else "reuse").sources
            if number in own and number % 4 < 2:
                assert base.remove(document) == [str(document)]


@pytest.mark.timeout(900)
def test_both_processes_find_their_documents_and_leave_a_consistent_knowledge_base(tmp_path, tiny):
    home, documents = tmp_path / "home", tmp_path / "documents"
    documents.mkdir()
    for number in range(16):
        (documents / f"{number}.txt").write_text(text(number))
    context = child_processes()
    together = context.Barrier(2)
    processes = [
        context.Process(target=index_and_ask, args=(home, documents, own, together)) for own in (EVEN, ODD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    with open_tiny(home) as base:
        left = {int(Path(document.source).stem) for document in base.documents()}
        assert left == {2, 3, 6, 7, 10, 11, *BOTH}
        assert base.lost_documents() == []
        assert base.missing_kv() == 0
        report = base.store.verify()
        assert report.sound
        assert report.checked == base.store.stats().entries
        for question in ("what about 2", "what about 13"):
            answers = {base.ask(question, recipe=recipe).text for recipe in ("full", "prefix")}
            assert len(answers) == 1
