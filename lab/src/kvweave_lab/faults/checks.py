"""What must be true of a home after any fault: read this as the specification that the campaign tests."""

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from kvweave.answering.generation import end_tokens
from kvweave.answering.reply_reader import ReplyReader
from kvweave.errors import EmptyKnowledgeBase
from kvweave.files import writer_of
from kvweave.knowledge_base import KnowledgeBase
from kvweave.kvstore.tiers.disk import SUFFIX
from kvweave.results import Source
from kvweave.state.conversation_log import read_state
from kvweave_lab.faults import shim
from kvweave_lab.faults.homes import SETTINGS, adapter, open_home
from kvweave_lab.faults.workload import ABSENT, NAMES, QUESTIONS, Truth, document, marker, text_of

START_S = 2.0
LATER_S = 7200.0
"""By how much the clock is put forward before a sweep: longer than every grace period."""
_ONCE_MORE_S = LATER_S + 120.0
"""The time of a second one: a sweep keeps for a minute what it has replaced, since others may be reading it."""


class Broken(Exception):
    """An invariant does not hold; `invariant` names it."""

    def __init__(self, invariant: str, detail: object = "") -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant, self.detail = invariant, detail


def must(holds: object, invariant: str, detail: object = "") -> None:
    """Raise Broken unless the invariant holds."""
    if not holds:
        raise Broken(invariant, detail)


def broken_in(check: Callable[[], None]) -> tuple[str, str]:
    """Return which invariant does not hold in a check and how it broke; two empty texts if all hold."""
    try:
        check()
    except Broken as broken:
        return broken.invariant, str(broken.detail)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [
            f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "kvweave" in frame.filename
        ]
        return f"a check ends without {type(error).__name__}", f"{error} at {', '.join(ours)}"
    return "", ""


