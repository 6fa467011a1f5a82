"""The fuzzer: every reader takes hostile files, and what goes wrong is found. The long form is the command kvweave-fuzz."""

import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from kvweave.errors import ModelNotFound, UnreadableDocument
from kvweave_lab.fuzz import campaign
from kvweave_lab.fuzz.campaign import Count, Reader, drawn, run
from kvweave_lab.fuzz.command import main
from kvweave_lab.fuzz.mutations import mutated_json
from kvweave_lab.fuzz.readers import READERS

SEED, INPUTS = 7, 8


@pytest.mark.parametrize("name", READERS)
def test_hostile_files_are_read_or_refused_in_one_line(name):
    (count,) = run(READERS[name], name, SEED, INPUTS, Count())
    assert count.findings == []
    assert count.inputs == count.read + count.refused == INPUTS


@pytest.mark.parametrize("name", READERS)
def test_an_input_follows_from_seed_reader_and_number(name):
    first, again, other = (drawn(READERS[name], name, SEED, number) for number in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_change_of_one_input_is_in_no_other():
    value = {"a": {"b": [1, {"c": None}]}, "d": "x"}
    alone = [mutated_json(Random(number), value) for number in range(2_000)]
    assert [mutated_json(Random(number), value) for number in range(2_000)] == alone


def outcome(read, **limits) -> list[tuple[str, int]]:
    """Return the faults of one reader that reads three inputs, of which the second goes wrong."""
    reader = Reader(lambda rng: {"a": str(rng.random()).encode()}, read, (ModelNotFound,))
    wrong = drawn(reader, "made", SEED, 1)["a"]

    def only_the_second(folder: Path) -> None:
        if (folder / "a").read_bytes() == wrong:
            read(folder)

    with pytest.MonkeyPatch.context() as patch:
        for limit, value in limits.items():
            patch.setattr(campaign, limit, value)
        reader = Reader(reader.make, only_the_second, reader.refuses)
        (count,) = run(reader, "made", SEED, 3, Count())
    assert count.inputs == 3
    return [(each.fault, each.number) for each in count.findings]


def raises(error: BaseException):
    def read(folder: Path) -> None:
        raise error

    return read


def spins(folder: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (raises(TypeError("odd")), "TypeError"),
        (raises(UnreadableDocument("of another reader")), "UnreadableDocument"),
        (raises(ModelNotFound("two\nlines")), "ModelNotFound of several lines"),
        (raises(ModelNotFound("")), "ModelNotFound of several lines"),
        (lambda folder: b"x" * (64 << 30), "MemoryError"),
        (lambda folder: os.system("true"), "leaves its folder: os.system"),
        (
            lambda folder: (folder.parent.parent / "outside").open("w"),
            "leaves its folder: opens outside to write",
        ),
    ],
)
def test_what_goes_wrong_is_found_with_its_input(read, fault):
    assert outcome(read) == [(fault, 1)]
    assert outcome(raises(ModelNotFound("one line"))) == []


def test_an_input_that_takes_too_long_is_found():
    assert outcome(spins, CPU_LIMIT_S=0.2) == [("takes more than 0 s", 1)]


def test_a_process_that_dies_or_hangs_costs_one_input():
    reader = Reader(lambda rng: {}, lambda folder: os.kill(os.getpid(), signal.SIGTERM))
    count = Count()
    for _ in run(reader, "made", SEED, 2, count):
        pass
    assert [each.fault for each in count.findings] == ["crash (signal SIGTERM)"] * 2
    aborts = Reader(lambda rng: {}, lambda folder: (faulthandler.disable(), os.abort()), own_process=True)
    *_, refused = run(aborts, "made", SEED, 2, Count())
    assert (refused.refused, refused.findings) == (2, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "HANG_S", 0.2)
        (hung,) = run(Reader(lambda rng: {}, lambda folder: time.sleep(60)), "made", SEED, 1, Count())
    assert [each.fault for each in hung.findings] == ["hangs"]


def test_the_command_counts_and_continues(tmp_path, capsys):
    path = tmp_path / "fuzz.json"
    for inputs in (4, 6):
        with pytest.raises(SystemExit) as ended:
            main(["text", "--inputs", str(inputs), "--seed", "7", "--output", str(path)])
        assert ended.value.code == 0
    found = json.loads(path.read_text())
    assert (found["seed"], found["readers"]["text"]["inputs"]) == (7, 6)
    assert "text: 6 inputs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "no reader nothing" in capsys.readouterr().err
