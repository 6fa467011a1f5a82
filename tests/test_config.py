"""Settings from arguments, environment, file and defaults, in this order."""

from pathlib import Path

import pytest

from kvweave.config import default_home, read_config
from kvweave.errors import InvalidRequest


def test_arguments_win_over_environment_over_file_over_defaults(tmp_path):
    (tmp_path / "config.toml").write_text("top_k = 3\nchunk_tokens = 100\noverlap_tokens = 7\n")
    environment = {
        "KVWEAVE_TOP_K": "4",
        "KVWEAVE_CHUNK_TOKENS": "200",
        "KVWEAVE_TEMPERATURE": "0.5",
        "KVWEAVE_MODEL": "",
    }
    config = read_config(tmp_path, environment, top_k=5, chunk_tokens=None)
    assert config.retrieval.top_k == 5
    assert config.chunking.chunk_tokens == 200
    assert config.chunking.overlap_tokens == 7
    assert config.generation.temperature == 0.5
    assert config.model.model is None
    assert config.recipe == "reuse"


def test_home_from_the_environment():
    assert default_home({"KVWEAVE_HOME": "/somewhere"}) == Path("/somewhere")
    assert default_home({}).name == "kvweave"


@pytest.mark.parametrize(
    ("environment", "given", "said"),
    [
        ({"KVWEAVE_TOP_K": "many"}, {}, "KVWEAVE_TOP_K is 'many'"),
        ({}, {"top_k": "many"}, "top_k is 'many'"),
        ({}, {"top_k": True}, "top_k is True"),
        ({}, {"topk": 3}, "unknown setting 'topk'"),
        ({}, {"chunk_tokens": 1}, "chunk_tokens is 1"),
        ({}, {"overlap_tokens": -1}, "overlap_tokens is -1"),
        ({}, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({}, {"temperature": -1.0}, "temperature is -1"),
        ({}, {"top_p": 0.0}, "top_p is 0"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, environment, given, said):
    with pytest.raises(InvalidRequest, match=said):
        read_config(tmp_path, environment, **given)
