"""HTML is converted to text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.documents.html import read_html

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
