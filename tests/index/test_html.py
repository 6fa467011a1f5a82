"""HTML is converted to text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selectolax.lexbor import SelectolaxError

from kvweave.documents.html import read_html
from kvweave.errors import UnreadableDocument

PAGE = """<!DOCTYPE html><html><head><title>The &amp; title</title><style>p{}</style>
<script>if (a < b) "</p>";</script></head><body><h1>Head</h1>
<p>First   line<br>second &lt;tag&gt; caf&eacute; &#128512;</p><div>in <b>bold</b>.</div>
<ul><li>one</li><li>two</li></ul><pre>  kept
    as is</pre><table><tr><td>a</td><td>b</td></tr></table><svg><title>no</title><text>no</text></svg></body></html>"""


def test_a_page_as_a_reader_sees_it() -> None:
    text, title = read_html(PAGE)[:2]
    assert title == "The & title"
    assert text == (
        "Head\n\nFirst line\nsecond <tag> café 😀\n\nin bold.\n\n- one\n- two\n\n  kept\n    as is\n\na\tb\n"
    )


@pytest.mark.parametrize(
    ("markup", "text", "title"),
    [
        ("plain text", "plain text\n", ""),
        ("<h1>Only <i>heading</i></h1>x", "Only heading\n\nx\n", "Only heading"),
        ("<head><title>t</title><body>never closed", "never closed\n", "t"),
        ("<p>a<p>b</p></div></p>c", "a\n\nb\n\nc\n", ""),
        ("<script>x", "", ""),
        ("<noscript>turn it on</noscript>seen", "seen\n", ""),
        ("", "", ""),
    ],
)
def test_sloppy_pages(markup: str, text: str, title: str) -> None:
    assert read_html(markup)[:2] == (text, title)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<title>Keys</title><p>The word is lantern.", "The word is lantern.\n"),
        (
            "<html><head><title>Keys</title><meta name=a><p>The word is lantern.</html>",
            "The word is lantern.\n",
        ),
        ("<p>Before.<svg><circle r=4 /><p>The word is lantern.", "Before.\n\nThe word is lantern.\n"),
        (
            '<?xml version="1.0"?><html><head><title/><script/></head><body><a id="x"/>seen</body></html>',
            "seen\n",
        ),
        ("<p>It is <![CDATA[no text]]>seen", "It is seen\n"),
    ],
)
def test_pages_are_read_as_the_standard_says(markup: str, text: str) -> None:
    assert read_html(markup).text == text


@pytest.mark.parametrize(
    "attribute",
    [
        "hidden",
        'hidden=""',
        'style="color: red; DISPLAY : none"',
        "style=display:none!important",
        'style="visibility:hidden"',
        'aria-hidden="true"',
    ],
)
def test_hidden_elements_are_left_out(attribute: str) -> None:
    assert read_html(f"<div {attribute}><p>no<br>no</p></div><p {attribute}>no</p>seen").text == "seen\n"
    assert read_html(f"<table><tr><td>a<td {attribute}>no<td>b</table>").text == "a\tb\n"


def test_a_formula_that_is_hidden_beside_its_picture_is_read() -> None:
    formula = "<math><mi>E</mi><mo>=</mo><mn>3</mn></math>"
    page = (
        f'<p>So <span><span style="display: none;">{formula}</span><img src=a.svg aria-hidden="true"></span>.'
    )
    assert read_html(page).text == "So E=3.\n"
    assert read_html(f"<p hidden>no {formula}</p>seen").text == "seen\n"


@pytest.mark.parametrize(
    "attribute", ["hidden=until-found", 'aria-hidden="false"', 'style="display:block"', "class=hidden"]
)
def test_other_elements_are_seen(attribute: str) -> None:
    assert read_html(f"<p {attribute}>seen</p>").text == "seen\n"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("10<sup>6</sup> and 10<sup>-3</sup> m<sup>2</sup>", "10^6 and 10^-3 m^2\n"),
        ("2<sup>n + 1</sup>, the 1<sup>st</sup>", "2^(n + 1), the 1st\n"),
        ("M<sup>me</sup> Vale, e<sup>kt</sup>, Oar<sup>TM</sup>", "Mme Vale, e^kt, OarTM\n"),
        ("<p><sup>1</sup> A note.", "1 A note.\n"),
        ("a note<sup>[1]</sup>", "a note[1]\n"),
        ("H<sub>2</sub>O, 10<sub>2</sub>", "H2O, 10_2\n"),
        ("is <del>50</del><ins>82</ins> coins", "is 82 coins\n"),
        ("costs <s>50</s>40", "costs ~~50~~ 40\n"),
        ("<math><mi>R</mi><mo>=</mo><mn>82</mn></math>", "R=82\n"),
        ("<math><mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><mn>2</mn></mfrac></math>", "(a+1)/2\n"),
        ("<math><msup><mn>10</mn><mn>6</mn></msup><msqrt><mi>x</mi></msqrt></math>", "10^6√(x)\n"),
        (
            "<math><semantics><mn>1</mn><annotation encoding=application/x-tex>1</annotation></semantics></math>",
            "1\n",
        ),
    ],
)
def test_powers_formulas_and_changes(markup: str, text: str) -> None:
    assert read_html(markup).text == text


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            "<tr><th>Depot<th>Tool<th>Pieces<tr><td rowspan=2>North<td>Saw<td>12<tr><td>Rake<td>7<tr><td>South<td>Saw<td>3",
            "Depot\tTool\tPieces\nNorth\tSaw\t12\nNorth\tRake\t7\nSouth\tSaw\t3\n",
        ),
        ("<tr>\n <td>a</td>\n <td colspan=2> b </td>\n <td>c</td>\n</tr>", "a\tb \t\tc\n"),
        ("<tr><td>a<td rowspan=2>b<tr><td>c", "a\tb\nc\tb\n"),
        ("<tr><td>a<td>b<td rowspan=0>c<tr><td>d<tr><td>e<td>f", "a\tb\tc\nd\t\tc\ne\tf\tc\n"),
        ("<tr><th colspan=2>Price<th>Tool<tr><td>1<td>2<td>Saw", "Price\t\tTool\n1\t2\tSaw\n"),
        ("<tr><td rowspan=2 colspan=2>a<td>b<tr><td>c", "a\t\tb\na\t\tc\n"),
        ("<tr><td rowspan=3>a<td>b<tbody><tr><td>c<td>d", "a\tb\nc\td\n"),
        ("<tr><td rowspan=x colspan=99999>a<tr><td>b", "a\nb\n"),
        ("<tr><td rowspan=2><table><tr><td rowspan=2>in<td>1<tr><td>2</table><td>b<tr><td>c", None),
    ],
)
def test_merged_cells_stand_in_their_columns(rows: str, text: str | None) -> None:
    found = read_html(f"<table>{rows}</table>").text
    if text is None:
        assert [line for line in found.splitlines() if line] == ["in\t1", "in\t2", "\tb", "\tc"]
    else:
        assert found == text


def test_deeply_nested_elements_are_read() -> None:
    assert read_html("<div>" * 5000 + "<math>" + "<mrow>" * 5000 + "x").text == "x\n"


TAGS = st.sampled_from(
    [
        "<p>",
        "</p>",
        "<script>",
        "</script>",
        "<title>",
        "<svg>",
        "</svg>",
        "<pre>",
        "<",
        "&",
        "<!--",
        "<br/>",
        "<head>",
    ]
)


@given(st.lists(st.one_of(TAGS, st.text(max_size=5))))
def test_any_markup_is_read(parts: list[str]) -> None:
    page = read_html("".join(parts))
    assert isinstance(page.text, str)
    assert isinstance(page.title, str)
    assert all(0 <= section.start <= len(page.text) for section in page.sections)


def test_a_heading_over_several_lines_keeps_its_words_apart() -> None:
    page = read_html("<h1>pub fn new() -> Error<div>where E: Copy</div></h1><p>Makes one.</p>")
    assert [section.heading for section in page.sections] == [("pub fn new() -> Error where E: Copy",)]


def test_a_section_that_begins_with_a_list_begins_at_its_dash() -> None:
    page = read_html("<h1>Fees</h1><table><tr><td>a<tr><td>b</table><ul><li>one</ul>")
    assert page.text[page.sections[-1].start :] == "- one\n"


def test_html_that_the_parser_gives_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, markup: bytes) -> None:
            raise SelectolaxError("Can't parse HTML.")

    monkeypatch.setattr("selectolax.lexbor.LexborHTMLParser", Refusing)
    with pytest.raises(UnreadableDocument, match="the parser gave this HTML up"):
        read_html("<p>It opens at six.")
