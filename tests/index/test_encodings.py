"""Encodings are decided by evidence, and a doubt is told."""

import pytest

from kvweave.documents.encodings import decode, decode_as
from kvweave.errors import UnreadableDocument

FRENCH = "Le café de Zoé est à côté de l'hôtel. Les élèves y étaient déjà. " * 10
ENGLISH = "The door of the old house opens with a word that few people know. " * 8
PHRASES = {
    "cp1251": "Пароль Ивана",
    "koi8_r": "Привет, мир, как дела",
    "cp1253": "Καλημέρα κόσμε, ο κωδικός είναι μυστικός",
    "cp1250": "Zażółć gęślą jaźń, mówił stary człowiek, który mieszkał w Łodzi",
    "cp1256": "كلمة المرور هي الشمس في السماء",
    "cp932": "東京の会議は来週の月曜日に開催されます",
    "euc_jp": "東京の会議は来週の月曜日に開催されます",
    "gb18030": "合同续签日期是明年三月",
    "big5": "國際標準化組織的文件在這裡",
    "euc_kr": "안녕하세요 비밀번호는 나무입니다",
    "cp1252": "Señor Muñoz, “¿qué año?” – à côté",
}


def test_a_stray_byte_in_utf8_is_one_replacement_character():
    data = FRENCH.encode()
    at = next(n for n in range(300, 310) if data[n] < 128 and data[n - 1] < 128)
    text, note = decode(data[:at] + b"\xff" + data[at:])
    expected = data[:at].decode() + "\ufffd" + data[at:].decode()
    assert text == expected
    assert "UTF-8" in note
    assert "1 place" in note


def test_a_byte_order_mark_changes_nothing_about_damage():
    data = FRENCH.encode()
    assert decode(b"\xef\xbb\xbf" + data[:65] + b"\xff" + data[65:]) == decode(
        data[:65] + b"\xff" + data[65:]
    )
    short = b"\xef\xbb\xbfThe key \xff is under the mat, and \xff the code is walnut."
    assert decode(short) == (short[3:].decode("utf-8", "replace"), "damaged UTF-8: 2 places shown as U+FFFD")
    for marked in (FRENCH.encode("utf-16") + b"x", FRENCH.encode("utf-16") + b"\x00\xd8"):
        text, note = decode(marked)
        assert text == FRENCH + "\ufffd"
        assert "1 place" in note
        assert "UTF-16" in note
    with pytest.raises(UnreadableDocument, match="UTF-16"):
        decode(b"\xff\xfe" + bytes(range(256)) * 40)


def test_a_few_nul_bytes_in_a_log_are_told():
    log = "The pump failed at nine.\n" * 40
    text, note = decode(log.encode() + b"\0" * 5 + log.encode())
    assert text == log + "\ufffd" * 5 + log
    assert "5 places" in note


def test_a_file_cut_inside_a_character_is_still_utf8():
    text, note = decode(FRENCH.encode()[:-1] + "é".encode()[:1])
    assert text.startswith("Le café de Zoé")
    assert text.count("\ufffd") == 1
    assert note


def test_damage_that_was_in_the_text_before_is_not_counted():
    assert "1 place" in decode((FRENCH + "\ufffd").encode() + b"\xff").note


@pytest.mark.parametrize("encoding", PHRASES)
@pytest.mark.parametrize("around", ["", ENGLISH])
def test_a_phrase_in_another_encoding_is_right_or_flagged(encoding, around):
    text = f"{around}\nThe word is {PHRASES[encoding]}.\n{around}" if around else PHRASES[encoding]
    found, note = decode(text.encode(encoding))
    assert found == text or note
    assert around in found


@pytest.mark.parametrize("encoding", sorted(PHRASES.keys() - {"koi8_r"}))
def test_a_phrase_is_read_in_its_encoding(encoding):
    text = f"{ENGLISH}\nThe word is {PHRASES[encoding]}.\n{ENGLISH}"
    found, note = decode(text.encode(encoding))
    assert PHRASES[encoding] in found
    assert "uncertain" in note


def test_a_stray_byte_in_english_is_no_letter_without_a_word_about_it():
    at = ENGLISH.index("old")
    for stray in (b"\xff", b"\xff" * 20, b"\xe9"):
        text, note = decode(ENGLISH[:at].encode() + stray + ENGLISH[at:].encode())
        assert ENGLISH[at:] in text
        assert "uncertain" in note
    quoted = ENGLISH + "It’s “walnut” – or so they say…"
    assert decode(quoted.encode("cp1252")) == (quoted, "")


