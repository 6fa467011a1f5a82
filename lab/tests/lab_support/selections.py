"""Samples of four prompts, and the numbers of a row of the report on selection."""

from kvweave_lab.eval.samples import Sample

CHUNKS = (
    "1 the inn on the road was there when the rain began",
    "2 the river in the north ran again near the inn",
    "3 on the road in the rain there were the others",
)


def sample(name: str, task: str = "single", chunks: tuple[str, ...] = CHUNKS, new_tokens: int = 4) -> Sample:
    return Sample(name, task, chunks, f"Where is the inn of {name}?", ("a",), "string_match_all", new_tokens)


SAMPLES = [sample("A"), sample("B"), sample("C", "twohop", CHUNKS[::-1]), sample("D", "twohop", CHUNKS[:2])]


def values(row) -> list[float]:
    return [cell.value for cell in row]
