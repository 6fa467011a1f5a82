"""A small set of documents and questions, an encoder without a model, and a library of both."""

import json
import zlib

import numpy as np

from kvweave_lab.eval.natural.distractors import Page
from kvweave_lab.eval.natural.library import open_library
from kvweave_lab.eval.natural.questions import read_set

DOCUMENTS = {
    "ferry.md": "# The ferry\n\nOsgood bought the ferry in May. He painted it green.\n\nThe ticket costs four crowns.\n",
    "mill.txt": "The mill\n\nIrma runs the mill. Her brother keeps the books.\n\nIt closes on Friday.\n",
    "letter.txt": "Dear Irma\n\nyour mill was loud again. Osgood says so too.\n\nYours, Pelle\n",
    "pier.md": "# The pier\n\nThe lamp was repaired in June. The second repair cost nine crowns.\n",
}


def line(name, question, answers, kind, *evidence, **more):
    quotes = [{"doc": doc, "quote": quote} for doc, quote in evidence]
    fields = {"id": name, "question": question, "answers": answers, "kind": kind, "evidence": quotes}
    return fields | more


QUESTIONS = [
    line("q1", "Who bought the ferry?", ["Osgood"], "within", ("ferry.md", "Osgood bought the ferry")),
    line("q2", "What does the ticket cost?", ["four crowns"], "number", ("ferry.md", "costs four crowns")),
    line(
        "q3",
        "Who says that Irma's mill is loud?",
        ["Osgood", "Mr Osgood"],
        "documents",
        ("mill.txt", "Irma runs the mill"),
        ("letter.txt", "Osgood says so too"),
    ),
    line("q4", "When does the mill close?", ["Friday"], "within", ("mill.txt", "It closes on Friday")),
    line("q5", "When was the lamp repaired?", ["June"], "within", ("pier.md", "repaired in June")),
    line("q6", "Who painted the pier?", [], "unanswerable"),
]


def write_set(folder, questions=QUESTIONS, documents=DOCUMENTS):
    """Write a set; return its folder of documents and its file of questions."""
    place = folder / "documents"
    place.mkdir(exist_ok=True)
    for name, text in documents.items():
        (place / name).write_text(text)
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in questions))
    return place, file


class WordEncoder:
    """Counts words in 64 columns; texts that share words are near."""

    name = "words"

    def encode(self, texts):
        vectors = np.full((len(texts), 64), 0.01, dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().replace(".", " ").replace("?", " ").split():
                row[zlib.crc32(word.encode()) % 64] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


PAGES = [
    Page("rain/README.md", "Rain falls on the river. The river carries it to the sea."),
    Page("wind/README.md", "Wind turns the wheel. The wheel of the mill is old."),
]


def library_of(folder, adapter, chunk_tokens=16):
    """Write the set and two pages into a library; return the set and the library."""
    content = read_set(*write_set(folder))
    library = open_library(content, PAGES, adapter.tokenizer, chunk_tokens, WordEncoder(), folder / "index")
    return content, library
