"""LongBench's data: one jsonl file per data set, as it is published; `_e` files (LongBench-E) as well.

Metric and answer length of each data set are official. The wording of what is asked is ours, one instruction behind
the context instead of one before and one behind it: chunks then come first in the prompt, where they can be reused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvweave.index.chunking import Chunker
from kvweave_lab.eval.metrics import with_classes
from kvweave_lab.eval.readers.records import FeatureExtractor, records
from kvweave_lab.eval.samples import Sample


@dataclass(frozen=True, slots=True)
class DataSet:
    """How a data set is asked and scored.

    Attributes:
        metric: the official one; the best score over a line's answers counts.
        max_new_tokens: official.
        question: what is asked; {input} is the line's own.
    """

    metric: str
    max_new_tokens: int
    question: str


_PHRASE = "Answer with a single phrase and nothing else: {input}"
_EXAMPLES = "Go on in the same way as in these examples.\n\n{input}"
_CODE = "{input}\n\nThe next line of this code, and nothing else, is:"

DATA_SETS: Mapping[str, DataSet] = MappingProxyType(
    {
        "narrativeqa": DataSet("f1", 128, _PHRASE),
        "qasper": DataSet(
            "f1",
            128,
            'Answer with a phrase or a sentence and nothing else; with "yes" or "no" where that is asked, and with'
            ' "unanswerable" where the article does not tell: {input}',
        ),
        "multifieldqa_en": DataSet("f1", 64, _PHRASE),
        "multifieldqa_zh": DataSet("f1_zh", 64, "请根据上文简短作答，只写答案：{input}"),
        "hotpotqa": DataSet("f1", 32, _PHRASE),
        "2wikimqa": DataSet("f1", 32, _PHRASE),
        "musique": DataSet("f1", 32, _PHRASE),
        "dureader": DataSet("rouge_l_zh", 128, "请根据上文作答：{input}"),
        "gov_report": DataSet("rouge_l", 512, "Summarize this report on one page."),
        "qmsum": DataSet("rouge_l", 512, "Answer from the transcript in one or more sentences: {input}"),
        "multi_news": DataSet("rouge_l", 512, "Summarize all of this news on one page."),
        "vcsum": DataSet("rouge_l_zh", 512, "请写一段文字，概括这次会议。"),
        "trec": DataSet("classification", 64, _EXAMPLES),
        "triviaqa": DataSet("f1_first_line", 32, _EXAMPLES),
        "samsum": DataSet("rouge_l_first_line", 128, _EXAMPLES),
        "lsht": DataSet("classification", 64, "仿照上面的例子，写出这条新闻的类别。\n\n{input}"),
        "passage_count": DataSet(
            "count",
            32,
            "How many different paragraphs are there, repeated ones counted once? Give only the number.",
        ),
        "passage_retrieval_en": DataSet(
            "retrieval",
            32,
            'Which paragraph is this a summary of? Answer in the form "Paragraph 1".\n\n{input}',
        ),
        "passage_retrieval_zh": DataSet(
            "retrieval_zh", 32, "下面的文字概括了哪一段？只回答编号，例如“段落1”。\n\n{input}"
        ),
        "lcc": DataSet("code_similarity", 64, _CODE),
        "repobench-p": DataSet("code_similarity", 64, _CODE),
    }
)
"""LongBench's data sets under its own names."""

_E = "_e"


def read(path: Path, chunker: Chunker, limit: int | None = None) -> Iterator[Sample]:
    """Samples of a file, or of every .jsonl file below a folder; at most `limit` per file.

    A sample's task is its line's `dataset`, with `_e` behind it in files of LongBench-E.

    Raises:
        InvalidRequest: no such file, a damaged line, or an unknown data set; says which and what to do.
    """
    for record in records(path, limit):
        name = record.text("dataset").removesuffix(_E)
        if name not in DATA_SETS:
            raise record.invalid(f"there is no data set {name!r} in LongBench ({', '.join(DATA_SETS)})")
        task = name + _E if record.path.stem.endswith(_E) else name
        data_set = DATA_SETS[name]
        yield Sample(
            name=record.name("longbench", task, chunker),
            task=task,
            chunks=record.chunks(record.text("context"), chunker),
            question=data_set.question.format(input=record.text("input")).strip(),
            answers=_answers(record, data_set.metric),
            metric=data_set.metric,
            max_new_tokens=data_set.max_new_tokens,
        )


def _answers(record: FeatureExtractor, metric: str) -> tuple[str, ...]:
    answers = record.texts("answers")
    return with_classes(answers, record.texts("all_classes")) if metric == "classification" else answers
