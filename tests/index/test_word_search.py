"""Search by words in every script: the chunk that holds what is asked for comes first, though its vector is far away."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from lancedb.index import FTS

from kvweave.index import vector_index
from kvweave.index.documents import document_version
from kvweave.index.vector_index import VectorIndex, arrow_table
from kvweave.index.words import COLUMN, index_words, query_words
from kvweave.types import Chunk

D = 8
NEAR, FAR = np.eye(D, dtype=np.float32)[:2]
SHA = "4f9a" * 16
DIGITS = "31415926" * 8

CASES = {  # what is looked for, and the chunk that holds it
    "chinese": ("合同续签日期", "双方同意：合同续签日期为每年三月一日，逾期视为放弃。"),
    "chinese question": ("合同续签日期是什么时候？", "双方同意：合同续签日期为每年三月一日，逾期视为放弃。"),
    "japanese": ("国際標準化", "この規格は国際標準化機構の委員会で審議された。"),
    "japanese question": ("国際標準化とは何ですか", "この規格は国際標準化機構の委員会で審議された。"),
    "katakana": ("キャッシュ", "前回のKVキャッシュを再利用します。"),
    "korean, other particle": ("합의는", "양측은 어제 합의를 마쳤다."),
    "thai": ("ราคา", "กรุณาสอบถามราคาที่เคาน์เตอร์"),
    "one character": ("猫", "庭に猫がいる。"),
    "checksum in digits": (DIGITS, f"The archive has the checksum {DIGITS}, as published."),
    "checksum in hex": (SHA, f"sha256 {SHA.upper()}  backup.tar"),
    "identifier": ("E-4012", "Error E-4012 means that the valve is shut."),
    "identifier in a question": ("What does error K_77x mean?", "K_77x: the pump is dry."),
    "part of a name in code": ("user name", "Call getUserName() before the first request."),
    "name in code": ("getUserName", "Call getUserName() before the first request."),
    "C++": ("C++", "The driver is written in C++ and tested."),
    "a name of function words": ("The Who", "In June The Who played in Leeds."),
    "a name of function words in a question": ("Is It on Monday?", "On Monday we saw It at the cinema."),
    "an abbreviation": ("WHO guidance", "The WHO has published guidance on masks."),
    "russian, other case": ("пароль Ивана", "Никому не говорите пароля, который у Ивана."),
    "russian question": ("Где лежит ключ?", "Не берите ключа, который лежит под ковром."),
    "russian plural": ("договоры", "Мы подписали договор вчера."),
    "german, other case": ("Wo sind die Verträge?", "Der Vertrag ist im Schrank."),
    "french, elision and accent": ("accord", "Nous attendons l'accord de Zoé."),
    "spanish plural": ("¿Dónde están los contratos?", "El contrato está en el armario."),
    "accents left out": ("Zoe", "Demandez à Zoé."),
    "arabic with an article": ("متجر", "يفتح المتجر في التاسعة صباحا."),
    "hindi": ("किताबें", "यह किताब मेज पर है।"),
    "english plural": ("zebras", "A zebra crosses the road."),
    "full-width letters": ("ＫＶ９", "The sensor KV9 is broken."),
}


def filler(number: int) -> str:
    """A chunk in one of several languages, with many function words."""
    words = {
        0: "the who was there when it was and who is the one that the man who knew where the rest of it was for".split(),
        1: "der die das und wer was wo ist sind von dem haus in der stadt an dem fluss".split(),
        2: "и в на где кто что он она дом река город лежат у него".split(),
        3: ["合意", "続き", "日々", "国家", "時間", "的", "是", "什么", "时候", "标准", "期日", "同样"],
    }[number % 4]
    chosen = random.Random(number)
    return (" " if number % 4 < 3 else "").join(chosen.choices(words, k=30)) + f" {number}"


def chunks(source, *texts):
    return [Chunk(text, (n,), f"{source}{n}", source, "d", n, n + 1) for n, text in enumerate(texts)]


def visible(*sources):
    return frozenset(document_version(source, "d") for source in sources)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    index = VectorIndex(tmp_path_factory.mktemp("index") / "vectors", D)
    texts = [filler(number) for number in range(200)]
    index.add(chunks("/a", *texts), np.tile(NEAR, (len(texts), 1)))
    targets = list(dict.fromkeys(text for _, text in CASES.values()))
    index.add(chunks("/z", *targets), np.tile(FAR, (len(targets), 1)))
    return index


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_chunk_that_holds_it_comes_first(index, case, swept):
    if swept:
        index.sweep(visible("/a", "/z"))
    question, expected = CASES[case]
    found = index.search(question, NEAR, 5, visible("/a", "/z"))
    assert found[0].text == expected, [(each.text, each.score, each.reason) for each in found]
    assert found[0].reason.word_rank is not None


def test_of_many_equal_chunks_the_first_ones_are_found_whenever_they_were_added(tmp_path):
    index = VectorIndex(tmp_path / "vectors", D)
    for source, count in (("/z", 300), ("/a", 50), ("/m", 200)):
        index.add(
            chunks(source, *(f"pump {number:03}" for number in range(count))), np.tile(NEAR, (count, 1))
        )
    found = index.search("pump", NEAR, 5, visible("/a", "/m", "/z"))
    assert [(each.source, each.position) for each in found] == [("/a", number) for number in range(5)]


def test_a_question_of_common_words_alone_still_finds_by_vectors(index):
    assert len(index.search("Who was it?", NEAR, 5, visible("/a", "/z"))) == 5
    assert index.search("?", FAR, 1, visible("/a", "/z"))[0].source == "/z"


def test_a_word_in_many_chunks_puts_none_first(index):
    found = index.search("haus", NEAR, 5, visible("/a", "/z"))
    assert all(not each.reason.quotes and not each.reason.all_words for each in found)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("When does the ferry leave?", ["ferry", "~ferri", "leave", "~leav"]),
        ("What's Anna's password?", ["anna", "~anna", "anna's", "password", "~password"]),
        ("Was kostet der Eintritt?", ["eintritt", "~eintritt"]),
        ("The Who", ["^who"]),
        ("who is it", ["who", "is", "it"]),
        ("", []),
        ("?!", []),
        ("\ud800 \x00", []),
        ("a" * 5000, ["a" * 200, "~" + "a" * 200]),
    ],
)
def test_words_of_questions(question, words):
    assert list(query_words(question).words) == words


def test_every_word_of_a_question_is_found_in_the_words_of_its_own_text():
    for question, _ in CASES.values():
        assert set(query_words(question).words) <= set(index_words(question).split()), question


# Indexes of earlier versions


def earlier_index(folder, texts):
    """The table as the first version made it: no column of words, an index over the text."""
    import lancedb

    rows = arrow_table(
        chunks("/a", *texts), np.tile(NEAR, (len(texts), 1)), 1.0, VectorIndex(folder / "x", D).schema
    )
    connection = lancedb.connect(folder / "vectors")
    table = connection.create_table("chunks", rows.drop_columns([COLUMN]))
    table.create_index("text", config=FTS(), replace=False)
    return table


def test_an_earlier_index_gets_words_once_and_keeps_its_rows(tmp_path):
    earlier = earlier_index(tmp_path, ["合同续签日期", "two", "three"])
    before = earlier.to_arrow().sort_by("position")
    index = VectorIndex(tmp_path / "vectors", D)
    assert index.search("续签", FAR, 1, visible("/a"))[0].text == "合同续签日期"
    after = index.table.to_arrow().sort_by("position")
    assert after.drop_columns([COLUMN]).equals(before.select(after.drop_columns([COLUMN]).column_names))
    assert [each.columns for each in index.table.list_indices()] == [[COLUMN]]
    version = index.table.version
    assert VectorIndex(tmp_path / "vectors", D).table.version == version


@pytest.mark.parametrize("step", ["add_word_column", "index_words", "_create_word_index", "_drop_others"])
def test_a_conversion_that_breaks_off_is_continued(tmp_path, monkeypatch, step):
    earlier_index(tmp_path, ["合同续签日期", "two", "three"])
    whole = getattr(vector_index, step)

    def broken(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(vector_index, step, broken)
    with pytest.raises(KeyboardInterrupt):
        VectorIndex(tmp_path / "vectors", D)
    monkeypatch.setattr(vector_index, step, whole)
    index = VectorIndex(tmp_path / "vectors", D)
    assert [each.columns for each in index.table.list_indices()] == [[COLUMN]]
    assert index.search("续签", FAR, 1, visible("/a"))[0].reason.word_rank == 1
    assert len(index.search("two", FAR, 5, visible("/a"))) == 3


def test_several_that_open_an_earlier_index_at_once_convert_it_together(tmp_path, caplog):
    texts = [f"{filler(number)} number{number}" for number in range(40)]
    earlier_index(tmp_path, texts)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: VectorIndex(tmp_path / "vectors", D), range(4)))
    assert "could not be indexed" not in caplog.text
    for index in opened:
        assert index.table.count_rows() == len(texts)
        assert index.search("number7", FAR, 1, visible("/a"))[0].text == texts[7]
        assert [each.columns for each in index.table.list_indices()] == [[COLUMN]]


def test_rows_that_an_earlier_version_adds_get_their_words_by_a_sweep(tmp_path):
    index = VectorIndex(tmp_path / "vectors", D)
    index.add(chunks("/a", "one"), NEAR[None])
    rows = arrow_table(chunks("/b", "国際標準化"), NEAR[None], 1.0, index.schema)
    index.table.add(rows.drop_columns([COLUMN]))
    seen = visible("/a", "/b")
    assert {each.text for each in index.search("標準", NEAR, 5, seen)} == {"one", "国際標準化"}
    index.sweep(seen)
    assert index.search("標準", NEAR, 5, seen)[0].reason.word_rank == 1


def test_an_earlier_index_that_cannot_be_written_to_is_searched_as_it_is(tmp_path, monkeypatch, caplog):
    earlier_index(tmp_path, ["the zebra", "two"])

    def refused(*given):
        raise OSError("Read-only file system")

    monkeypatch.setattr(vector_index, "add_word_column", refused)
    index = VectorIndex(tmp_path / "vectors", D)
    assert "Read-only" in caplog.text
    assert index.search("zebras", FAR, 2, visible("/a"))[0].text == "the zebra"


def test_the_column_is_named_by_its_version():
    """A change of the words without a new version would leave old words in indexes; raise VERSION with these."""
    assert COLUMN == "words_2"
    text = "The Who pla\u00adyed in Leeds. Zebras: E-4012, Anna's 合同 пароля"
    expected = "4012 ^who anna anna's e-4012 in leeds played the who zebras ~anna ~leed ~play ~zebra ~парол пароля 合 合同 同"
    assert sorted(set(index_words(text).split())) == sorted(expected.split())


def test_words_are_strings_for_the_index():
    assert pa.array([index_words("\U0001f600 \U00020000 \x00")]).to_pylist() == ["\U00020000"]


@pytest.mark.parametrize("sign", ["\u00ad", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u200e"])
def test_signs_without_width_do_not_part_a_word(sign):
    assert index_words(f"Donau{sign}dampf{sign}schiff") == index_words("Donaudampfschiff")
    assert query_words(f"Donau{sign}dampfschiff") == query_words("Donaudampfschiff")
