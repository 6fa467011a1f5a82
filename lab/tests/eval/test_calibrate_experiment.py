"""The questions of the experiment on calibration."""


def test_questions_are_drawn_evenly_from_those_about_the_documents(script):
    calibrate = script("calibrate")
    some = calibrate.questions_about(["hall-minutes.md"], 5)
    every = calibrate.questions_about(["hall-minutes.md"], 10_000)
    assert len(some) == 5
    assert set(some) < set(every)
    assert every[0] == some[0]
