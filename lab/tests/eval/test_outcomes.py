"""An interrupted evaluation resumes, and never mixes two run configurations."""

import errno
import fcntl
import textwrap
from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.outcomes import OutcomeLog, read_outcomes
from lab_support.outcomes import CONFIG, OUTCOME
from support.processes import Program

OTHER = replace(OUTCOME, recipe="naive", selection=0.5)
KEY, OTHER_KEY = ((outcome.sample, outcome.label) for outcome in (OUTCOME, OTHER))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "one"


@pytest.fixture
def file(folder):
    """A log file with two outcomes."""
    with OutcomeLog(folder, CONFIG) as log:
        log.add(OUTCOME)
        log.add(OTHER)
    (file,) = folder.iterdir()
    return file


def test_outcomes_are_read_as_written(folder, file):
    with OutcomeLog(folder, CONFIG) as log:
        assert log.get(KEY) == OUTCOME
        assert log.get(KEY).took_s == OUTCOME.took_s  # not compared
        assert log.get(OTHER_KEY) == OTHER
        assert log.get((OUTCOME.sample, ("reuse", 0.3, None))) is None


def test_a_log_grows_over_several_runs(folder):
    for outcome in (OUTCOME, OTHER):
        with OutcomeLog(folder, CONFIG) as log:
            log.add(outcome)
    with OutcomeLog(folder, CONFIG) as log:
        assert (log.get(KEY), log.get(OTHER_KEY)) == (OUTCOME, OTHER)


def test_a_coverage_is_not_taken_for_a_ratio(folder):
    by_coverage = replace(OUTCOME, ratio=None, coverage=0.2, answer="another")
    for _ in "ab":  # written, and read back
        with OutcomeLog(folder, CONFIG) as log:
            log.add(OUTCOME)
            log.add(by_coverage)
            assert log.get((OUTCOME.sample, ("reuse", 0.2, None))) == OUTCOME
            assert log.get((OUTCOME.sample, ("reuse", None, 0.2))) == by_coverage


def test_an_outcome_is_in_the_file_when_add_returns(folder):
    with OutcomeLog(folder, CONFIG) as log:
        log.add(OUTCOME)
        (file,) = folder.iterdir()
        assert file.read_bytes().count(b"\n") == 2


