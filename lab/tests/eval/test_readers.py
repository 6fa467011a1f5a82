"""RULER's and LongBench's files: how a line is read, and the error for a damaged one."""

import json

import pytest

from kvweave.documents.chunking import Chunker
from kvweave.errors import InvalidRequest
from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.readers import DATA_SETS, READERS, read_longbench, read_ruler

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
VARIABLES = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VALUE = "\nQuestion: Find all variables that are assigned the value {} in the text above."
WORDS = "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n"
COMMON = "\nQuestion: What are the 10 most common words in the above list?"
DOCUMENTS = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

NIAH = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it."
    f" I will quiz you about the numbers afterwards.\n{GRASS}\nOne of the special magic numbers for"
    f" odd-hat is: 4417123.\n{GRASS}"
)
ASKED = "What are all the special magic numbers for odd-hat, and tall-cup mentioned in the provided text?"
SINGLE = "What is the special magic uuid for odd-hat mentioned in the provided text?"

# Name → (text before the question, question, answer prefix, metric, tokens).
RULER = {
    "niah_multiquery": (
        NIAH,
        ASKED,
        " The special magic numbers for odd-hat, and tall-cup mentioned in the provided text are",
        "string_match_all",
        128,
    ),
    "niah_single_3": (
        f"A special magic uuid is hidden within the following text.\n{GRASS}",
        SINGLE,
        " The special magic uuid for odd-hat mentioned in the provided text is",
        "string_match_all",
        128,
    ),
    "vt": (
        f"{VARIABLES}VAR ABC = 12345\n{GRASS}{VALUE.format(12345)} Answer: According to the chain(s) of variable"
        f" assignment in the text above, 2 variables are assigned the value 12345, they are:  ABC DEF\n\n"
        f"{VARIABLES}VAR QRSTU = 81123\n{GRASS}",
        VALUE.format(81123).strip(),
        " Answer: According to the chain(s) of variable assignment in the text above, 2 variables are assigned the"
        " value 81123, they are: ",
        "string_match_all",
        30,
    ),
    "cwe": (
        f"{WORDS}1. hat 2. cup{COMMON} Answer: The top 10 words that appear most often in the list are: 1. hat"
        f"\n{WORDS}1. sun 2. sea",
        COMMON.strip(),
        " Answer: The top 10 words that appear most often in the list are:",
        "string_match_all",
        120,
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently"
        " appeared coded words. ... abcdef ... ghijkl",
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently"
        " appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        "string_match_all",
        50,
    ),
    "qa_1": (
        f"{DOCUMENTS}\n\nThe following are given documents.\n\nDocument 1:\nQuestion: is this a trap?\n\nDocument 2:\n"
        f"{GRASS}",
        f"{DOCUMENTS}\n\nQuestion: What colour is the grass?",
        " Answer:",
        "string_match_part",
        32,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def chunker():
    return Chunker(tiny_tokenizer(), 512)


def written(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def line(task="niah_multiquery", **changes):
    before, question, prefix, *_ = RULER[task]
    made = {"index": 3, "input": f"{before}\n{question}", "outputs": ["4417123"], "length": 99}
    return made | {"answer_prefix": prefix} | changes


@pytest.mark.parametrize("task", RULER)
def test_a_ruler_line_is_split_into_context_and_question(task, tmp_path, chunker):
    before, question, prefix, metric, tokens = RULER[task]
    (sample,) = read_ruler(written(tmp_path / f"{task}.jsonl", line(task)), chunker)
    assert "".join(sample.chunks) == before
    assert sample.question == f"{question} {prefix.strip()}"
    assert sample.answers == ("4417123",)
    assert (sample.task, sample.metric, sample.max_new_tokens) == (task, metric, tokens)


@pytest.mark.parametrize("task", RULER)
def test_line_ends_may_have_been_replaced_and_the_prefix_left_in_the_input(task, tmp_path, chunker):
    before, question, prefix, *_ = RULER[task]
    flat = " ".join(f"{before} {question} {prefix}".split())
    (sample,) = read_ruler(
        written(tmp_path / "a.jsonl", {"index": 0, "input": flat, "outputs": ["x"]}), chunker
    )
    assert "".join(sample.chunks) == " ".join(before.split())
    assert sample.question == " ".join(f"{question} {prefix}".split())


@pytest.mark.parametrize(("tokens", "overlap"), [(512, 0), (512, 50), (1000, 50)])
def test_the_context_is_cut_as_asked(tokens, overlap, tmp_path):
    chunker = Chunker(tiny_tokenizer(), tokens, overlap)
    text = f"A special magic number is hidden within the following text. {GRASS * 40}"
    file = written(tmp_path / "a.jsonl", line(input=f"{text}\n{ASKED}"))
    (sample,) = read_ruler(file, chunker)
    sizes = [len(tiny_tokenizer()(chunk, add_special_tokens=False)["input_ids"]) for chunk in sample.chunks]
    assert len(sizes) > 2
    assert max(sizes) <= tokens
    joined = "".join(sample.chunks)
    assert (joined == text) == (overlap == 0)
    assert len(joined) >= len(text)


def test_a_task_is_named_by_its_folder_or_its_file(tmp_path, chunker):
    written(tmp_path / "niah_multiquery" / "validation.jsonl", line(), line())
    written(tmp_path / "vt.jsonl", line("vt"))
    samples = list(read_ruler(tmp_path, chunker))
    assert [sample.task for sample in samples] == ["niah_multiquery", "niah_multiquery", "vt"]
    assert len({sample.name for sample in samples}) == 3
    assert [sample.task for sample in read_ruler(tmp_path, chunker, 1)] == ["niah_multiquery", "vt"]


def test_a_sample_has_the_same_name_for_every_path_and_another_for_other_chunks(tmp_path, chunker):
    (here,) = read_ruler(written(tmp_path / "here" / "vt.jsonl", line("vt")), chunker)
    (there,) = read_ruler(written(tmp_path / "there" / "vt.jsonl", line("vt")), chunker)
    (other,) = read_ruler(written(tmp_path / "vt.jsonl", line("vt", outputs=["x"])), chunker)
    (cut,) = read_ruler(tmp_path / "vt.jsonl", Chunker(tiny_tokenizer(), 100))
    assert here.name == there.name
    assert len({here.name, other.name, cut.name}) == 3


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ('{"input": ', "not JSON"),
        ("[1, 2]", "object with named fields"),
        (line(input=None), "'input' is missing"),
        (line(outputs=[]), "'outputs' is \\[\\]"),
        (line(outputs="4417"), "list of strings"),
        (line(answer_prefix=7), "'answer_prefix' is 7"),
        (line(input=f"[INST] {NIAH}\n{ASKED}"), "--model_template_type base"),
        (line(input=NIAH), "without the question"),
        (line("vt", input=RULER["vt"][0]), "without the question"),  # only the worked example has one
        (line(input=f"A special magic number is hidden within.\n{SINGLE[:30]}"), "without the question"),
    ],
)
def test_a_damaged_line_is_named(damaged, said, tmp_path, chunker):
    file = written(tmp_path / "niah.jsonl", line(), "", damaged)
    samples = read_ruler(file, chunker)
    next(samples)
    with pytest.raises(InvalidRequest, match=said) as caught:
        next(samples)
    assert f"{file}, line 3: " in str(caught.value)


def test_bytes_that_are_no_text_are_a_damaged_line(tmp_path, chunker):
    file = tmp_path / "niah.jsonl"
    file.write_bytes(b'{"input": "\xff\xfe"}\n')
    with pytest.raises(InvalidRequest, match="line 1: not JSON"):
        list(read_ruler(file, chunker))


@pytest.mark.parametrize("reader", READERS)
def test_a_path_without_data_is_refused(reader, tmp_path, chunker):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(InvalidRequest, match=r"no folder with \.jsonl files"):
            list(READERS[reader](path, chunker, None))


# LongBench's own tables: data set, metric, tokens to generate.
OFFICIAL = """
narrativeqa f1 128 / qasper f1 128 / multifieldqa_en f1 64 / multifieldqa_zh f1_zh 64 / hotpotqa f1 32
2wikimqa f1 32 / musique f1 32 / dureader rouge_l_zh 128 / gov_report rouge_l 512 / qmsum rouge_l 512
multi_news rouge_l 512 / vcsum rouge_l_zh 512 / trec classification 64 / triviaqa f1_first_line 32
samsum rouge_l_first_line 128 / lsht classification 64 / passage_count count 32
passage_retrieval_en retrieval 32 / passage_retrieval_zh retrieval_zh 32
lcc code_similarity 64 / repobench-p code_similarity 64
"""
TABLE = [entry.split() for row in OFFICIAL.strip().splitlines() for entry in row.split(" / ")]


def entry(dataset="hotpotqa", **changes):
    made = {
        "input": "Who built {the} tower?",
        "context": f"Passage 1:\n{GRASS}",
        "answers": ["Ruth", "Ruth Bell"],
        "length": 20,
        "dataset": dataset,
        "language": "en",
        "all_classes": None,
        "_id": "4a1f",
    }
    return made | changes


def test_all_data_sets_have_their_official_metric_and_length():
    ours = [[name, d.metric, str(d.max_new_tokens)] for name, d in DATA_SETS.items()]
    assert sorted(ours) == sorted(TABLE)
    assert all(metric in METRICS for _, metric, _ in ours)


@pytest.mark.parametrize("dataset", [name for name, *_ in TABLE])
def test_a_longbench_line_becomes_a_sample(dataset, tmp_path, chunker):
    classes = ["Ruth", "Bell"]
    file = written(tmp_path / f"{dataset}.jsonl", entry(dataset, all_classes=classes))
    (sample,) = read_longbench(file, chunker)
    assert "".join(sample.chunks) == f"Passage 1:\n{GRASS}"
    assert (sample.task, sample.metric) == (dataset, DATA_SETS[dataset].metric)
    without_input = {"gov_report", "multi_news", "vcsum", "passage_count"}
    assert ("Who built {the} tower?" in sample.question) == (dataset not in without_input)
    assert sample.question.strip()
    if sample.metric != "classification":
        assert sample.answers == ("Ruth", "Ruth Bell")


def test_a_class_is_scored_among_all_classes(tmp_path, chunker):
    file = written(
        tmp_path / "trec.jsonl", entry("trec", answers=["City"], all_classes=["Date", "City", "Food"])
    )
    (sample,) = read_longbench(file, chunker)
    score = METRICS[sample.metric]
    assert score("City\nType: Date", sample.answers) == 1.0
    assert score("City, Food", sample.answers) == 0.5
    assert score("Date", sample.answers) == 0.0


def test_longbench_e_counts_as_a_separate_task(tmp_path, chunker):
    written(tmp_path / "hotpotqa.jsonl", entry())
    written(tmp_path / "hotpotqa_e.jsonl", entry())
    written(tmp_path / "trec_e.jsonl", entry("trec_e", all_classes=["Ruth"]))
    samples = list(read_longbench(tmp_path, chunker))
    assert [sample.task for sample in samples] == ["hotpotqa", "hotpotqa_e", "trec_e"]
    assert len({sample.name for sample in samples}) == 3


def test_empty_answers_are_left_out(tmp_path, chunker):
    (sample,) = read_longbench(written(tmp_path / "a.jsonl", entry(answers=["", "Ruth"])), chunker)
    assert sample.answers == ("Ruth",)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (entry("hotpot"), "no data set 'hotpot'"),
        (entry(dataset=None), "'dataset' is missing"),
        (entry(answers=[""]), "'answers' is"),
        (entry(answers=["Ruth", 3]), "'answers' is"),
        (entry(context=""), "the context is empty"),
        (entry(input=None), "'input' is missing"),
        (entry("trec"), "'all_classes' is missing"),
    ],
)
def test_a_damaged_longbench_line_is_named(damaged, said, tmp_path, chunker):
    file = written(tmp_path / "a.jsonl", damaged)
    with pytest.raises(InvalidRequest, match=said) as caught:
        list(read_longbench(file, chunker))
    assert f"{file}, line 1: " in str(caught.value)
