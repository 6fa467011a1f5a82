"""Measures what retrieval finds in German, French, Spanish, Chinese and Arabic: by words, by vectors and by both.

    .venv/bin/python lab/experiments/languages.py --output lab/results/languages.json

`languages.toml` has six documents and eight questions in each language. Each paragraph is a chunk, and all languages are
in one knowledge base, as in a folder of mixed documents. A question counts as answered at depth k if the paragraph with the words
that answer it is among the first k chunks.
"""

import argparse
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.index.documents import document_version
from kvweave.index.vector_index import VectorIndex
from kvweave.types import Chunk

DATA = Path(__file__).with_suffix(".toml")
DEPTHS = (1, 3)


def main() -> None:
    """Index the documents, ask the questions, and report the shares."""
    parser = argument_parser(__doc__)
    parser.add_argument("--embedding-model", help="a hub id, a folder or a name; the default one without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), options)
    write_result({**environment(command_of(options)), **rounded(found)}, options.output)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return recall@k of each language's questions for each way to rank."""
    languages = tomllib.loads(DATA.read_text(encoding="utf-8"))
    chunks = [
        chunk
        for language, content in languages.items()
        for number, text in enumerate(content["documents"])
        for chunk in paragraphs(f"{language}/{number}.txt", text)
    ]
    encoder = TextEncoder(options.embedding_model)
    index = VectorIndex(folder, encoder.dimensions)
    index.add(chunks, encoder.encode([chunk.text for chunk in chunks]))
    visible = {document_version(chunk.document, chunk.document_digest) for chunk in chunks}
    index.sweep(visible)
    places = {
        language: [
            _places(index, encoder, question, quote, visible) for question, quote in content["questions"]
        ]
        for language, content in languages.items()
    }
    return {
        "embedding": encoder.name,
        "chunks": len(chunks),
        "depths": DEPTHS,
        "languages": [
            {
                "language": language,
                "documents": len(languages[language]["documents"]),
                "questions": len(found),
                **{name: _recall([each[name] for each in found]) for name in found[0]},
            }
            for language, found in places.items()
        ],
    }


def paragraphs(source: str, text: str) -> Iterator[Chunk]:
    """Yield a document's paragraphs as chunks without token ids."""
    start = 0
    for part in text.strip().split("\n\n"):
        yield Chunk(part, (), f"{source}:{start}", source, source, start, start + len(part))
        start += len(part) + 2


def _places(
    index: VectorIndex, encoder: TextEncoder, question: str, quote: str, visible: set[str]
) -> dict[str, int | None]:
    """Return the place of the paragraph that holds the quote in each ranking; None where it is not found."""
    found = index.search(question, encoder.encode([question])[0], 1000, visible)
    holders = [(place, chunk.reason) for place, chunk in enumerate(found, 1) if quote in chunk.text]
    if len(holders) != 1:
        raise InvalidRequest(f"{len(holders)} paragraphs hold {quote!r}; one must")
    ((place, reason),) = holders
    return {"words": reason.word_rank, "vectors": reason.vector_rank, "hybrid": place}


def _recall(places: Sequence[int | None]) -> list[float]:
    return [sum(place is not None and place <= depth for place in places) / len(places) for depth in DEPTHS]


if __name__ == "__main__":
    run_script(main)
