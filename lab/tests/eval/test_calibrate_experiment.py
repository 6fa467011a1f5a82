"""The experiment on calibration: its questions, and what is chosen from a whole measurement."""

from kvweave.state.calibration_results import CalibrationResult, Measured, summarised


def trial(recipe, kept, passes):
    results = [Measured(True, number < kept, passes, 9.0) for number in range(24)]
    return summarised(recipe, 0.1, 1, results, (24, 24))


def test_the_choice_is_that_of_the_share(script):
    trials = (trial("cheap", 20, 0.1), trial("dear", 24, 0.5))
    verdict = CalibrationResult("cheap", None, 0.1, "tiny", 0.0, 0.0, 0, 0, 24, 0.0, 1.0, 1.0, trials)
    calibrate = script("calibrate")
    assert calibrate.under(verdict, 0.98).recipe == "dear"
    assert calibrate.under(verdict, 0.8).recipe == "cheap"
    assert calibrate.under(CalibrationResult(**{**_fields(verdict), "trials": trials[:1]}), 0.98) is None


def _fields(verdict):
    return {name: getattr(verdict, name) for name in verdict.__slots__}


def test_questions_are_drawn_evenly_from_those_about_the_documents(script):
    calibrate = script("calibrate")
    some = calibrate.questions_about(["hall-minutes.md"], 5)
    every = calibrate.questions_about(["hall-minutes.md"], 10_000)
    assert len(some) == 5
    assert set(some) < set(every)
    assert every[0] == some[0]
