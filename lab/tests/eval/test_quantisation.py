"""What storing KV in fewer bits costs, from outcomes written by hand."""

from collections.abc import Iterator
from io import StringIO

from rich.console import Console

from kvweave_lab.eval.quantisation import storage_costs
from kvweave_lab.eval.report import storage_table
from kvweave_lab.eval.report.storage_table import storages_json
from kvweave_lab.eval.results import Outcome, Trace


def outcomes(recipe: str, scores: dict[str, list[float]], ratio: float | None = 0.0) -> Iterator[Outcome]:
    for task, values in scores.items():
        for number, score in enumerate(values):
            yield Outcome(
                task=task,
                context_tokens=512,
                seed=0,
                sample=f"{task}/{number}",
                recipe=recipe,
                ratio=ratio,
                answer=f"{score:g}",
                score=score,
                agreement=True,
                kl=0.0,
                faithfulness=1.0,
                rows=0,
                selection=None,
                trace=Trace(0, 0, 0, 0, 0),
                took_s=0.0,
                coverage=None if ratio is not None else 0.5,
            )


EXACT = {"single": [1.0, 1.0, 0.0, 1.0], "coref": [0.5, 0.5]}
INT8 = {"single": [1.0, 1.0, 0.0, 0.0], "coref": [0.5, 1.0]}


def test_each_prompt_is_compared_with_itself() -> None:
    ran = [
        *outcomes("full", EXACT, 1.0),
        *outcomes("reuse", EXACT),
        *outcomes("isolated-int8+reuse", INT8),
        *outcomes("isolated-int4+reuse", EXACT),
        *outcomes("similar+prophetkv", INT8, None),
        *outcomes("similar-int8+prophetkv", INT8, None),
        *outcomes("isolated-int8+prophetkv", INT8, 0.2),  # whose exact twin did not run
    ]
    costs = storage_costs(ran)
    assert [(cost.recipe, cost.storage, cost.ratio, cost.coverage) for cost in costs] == [
        ("reuse", "int8", 0.0, None),
        ("reuse", "int4", 0.0, None),
        ("similar+prophetkv", "int8", None, 0.5),
    ]
    first, second, third = costs
    assert (first.samples, first.exact_score.value, first.score.value) == (6, 0.625, 0.625)
    assert first.lost.value == (1 / 4 - 1 / 4) / 2  # a quarter lost on one task, won on the other
    assert first.lost.low < 0 < first.lost.high
    assert first.same.value == (3 / 4 + 1 / 2) / 2
    for equal in (second, third):
        assert (equal.lost.value, equal.lost.low, equal.lost.high, equal.same.value) == (0, 0, 0, 1)


def test_the_table_and_its_plain_values() -> None:
    costs = storage_costs([*outcomes("reuse", EXACT), *outcomes("isolated-int8+reuse", INT8)])
    console = Console(width=120, record=True, file=StringIO())
    console.print(storage_table(costs))
    (line,) = [line.split() for line in console.export_text().splitlines() if line.startswith("reuse")]
    assert line[:6] == ["reuse", "512", "0", "int8", "6", "0.625"]
    (plain,) = storages_json(costs)
    assert plain["lost_interval"] == [costs[0].lost.low, costs[0].lost.high]
    assert plain["storage"] == "int8"
    assert storages_json([]) == []
