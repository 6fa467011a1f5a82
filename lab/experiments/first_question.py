"""Measures how long a person waits for the first answer about 200 pages: `kvweave add`, then `kvweave ask`.

    .venv/bin/python lab/experiments/first_question.py --output lab/results/first_question.json

Both commands run as a person runs them, in processes of their own and with an empty home. The pages are the beginnings of text
files, by default of those in /usr/share/doc, and the model is Gemma 3 270M, which `make real` prepares. While the question is
answered, the background process that `add` has started prepares chunks. `together_s` is the target's number: the seconds that
`add` takes and those until the first piece of the answer, together at most 30 on two cores.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiment import (
    add_model,
    argument_parser,
    command_of,
    environment,
    rounded,
    run_script,
    write_result,
)
from kvweave.errors import InvalidRequest
from kvweave_lab.real_models import VARIABLE

TARGET_S = 30.0
_SUFFIXES = (".txt", ".md", ".html")
_PAGE_CHARACTERS = (1500, 2500)
"""The least and the most of a page of text: 250 to 400 words."""


def main() -> None:
    """Add the pages, ask, and report the seconds."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--source", type=Path, default=Path("/usr/share/doc"), help="folder of text files")
    add_model(parser)
    parser.add_argument("--question", default="Who wrote this program, and under which licence?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, pages = Path(folder) / "home", Path(folder) / "pages"
        copy_pages(options.source, pages, options.pages)
        found = measured(home, pages, options)
    write_result({**environment(command_of(options)), **rounded(found)}, options.output)


def copy_pages(source: Path, folder: Path, count: int) -> None:
    """Write the first page of text files, in the order of their names, each content once.

    Raises InvalidRequest if there are too few.
    """
    folder.mkdir()
    pages: set[str] = set()
    for path in sorted(source.rglob("*")):
        page = _first_page(path)
        if page and page not in pages:
            pages.add(page)
            (folder / f"{len(pages):03}-{path.name}").write_text(page, encoding="utf-8")
        if len(pages) == count:
            return
    raise InvalidRequest(f"{source} has {len(pages)} texts of a page, fewer than {count}")


def _first_page(path: Path) -> str:
    """Return whole lines of a page; empty for what is no text or shorter."""
    least, most = _PAGE_CHARACTERS
    if path.suffix not in _SUFFIXES or not path.is_file():
        return ""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    page = text[: text.rfind("\n", 0, most) + 1]
    return page if len(page) >= least else ""


def measured(home: Path, pages: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds until `add` returns and until the answer begins and ends, and what was there then."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVWEAVE_") or name == VARIABLE
    }
    variables = kept | {
        "KVWEAVE_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
    }
    kvweave = [sys.executable, "-m", "kvweave"]
    began = time.perf_counter()
    added = json.loads(_output([*kvweave, "add", str(pages), "--model", options.model, "--json"], variables))
    add_s = time.perf_counter() - began
    try:
        first_s, answer_s = _ask([*kvweave, "ask", options.question], variables)
        after = json.loads(_output([*kvweave, "cache", "stats", "--json"], variables))["preparation"]
    finally:
        if process := added.get("preparation", {}).get("process"):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return {
        "pages": len(added["added"]),
        "chunks": added["chunks"],
        "add_s": add_s,
        "first_piece_s": first_s,
        "answer_s": answer_s,
        "together_s": add_s + first_s,
        "target_s": TARGET_S,
        "vectors_waiting": added["vectors_waiting"],
        "without_vector_after_answer": after["left_without_vector"],
        "without_kv_after_answer": after["left_without_kv"],
        "background": added.get("preparation", {}).get("by", ""),
    }


def _output(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidRequest(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _ask(command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Return the seconds until the first piece of an answer is printed, and until the command ends."""
    began = time.perf_counter()
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asked:
        assert asked.stdout is not None
        piece = asked.stdout.read(1)
        first_s = time.perf_counter() - began
        asked.stdout.read()
    if not piece or asked.returncode:
        raise InvalidRequest(f"{' '.join(command)} gave no answer")
    return first_s, time.perf_counter() - began


if __name__ == "__main__":
    run_script(main)