def test_a_torn_last_line_is_cut_off_at_any_byte(folder, file):
    whole = file.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in {start + 1, (start + len(whole)) // 2, len(whole) - 1}:
        file.write_bytes(whole[:end])
        with OutcomeLog(folder, CONFIG) as log:
            assert log.get(KEY) == OUTCOME
            assert log.get(OTHER_KEY) is None
            log.add(OTHER)
        assert file.read_bytes() == whole


def test_a_crash_within_the_first_line_leaves_an_empty_log(folder, file):
    file.write_bytes(file.read_bytes()[:9])
    with OutcomeLog(folder, CONFIG) as log:
        assert log.get(KEY) is None
        log.add(OUTCOME)
    with OutcomeLog(folder, CONFIG) as log:
        assert log.get(KEY) == OUTCOME


def test_another_configuration_is_refused_naming_just_what_differs(folder, file):
    before = file.read_bytes()
    with pytest.raises(InvalidRequest, match="results that differ in dtype, haystack; name another --output"):
        OutcomeLog(folder, CONFIG | {"dtype": "bfloat16", "haystack": "hay"})
    assert file.read_bytes() == before
    with OutcomeLog(folder, CONFIG) as log:  # nothing is locked
        assert log.get(KEY) == OUTCOME


@pytest.mark.parametrize("name", ["kvweave.__version__", "kvweave_lab.eval.outcomes.OUTCOMES_VERSION"])
def test_results_of_another_version_are_refused(folder, file, monkeypatch, name):
    before = file.read_bytes()
    monkeypatch.setattr(name, 1000)
    with pytest.raises(InvalidRequest, match=r"version.*name another --output"):
        OutcomeLog(folder, CONFIG)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damaged", [b"\x00\xff", b"", b"{", b"17", b"[]", b'{"task": "single"}', b'{"trace": null}']
)
def test_a_damaged_line_is_named_with_what_to_do(folder, file, damaged):
    config, _, second, end = file.read_bytes().split(b"\n")
    broken = b"\n".join([config, damaged, second, end])
    file.write_bytes(broken)
    with pytest.raises(
        InvalidRequest, match=r"outcomes.jsonl, line 2, is damaged .*; delete that line and run again"
    ):
        OutcomeLog(folder, CONFIG)
    assert file.read_bytes() == broken
    file.write_bytes(b"\n".join([config, second, end]))
    with OutcomeLog(folder, CONFIG) as log:
        assert (log.get(KEY), log.get(OTHER_KEY)) == (None, OTHER)


def test_a_file_system_without_locks_is_reported(folder, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InvalidRequest, match=r"cannot be locked \(No locks available\); name an --output"):
        OutcomeLog(folder, CONFIG)


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
def test_another_kind_of_file_is_refused_and_left_unchanged(folder, file, content):
    file.write_bytes(content)
    with pytest.raises(
        InvalidRequest, match="is not a results log of this version of kvweave; name another --output"
    ):
        OutcomeLog(folder, CONFIG)
    assert file.read_bytes() == content


def test_two_writers_in_one_process_exclude_each_other(folder):
    with OutcomeLog(folder, CONFIG), pytest.raises(InvalidRequest, match="another evaluation is writing to"):
        OutcomeLog(folder, CONFIG)
    OutcomeLog(folder, CONFIG).close()


def test_another_process_holds_the_log_until_it_ends(folder):
    holder = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from kvweave_lab.eval.outcomes import OutcomeLog
        log = OutcomeLog(Path({str(folder)!r}), {CONFIG!r})
        print("held", flush=True)
        sys.stdin.read()
    """)
    with Program(["-c", holder]) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(
            InvalidRequest, match=r"another evaluation is writing to .* wait for it or name another"
        ):
            OutcomeLog(folder, CONFIG)
        process.kill()
        process.wait()
    OutcomeLog(folder, CONFIG).close()


@pytest.mark.parametrize("place", ["a file", "a file/below", "/proc/no-such-folder"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "a file").write_text("")
    with pytest.raises(InvalidRequest, match=r"cannot be written to \(.+\); name another --output"):
        OutcomeLog(tmp_path / place, CONFIG)


def test_without_a_folder_outcomes_stay_in_memory():
    with OutcomeLog(None, CONFIG) as log:
        log.add(OUTCOME)
        assert log.get(KEY) == OUTCOME
        assert log.get(OTHER_KEY) is None


class TestReading:
    def test_it_returns_complete_outcomes_and_leaves_the_file_unchanged(self, folder, file):
        """An answer may hold what Python takes for the end of a line, and a crash may tear the last outcome."""
        with OutcomeLog(folder, CONFIG) as log:
            log.add(replace(OUTCOME, recipe="torn"))
        file.write_bytes(file.read_bytes()[:-9])
        before = file.read_bytes()
        config, outcomes = read_outcomes(folder)
        assert outcomes == [OUTCOME, OTHER]
        assert (config["model"], config["lengths"]) == ("tiny", [512, 2048])
        assert file.read_bytes() == before

    def test_another_kind_of_file_is_refused(self, folder, file):
        for content, said in (
            (b"", "not a results log"),
            (b'{"journal": 1}\n', "not a results log of this version"),
            (file.read_bytes() + b"{}\n", "line 4, is damaged"),
        ):
            file.write_bytes(content)
            with pytest.raises(InvalidRequest, match=said):
                read_outcomes(folder)
        file.unlink()
        with pytest.raises(InvalidRequest, match=r"cannot be read \(No such file"):
            read_outcomes(folder)
