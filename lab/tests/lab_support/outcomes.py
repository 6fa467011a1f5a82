"""An outcome of an evaluation, and the settings that it was measured with."""

from kvweave_lab.eval.outcomes import Outcome, Trace

CONFIG = {"model": "tiny", "dtype": "float32", "lengths": (512, 2048)}


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
