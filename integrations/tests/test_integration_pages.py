"""The marked examples of the integrations' pages run as they are, in this process, over the shared knowledge base."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"<!-- tested -->\n```python\n(.*?)```", re.S)
SAID = {
    "integrations/langchain-kvweave/README.md": ["walnut"],
    "integrations/llama-index-llms-kvweave/README.md": ["walnut"],
    "integrations/llama-index-retrievers-kvweave/README.md": ["passwords.md", "walnut"],
    "integrations/transformers.md": ["tokens not computed\nwalnut"],
}


@pytest.mark.parametrize("page", SAID)
def test_marked_examples_run(page, home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVWEAVE_HOME", home)
    code = "\n".join(MARKED.findall((ROOT / page).read_text()))
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert [word for word in SAID[page] if word not in said] == []


def test_every_page_with_an_example_is_run():
    pages = {path for path in ROOT.glob("integrations/**/*.md") if MARKED.search(path.read_text())}
    assert pages == {ROOT / page for page in SAID}
