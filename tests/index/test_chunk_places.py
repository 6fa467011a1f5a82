"""Chunks know their place, and those cut from a table or an e-mail repeat its head."""

import pytest

from kvweave.documents.chunking import Chunker
from kvweave.documents.readers import read_file
from kvweave.models.prompt import PlainTokenizer
from support import document_files as files
from support.small_tokenizers import byte_level

TOKENIZER = byte_level()


def chunks_of(folder, name, data, chunk_tokens=120, overlap=0):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    chunker = Chunker(TOKENIZER, chunk_tokens, overlap)
    document = read_file(path).documents[0]
    return document, chunker.split(document)


def check(document, chunks, chunk_tokens=120):
    plain = PlainTokenizer(TOKENIZER)
    for chunk in chunks:
        assert plain.count(chunk.text) <= chunk_tokens
        assert chunk.text.endswith(document.text[chunk.start : chunk.end])
    covered = "".join(document.text[chunk.start : chunk.end] for chunk in chunks)
    assert covered.strip() == document.text.strip()


TABLES = {
    "a.csv": "".join(",".join(map(str, row)) + "\n" for row in files.ROWS),
    "a.xlsx": files.xlsx,
    "a.docx": files.docx,
    "a.md": "# People\n\n| Name | Town | Year |\n|---|---|---|\n"
    + "".join(f"| {a} | {b} | {c} |\n" for a, b, c in files.ROWS[1:])
    + "\nThat was all.\n",
    "a.html": "<h1>People</h1><table><tr><th>Name</th><th>Town</th><th>Year</th></tr>"
    + "".join(f"<tr><td>{a}</td><td>{b}</td><td>{c}</td></tr>" for a, b, c in files.ROWS[1:])
    + "</table><p>That was all.</p>",
}


def test_a_table_in_an_email_repeats_its_header_and_the_emails(tmp_path):
    data = bytes(files.mail(TABLES["a.html"], html=True))
    document, chunks = chunks_of(tmp_path, "a.eml", data, 300)
    check(document, chunks, 300)
    rows = [chunk.text for chunk in chunks if "Person" in chunk.text]
    assert len(rows) > 5
    for text in rows:
        assert text.startswith("From: Zoé")
        assert text.count("Subject: ") == text.count("Name\tTown\tYear\n") == 1
    assert all("Subject: " in chunk.text for chunk in chunks)
    assert {chunk.place.heading for chunk in chunks} == {"The pässword", "The pässword > People"}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("overlap", [0, 20])
def test_every_chunk_cut_from_a_table_has_its_header_once(tmp_path, name, overlap):
    data = TABLES[name] if isinstance(TABLES[name], str) else TABLES[name]()
    document, chunks = chunks_of(tmp_path, name, data, overlap=overlap)
    rows = [chunk for chunk in chunks if "Person" in chunk.text]
    assert len(rows) > 10
    for chunk in rows:
        header = next(line for line in chunk.text.split("\n") if "Name" in line)
        assert all(column in header for column in ("Name", "Town", "Year"))
        assert chunk.text.count("Name") == 1
        assert chunk.text.index("Name") < chunk.text.index("Person")
    if not overlap:
        check(document, chunks)
        assert [chunk for chunk in chunks if "That was all" in chunk.text and "Name" in chunk.text] == []
    whole = [line for chunk in rows for line in chunk.text.split("\n") if "Person" in line]
    assert all("Town" in line for line in whole)  # rows are not cut


def test_a_small_table_stays_with_the_text_around_it(tmp_path):
    text = "# Fees\n\nFees of the harbour:\n\n| Ship | Fee |\n|---|---|\n| A | 1 |\n\nThat was all.\n"
    _document, chunks = chunks_of(tmp_path, "a.md", text)
    assert [chunk.text for chunk in chunks] == [text]


def test_a_header_longer_than_a_chunk_leaves_room_for_rows(tmp_path):
    names = ",".join(f"column {n} with a long name" for n in range(60))
    text = names + "\n" + "".join(f"{n}," * 59 + "end\n" for n in range(20))
    document, chunks = chunks_of(tmp_path, "a.csv", text)
    check(document, chunks)
    assert all("column 0" in chunk.text for chunk in chunks if "end" in chunk.text)


def test_every_chunk_of_a_mail_has_sender_date_and_subject(tmp_path):
    body = "\n\n".join(f"Sentence {n} tells about the harbour and its ships." for n in range(60))
    box = files.mbox(
        files.mail("Short.", "First"),
        files.mail(body, "Second", identity="<2@x.y>"),
        files.mail("Last.", "Third"),
    )
    document, chunks = chunks_of(tmp_path, "box.mbox", box, chunk_tokens=240)
    check(document, chunks, 240)
    long = [chunk for chunk in chunks if "Sentence" in chunk.text]
    assert len(long) > 5
    for chunk in long:
        assert chunk.text.count("Subject: Second") == 1
        assert "From: Zoé <zoe@example.org>" in chunk.text
        assert "Date: Mon, 05 Jan 2026" in chunk.text
        assert chunk.place.heading == "Second"


def test_lines_and_headings_of_chunks(tmp_path):
    text = "\n\n# Guide\n\nStart here.\n\n" + "".join(
        f"## Part {n}\n\n" + f"Sentence about part {n}. " * 12 + "\n\n" for n in range(5)
    )
    _document, chunks = chunks_of(tmp_path, "a.md", text)
    lines = text.split("\n")
    assert len(chunks) >= 5
    for chunk in chunks:
        first = chunk.text.lstrip().split("\n")[0]
        assert chunk.place.line is not None
        assert lines[chunk.place.line - 1].startswith(first[:20]) or first[:20] in lines[chunk.place.line - 1]
    assert chunks[-1].place.heading == "Guide > Part 4"


def test_pages_of_chunks(tmp_path):
    pages = [" ".join(f"Page {n} tells of ship {i}." for i in range(20)) for n in range(1, 5)]
    _document, chunks = chunks_of(tmp_path, "a.pdf", files.pdf(*pages))
    for chunk in chunks:
        assert chunk.place.line is None
        assert f"Page {chunk.place.page}" in chunk.text
    assert {chunk.place.page for chunk in chunks} == {1, 2, 3, 4}
