"""kvweave profile-layers through the real command."""

import json


def test_layers_are_measured_printed_and_written_for_the_model(command, tmp_path):
    words = ("--task", "single", "--samples", "1", "--context-tokens", "256", "--quiet")
    told = command("profile-layers", *words).stdout
    (path,) = (tmp_path / "home" / "models").iterdir()
    assert str(path) in told
    found = json.loads(path.read_text())
    best = sorted(range(8), key=lambda layer: -found["found"][layer])[:3]
    assert found["critical_layers"] == sorted(best)
    assert told.count("critical") == 3
    assert (found["model"], found["samples"]) == ("reference", 1)


def test_a_task_that_does_not_exist_is_refused(command):
    assert "there is no task 'none'" in command("profile-layers", "--task", "none", code=1).stderr
