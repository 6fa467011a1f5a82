"""An interrupted evaluation goes on where it stopped, and never mixes two subjects."""

import errno
import fcntl
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.journal import Journal, read_journal
from kvweave_lab.eval.results import Outcome, Trace

SUBJECT = {"model": "tiny", "dtype": "float32", "lengths": (512, 2048)}
OUTCOME = Outcome(
    task="single",
    context_tokens=512,
    seed=0,
    sample="single/dev/512/96/0/0",
    recipe="reuse",
    ratio=0.2,
    answer="Zoë said\n7 \u2028 times",
    score=1.0,
    agreement=True,
    kl=0.25,
    faithfulness=0.5,
    rows=7,
    selection=None,
    trace=Trace(1, 2, 3, 4, 5),
    took_s=0.5,
)
OTHER = replace(OUTCOME, recipe="naive", selection=0.5)
KEY, OTHER_KEY = ((outcome.sample, outcome.label) for outcome in (OUTCOME, OTHER))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "one"


@pytest.fixture
def file(folder):
    """A journal file with two outcomes."""
    with Journal(folder, SUBJECT) as journal:
        journal.add(OUTCOME)
        journal.add(OTHER)
    (file,) = folder.iterdir()
    return file


def test_outcomes_come_back_equal(folder, file):
    with Journal(folder, SUBJECT) as journal:
        assert journal.get(KEY) == OUTCOME
        assert journal.get(KEY).took_s == OUTCOME.took_s  # no part of what equality looks at
        assert journal.get(OTHER_KEY) == OTHER
        assert journal.get((OUTCOME.sample, ("reuse", 0.3, None))) is None


def test_a_journal_grows_over_several_runs(folder):
    for outcome in (OUTCOME, OTHER):
        with Journal(folder, SUBJECT) as journal:
            journal.add(outcome)
    with Journal(folder, SUBJECT) as journal:
        assert (journal.get(KEY), journal.get(OTHER_KEY)) == (OUTCOME, OTHER)


def test_a_coverage_is_not_taken_for_a_ratio(folder):
    by_coverage = replace(OUTCOME, ratio=None, coverage=0.2, answer="another")
    for _ in "ab":  # written, and read back
        with Journal(folder, SUBJECT) as journal:
            journal.add(OUTCOME)
            journal.add(by_coverage)
            assert journal.get((OUTCOME.sample, ("reuse", 0.2, None))) == OUTCOME
            assert journal.get((OUTCOME.sample, ("reuse", None, 0.2))) == by_coverage


def test_an_outcome_is_in_the_file_when_add_returns(folder):
    with Journal(folder, SUBJECT) as journal:
        journal.add(OUTCOME)
        (file,) = folder.iterdir()
        assert file.read_bytes().count(b"\n") == 2