def test_western_text_that_two_kinds_of_evidence_agree_on_is_not_flagged():
    assert decode(FRENCH.encode("cp1252")) == (FRENCH, "")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(
    "text",
    [
        "Grüße aus Köln,\nund 12 Äpfel.\n",
        "Привет, мир. Как дела 12?\nХорошо.\n",
        "合同续签日期是明年三月，请大家注意。\n第二行很好。\n",
        "合同续签日期为每年三月一日,逾期视为放弃\n" * 5,
    ],
)
def test_wide_text_without_a_byte_order_mark_is_read(encoding, text):
    assert decode(text.encode(encoding)) == (text, "")


def test_damaged_wide_text_is_refused_by_name():
    data = ("The password is walnut.\n" * 4).encode("utf-16-le") + b"\x00\xd8"
    with pytest.raises(UnreadableDocument, match="UTF-16"):
        decode(data)


@pytest.mark.parametrize("data", [b"some text\0more", b"\x7fELF\x02\x01\0\0\0rest", bytes(range(256)) * 8])
def test_binary_files_are_refused(data):
    with pytest.raises(UnreadableDocument, match="binary"):
        decode(data)


def test_what_fits_no_encoding_keeps_its_ascii_and_is_flagged():
    text, note = decode(ENGLISH.encode() + b"\x81\x8d\x8f \xe9\xff\xe8\xfe")
    assert ENGLISH in text
    assert "uncertain" in note


def test_japanese_in_escape_sequences_is_read():
    text = PHRASES["cp932"] + "\nE-4012\n"
    assert decode(text.encode("iso2022_jp")) == (text, "")
    coloured = "\x1b[31mred\x1b[0m costs \x1b$5\n"
    assert decode(coloured.encode()) == (coloured, "")


def test_a_declared_encoding_is_used():
    page = f'<meta charset="koi8-r"><p>{PHRASES["koi8_r"]}</p>'
    assert decode(page.encode("koi8-r")) == (page, "")
    source = f"# -*- coding: cp1251 -*-\nname = '{PHRASES['cp1251']}'\n"
    assert decode(source.encode("cp1251")) == (source, "")


@pytest.mark.parametrize("data", ["schön, und Köln".encode("cp850"), "本田,1".encode("cp932"), b"wal\x93nut"])
def test_the_byte_of_a_quotation_mark_within_a_word_is_flagged(data):
    assert "uncertain" in decode(data).note


def test_quotation_marks_and_dashes_alone_are_certain():
    assert decode("“It’s here” – at last…".encode("cp1252")) == ("“It’s here” – at last…", "")


@pytest.mark.parametrize("label", ["iso-8859-1", "latin1", "us-ascii; charset=windows-1252"])
def test_what_is_called_latin_1_is_read_as_browsers_read_it(label):
    page = f'<meta charset="{label}"><p>Norbert’s rope – the long one… costs 30 €</p>'
    assert decode(page.encode("cp1252")) == (page, "")
    with_undefined = page.encode("cp1252") + b"\x81"
    assert decode(with_undefined) == (page + "\x81", "")


def test_korean_with_syllables_of_windows_949_is_read():
    text = "비밀번호는 똠방각하입니다.\n" * 2
    found, note = decode(text.encode("cp949"))
    assert found == text
    assert "uncertain" in note
    page = f'<meta charset="euc-kr">{text}'
    assert decode(page.encode("cp949")) == (page, "")


@pytest.mark.parametrize("encoding", ["cp850", "cp437", "mac_roman"])
def test_western_text_of_dos_or_macintosh_is_never_certain(encoding):
    text = "Alle Menschen sind frei und gleich an Würde. Grüße aus Köln über schöne Äpfel.\n" * 8
    found, note = decode(text.encode(encoding))
    assert found == text or "uncertain" in note


def test_greek_of_dos_is_never_certain():
    assert "uncertain" in decode(("Όλοι οι άνθρωποι γεννιούνται ελεύθεροι\n" * 8).encode("cp737")).note


@pytest.mark.parametrize("declared", ["punycode", "idna", "undefined", "unicode_escape", "hex", "a\\0b"])
def test_what_is_no_encoding_of_files_is_not_used_though_it_is_declared(declared):
    """Some of Python's codecs raise other errors than those of an encoding, or take quadratic time."""
    assert decode(f"charset={declared}\n".encode() + "café\n".encode("cp1252")).text.endswith("café\n")
    with pytest.raises(LookupError):
        decode_as(b"text", declared.replace("\\0", "\0"))
