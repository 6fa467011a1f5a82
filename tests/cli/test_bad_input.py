"""One clear line and a non-zero exit code, never a traceback."""

import json
import re

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave.errors import KvweaveError
from kvweave.samples import DOCUMENTS
from kvweave.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"


def invoker(home):
    """Runs the command in this process, which saves loading PyTorch again; the result holds the exception."""
    runner = CliRunner(
        env={
            "KVWEAVE_HOME": str(home),
            "KVWEAVE_CHUNK_TOKENS": "48",
            "KVWEAVE_RECIPE": "reuse",
            "COLUMNS": "200",
        }
    )
    return lambda *words: runner.invoke(app, [str(word) for word in words])


@pytest.fixture
def invoke(tmp_path):
    """The command with an empty home."""
    return invoker(tmp_path / "home")


@pytest.fixture(scope="module")
def indexed_home(tmp_path_factory):
    """A home that holds a document, for commands that change nothing."""
    home = tmp_path_factory.mktemp("indexed")
    assert invoker(home)("add", DOCUMENTS / "passwords.md").exit_code == 0
    return home


def refusal(result) -> str:
    assert isinstance(result.exception, KvweaveError), result.exception or result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


def test_a_missing_path(invoke, tmp_path):
    assert "nowhere does not exist" in refusal(invoke("add", tmp_path / "nowhere"))


def test_a_knowledge_base_that_is_not_there_is_not_made_by_looking_for_it(invoke, tmp_path, documents):
    for words in (("ask", GLORRIC), ("ls",), ("rm", "--all"), ("cache", "stats"), ("cache", "clear")):
        assert "there is none yet" in refusal(invoke(*words))
    assert not (tmp_path / "home").exists()
    invoke("add", documents)
    assert "there are default" in refusal(invoke("ls", "--kb", "defualt"))
    assert sorted(path.name for path in (tmp_path / "home" / "kb").iterdir()) == ["default"]


def test_an_emptied_knowledge_base(invoke, documents):
    invoke("add", documents)
    assert "removed 3 documents" in invoke("rm", "--all").output
    assert "kvweave add" in refusal(invoke("ask", GLORRIC))
    assert "holds no documents" in invoke("ls").output


def test_text_of_documents_is_never_taken_for_markup(invoke, documents):
    (documents / "[red]x.md").write_text(
        "# The [/usr] guide\n\n[/etc/fstab] [bold]The password of Plabry is needle."
    )
    (documents / "[oops].bin").write_bytes(bytes(range(256)) * 10)
    added = invoke("add", documents)
    assert added.exit_code == 0, added.exception
    assert "[oops].bin" in added.output
    listed = invoke("ls")
    assert "The [/usr] guide" in listed.output
    assert "[red]x.md" in listed.output
    asked = invoke("ask", "What is the password of Plabry?", "--explain")
    assert asked.exit_code == 0, asked.exception
    assert "[/etc/fstab] [bold]The password" in asked.output