def test_a_torn_last_line_is_cut_off_wherever_it_broke(folder, file):
    whole = file.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in {start + 1, (start + len(whole)) // 2, len(whole) - 1}:
        file.write_bytes(whole[:end])
        with Journal(folder, SUBJECT) as journal:
            assert journal.get(KEY) == OUTCOME
            assert journal.get(OTHER_KEY) is None
            journal.add(OTHER)
        assert file.read_bytes() == whole


def test_a_crash_within_the_first_line_leaves_an_empty_journal(folder, file):
    file.write_bytes(file.read_bytes()[:9])
    with Journal(folder, SUBJECT) as journal:
        assert journal.get(KEY) is None
        journal.add(OUTCOME)
    with Journal(folder, SUBJECT) as journal:
        assert journal.get(KEY) == OUTCOME


def test_another_subject_is_refused_naming_just_what_differs(folder, file):
    before = file.read_bytes()
    with pytest.raises(InvalidRequest, match="results that differ in dtype, haystack; name another --output"):
        Journal(folder, SUBJECT | {"dtype": "bfloat16", "haystack": "hay"})
    assert file.read_bytes() == before
    with Journal(folder, SUBJECT) as journal:  # nothing is locked
        assert journal.get(KEY) == OUTCOME


@pytest.mark.parametrize("name", ["kvweave.__version__", "kvweave_lab.eval.journal.JOURNAL_VERSION"])
def test_what_another_version_found_out_is_refused(folder, file, monkeypatch, name):
    before = file.read_bytes()
    monkeypatch.setattr(name, 1000)
    with pytest.raises(InvalidRequest, match=r"version.*name another --output"):
        Journal(folder, SUBJECT)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damaged", [b"\x00\xff", b"", b"{", b"17", b"[]", b'{"task": "single"}', b'{"trace": null}']
)
def test_a_damaged_line_is_named_with_what_to_do(folder, file, damaged):
    subject, _, second, end = file.read_bytes().split(b"\n")
    broken = b"\n".join([subject, damaged, second, end])
    file.write_bytes(broken)
    with pytest.raises(
        InvalidRequest, match=r"outcomes.jsonl, line 2, is damaged .*; delete that line and run again"
    ):
        Journal(folder, SUBJECT)
    assert file.read_bytes() == broken
    file.write_bytes(b"\n".join([subject, second, end]))
    with Journal(folder, SUBJECT) as journal:
        assert (journal.get(KEY), journal.get(OTHER_KEY)) == (None, OTHER)


def test_a_file_system_without_locks_is_said(folder, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InvalidRequest, match=r"cannot be locked \(No locks available\); name an --output"):
        Journal(folder, SUBJECT)


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n",
        b"my notes without an end",
        b"\x00\xff\x00\n",
        b"17\n",
        b'["model"]\n',
        b'{"model": "tiny"}\n{"task": "single"}\n',
        b'{"model": "tiny"}\n[]\n',
        b'{"model": "tiny"}\n{"trace": null}\n',
    ],
)
def test_what_is_no_journal_is_refused_and_left_as_it_is(folder, file, content):
    file.write_bytes(content)
    with pytest.raises(
        InvalidRequest, match="is not a journal of this version of kvweave; name another --output"
    ):
        Journal(folder, SUBJECT)
    assert file.read_bytes() == content


def test_two_writers_in_one_process_are_kept_apart(folder):
    with Journal(folder, SUBJECT), pytest.raises(InvalidRequest, match="another evaluation is writing to"):
        Journal(folder, SUBJECT)
    Journal(folder, SUBJECT).close()


def test_another_process_holds_it_until_it_ends(folder):
    holder = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from kvweave_lab.eval.journal import Journal, read_journal
        journal = Journal(Path({str(folder)!r}), {SUBJECT!r})
        print("held", flush=True)
        sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(
            InvalidRequest, match=r"another evaluation is writing to .* wait for it or name another"
        ):
            Journal(folder, SUBJECT)
        process.kill()
        process.wait()
    Journal(folder, SUBJECT).close()


@pytest.mark.parametrize("place", ["a file", "a file/below", "/proc/no-such-folder"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "a file").write_text("")
    with pytest.raises(InvalidRequest, match=r"cannot be written to \(.+\); name another --output"):
        Journal(tmp_path / place, SUBJECT)


def test_without_a_folder_outcomes_stay_in_memory():
    with Journal(None, SUBJECT) as journal:
        journal.add(OUTCOME)
        assert journal.get(KEY) == OUTCOME
        assert journal.get(OTHER_KEY) is None


class TestReading:
    def test_it_gives_the_whole_outcomes_and_leaves_the_file_alone(self, folder, file):
        """An answer may hold what Python takes for the end of a line, and a crash may tear the last outcome."""
        with Journal(folder, SUBJECT) as journal:
            journal.add(replace(OUTCOME, recipe="torn"))
        file.write_bytes(file.read_bytes()[:-9])
        before = file.read_bytes()
        subject, outcomes = read_journal(folder)
        assert outcomes == [OUTCOME, OTHER]
        assert (subject["model"], subject["lengths"]) == ("tiny", [512, 2048])
        assert file.read_bytes() == before

    def test_what_is_no_journal_is_refused(self, folder, file):
        for content, said in (
            (b"", "not a journal"),
            (b'{"journal": 1}\n', "not a journal of this version"),
            (file.read_bytes() + b"{}\n", "line 4, is damaged"),
        ):
            file.write_bytes(content)
            with pytest.raises(InvalidRequest, match=said):
                read_journal(folder)
        file.unlink()
        with pytest.raises(InvalidRequest, match=r"cannot be read \(No such file"):
            read_journal(folder)