class Checker:
    """Checks homes at one place; remembers what a fresh home answers over the same documents."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fresh: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}

    def check(self, truth: Truth, *, thorough: bool) -> None:
        """Raise Broken if what must be true is not; changes the home as a user's next commands would."""
        began = time.process_time()
        with open_home(self._root / "home") as base:
            documents = base.documents()
            must(
                time.process_time() - began < START_S,
                "start after a crash is quick",
                time.process_time() - began,
            )
            self._documents(base, truth)
            self._store(base, truth)
            if documents:
                self._answers(base)
            if thorough:
                self._conversation(base, truth)
                self._complete(base)
                self._forgotten(base, truth)

    def use(self, *, damaged: bool) -> None:
        """Use a home of which nothing is known but the user's files; raise Broken if it uses anything damaged.

        While it may be `damaged`, it may refuse anything with an error. Otherwise everything works as in a fresh home.
        """
        with open_home(self._root / "home") as base:
            if base.documents():
                self._answers(base)
            base.store.verify()
            if not damaged:
                must(base.store.verify().sound, "what was verified is sound")
            self._conversation(base, Truth(kept=False))
            self._complete(base)

    def _documents(self, base: KnowledgeBase, truth: Truth) -> None:
        """Every acknowledged document is listed and whole, and no other."""
        listed = {Path(each.source).stem: each.digest for each in base.documents()}
        for name in {*listed, *truth.documents}:
            allowed = truth.documents.get(name, frozenset({ABSENT}))
            digests = {_digest(name, version): version for version in allowed}
            version = digests.get(listed.get(name, ""))
            must(
                version in allowed,
                "nothing acknowledged is lost, nothing else is listed",
                (name, version, allowed),
            )
        must(not base.lost_documents(), "no listed document lacks chunks", base.lost_documents())

    def _store(self, base: KnowledgeBase, truth: Truth) -> None:
        """Every listed entry is whole and finite, the counters are right, and the cap holds."""
        report, stats = base.store.verify(), base.store.stats()
        must(report.sound, "no stored entry is damaged", report.damaged)
        must(not report.miscounted, "counters are right")
        must(report.checked == stats.entries, "verify reads every entry", (report.checked, stats.entries))
        must(stats.bytes <= stats.limit_bytes, "the cap holds", (stats.bytes, stats.limit_bytes))
        if truth.limits:
            must(stats.limit_bytes in truth.limits, "the limit is the one that was set", stats.limit_bytes)

    def _answers(self, base: KnowledgeBase) -> None:
        """An answer, cached or from stored KV, is that of full attention over its passages, and these are text of listed versions."""
        texts = {}
        for each in base.documents():
            name = Path(each.source).stem
            texts[each.source] = [
                t for t in self._texts(name) if hashlib.sha256(t.encode()).hexdigest() == each.digest
            ]
        for question in QUESTIONS[:2]:
            kept = base.ask(question)
            full = _by_full_attention(base, question, kept.sources)
            must(kept.text == full, "a cached or reused answer is that of full attention", (kept.text, full))
            for source in kept.sources:
                found = any(source.text in text for text in texts.get(source.document, ()))
                must(found, "an answer is made from listed documents", source)

    def _texts(self, name: str) -> Iterable[str]:
        return (text_of(name, version) for version in range(1, 60))

    def _conversation(self, base: KnowledgeBase, truth: Truth) -> None:
        """The conversation holds every acknowledged turn, and can go on."""
        with base.conversation("c") as conversation:
            text = conversation.text
            if truth.kept:
                for question in set(truth.questions):
                    said = text.count(question)
                    must(
                        said >= truth.questions.count(question),
                        "no acknowledged turn is lost",
                        (question, said),
                    )
            if base.documents():
                for _ in base.send(conversation, QUESTIONS[1]):
                    pass

    def _complete(self, base: KnowledgeBase) -> None:
        """Adding the folder again finishes what was interrupted, and computed answers are then those of a fresh home.

        A cached answer may differ: it stays while the same passages are found, also where their order has changed since.
        """
        folder = self._root / "documents"
        base.add(folder, allow_empty=True)
        must(not base.lost_documents(), "add restores what the index lacks", base.lost_documents())
        contents = tuple(f"{path.name}{path.read_text()}" for path in sorted(folder.iterdir()))
        if contents not in self._fresh:
            with TemporaryDirectory(dir=self._root.parent) as fresh, open_home(Path(fresh)) as other:
                other.add(folder, allow_empty=True)
                self._fresh[contents] = _answers(other)
        mine = _answers(base)
        must(
            mine == self._fresh[contents], "answers are those of a fresh home", (mine, self._fresh[contents])
        )
        if mine:
            self._answers(base)

    def _forgotten(self, base: KnowledgeBase, truth: Truth) -> None:
        """After two sweeps, no removed text, temporary file or unlisted entry is left."""
        try:
            for later_s in (LATER_S, _ONCE_MORE_S):
                shim.set_clock(later_s)
                base.add(self._root / "documents", allow_empty=True)
                base.store.verify()
        finally:
            shim.set_clock(0)
        here = {name: document(self._root, name) for name in NAMES}
        current = {path.read_text() for path in here.values() if path.exists()}
        gone = [marker(*each).encode() for each in truth.written if text_of(*each) not in current]
        for path in _files(base.folder):
            content = path.read_bytes()
            found = [word for word in gone if word in content]
            must(not found, "removed text is in no file", (path.relative_to(self._root).as_posix(), found))
            must(writer_of(path.name) is None, "no temporary file stays", path.name)
        state = read_state(base.folder / "conversations" / "c")
        said = adapter().template.decode(list(state.token_ids)) if state is not None else ""
        must(not [word for word in gone if word.decode() in said], "removed text is in no conversation", said)
        entries = [path for path in _files(base.folder / "kv") if path.name.endswith(SUFFIX)]
        must(len(entries) == base.store.stats().entries, "no unlisted entry stays", len(entries))
        vectors = base.components.index.table.to_arrow()["vector"].combine_chunks()
        must(np.isfinite(vectors.flatten().to_numpy()).all(), "vectors are finite")


def _by_full_attention(base: KnowledgeBase, question: str, sources: Iterable[Source]) -> str:
    """Return the answer over these passages that the model gives without any KV cache: a whole pass for every token."""
    prompt = replace(base.prompt(question), chunks=tuple(each.text for each in sources))
    rendered, ends, ids = adapter().template.render(prompt), end_tokens(adapter()), list[int]()
    reader = ReplyReader(adapter().tokenizer, rendered.reply)
    while len(ids) < SETTINGS["max_new_tokens"] and not reader.read(ids).ended:
        with torch.inference_mode():
            logits = adapter().model(torch.tensor([[*rendered.token_ids, *ids]])).logits[0, -1]
        if (token := int(logits.argmax())) in ends:
            break
        ids.append(token)
    return reader.read(ids, stopped=True).answer.strip()


def _answers(base: KnowledgeBase) -> list[tuple[str, list[str]]]:
    """Return the answers to two questions without the answer cache, with the documents and places of their passages."""
    try:
        answers = [base.ask(question, cache="off") for question in QUESTIONS[:2]]
    except EmptyKnowledgeBase:
        return []
    return [
        (each.text, [f"{Path(source.document).stem} {source.start}" for source in each.sources])
        for each in answers
    ]


def _digest(name: str, version: int) -> str:
    return hashlib.sha256(text_of(name, version).encode()).hexdigest() if version else ""


def _files(folder: Path) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names]