def test_verify_tells_by_its_exit_code_that_damage_was_found(invoke, documents, tmp_path):
    invoke("add", documents)
    sound = invoke("cache", "verify")
    assert sound.exit_code == 0
    assert re.fullmatch(r"\d+ entries verified, none damaged\.", sound.output.strip())
    file = next((tmp_path / "home").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    damaged = invoke("cache", "verify")
    assert damaged.exit_code == 1
    assert "1 damaged and dropped:" in damaged.output
    assert file.name in damaged.output
    assert invoke("cache", "verify").exit_code == 0


def test_bad_files_among_good_ones_are_skipped_and_reported(invoke, documents):
    (documents / "picture.bin").write_bytes(bytes(range(256)) * 40)
    (documents / "empty.txt").write_text("")
    (documents / "broken.pdf").write_bytes(b"%PDF-1.4 nothing more")
    result = invoke("add", documents, "--json")
    report = json.loads(result.stdout)
    assert len(report["added"]) == 3
    assert {skipped["path"].rsplit("/", 1)[1] for skipped in report["skipped"]} == {
        "picture.bin",
        "empty.txt",
        "broken.pdf",
    }
    assert all(skipped["reason"] for skipped in report["skipped"])


def test_a_model_folder_without_weights(invoke, documents, tmp_path):
    tiny_model().config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert "no weights" in refusal(invoke("add", documents, "--model", tmp_path / "model"))


def test_a_store_written_by_another_model(invoke, documents, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert invoke("add", documents).exit_code == 0
    message = refusal(invoke("ask", GLORRIC, "--model", tmp_path / "model"))
    assert "'reference'" in message
    assert str(tmp_path / "model") in message


def test_a_prompt_that_is_too_long(invoke, documents):
    invoke("add", documents)
    assert "more than the 4096" in refusal(invoke("ask", GLORRIC, "--max-new-tokens", "4050"))
    assert invoke("ask", GLORRIC, "--max-new-tokens", "4000", "--drop-chunks").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ask", GLORRIC, "--recipe", "fastest"), "choose one of auto, full"),
        (("ask", GLORRIC, "--ratio", "1.5"), "between 0 and 1"),
        (("ask", GLORRIC, "--top-k", "0"), "at least one chunk"),
        (("ask", ""), "empty"),
        (("rm",), "--all"),
        (("rm", ""), "path is empty"),
        (("add", ""), "path is empty"),
        (("ask", GLORRIC, "--device", "cuda:99"), "cuda:99"),
        (("cache", "limit", "99999999999T"), "2^63"),
        (("ask", GLORRIC, "--temperature", "1e-300"), "temperature"),
        (("ask", GLORRIC, "--temperature", "inf"), "temperature"),
        (("rm", "/nowhere"), "nothing in knowledge base"),
        (("cache", "limit", "much"), "500MB"),
        (("ask", GLORRIC, "--kb", "../x"), "not usable"),
        (("ask", GLORRIC, "--dtype", "float8"), "float8"),
        (("ask", GLORRIC, "--device", "abacus"), "abacus"),
    ],
)
def test_values_that_cannot_be_honoured(indexed_home, words, said):
    assert said in refusal(invoker(indexed_home)(*words))


@pytest.mark.parametrize(
    "words", [("ask", GLORRIC, "--fastest"), ("ask",), ("frobnicate",), ("ask", GLORRIC, "--ratio", "much")]
)
def test_wrong_usage_exits_with_two_and_help(invoke, words):
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_a_wrong_setting_in_the_configuration_file(invoke, tmp_path, documents):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text("topk = 3\n")
    assert "unknown setting 'topk'" in refusal(invoke("ls"))
    (tmp_path / "home" / "config.toml").write_text("top_k = = 3\n")
    assert "not valid TOML" in refusal(invoke("ls"))
    (tmp_path / "home" / "config.toml").write_text('top_k = "many"\n')
    assert "top_k" in refusal(invoke("ls"))


def test_limit_and_clear(invoke, documents):
    invoke("add", documents)
    assert "300.0 kB" in invoke("cache", "limit", "300kB").output
    assert json.loads(invoke("cache", "stats", "--json").stdout)["bytes"] <= 300_000
    assert invoke("cache", "clear").exit_code == 0
    assert json.loads(invoke("cache", "stats", "--json").stdout)["entries"] == 0
    assert json.loads(invoke("ask", GLORRIC, "--json").stdout)["text"] == "walnut"


def test_the_line_that_a_user_sees(command, tmp_path):
    done = command("add", tmp_path / "nowhere", code=1)
    assert done.stderr.strip().splitlines() == [f"error: {tmp_path / 'nowhere'} does not exist"]


def test_a_broken_character_in_the_question_and_a_huge_number_of_chunks(invoke, documents):
    invoke("add", documents)
    assert invoke("ask", "What is the password of Glorric?\udcff").exit_code == 0
    assert invoke("ask", GLORRIC, "--top-k", str(10**25)).output.startswith("walnut")


def test_lost_data_files_of_the_index(invoke, documents, tmp_path):
    invoke("add", documents)
    for file in (tmp_path / "home").rglob("*.lance"):
        if file.is_file():
            file.unlink()
    assert "index of chunks cannot be used" in refusal(invoke("ask", GLORRIC))
    assert invoke("rm", "--all").exit_code == 0
    assert invoke("add", documents).exit_code == 0
    assert invoke("ask", GLORRIC).output.startswith("walnut")


def test_names_are_printed_whole_without_a_terminal(invoke, documents):
    invoke("add", documents)
    rows = [line.split("\t") for line in invoke("ls").output.splitlines()]
    assert rows[0][0] == str(documents / "badges.txt")
    assert all(len(row) == 4 for row in rows)
