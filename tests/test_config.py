"""Settings come from arguments, environment, file and defaults, in this order."""

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
    assert config.recipe == "auto"


def test_every_setting_of_the_store_has_its_variable():
    environment = {
        "KVWEAVE_LIMIT_BYTES": "1",
        "KVWEAVE_HOST_BYTES": "2",
        "KVWEAVE_DEVICE_BYTES": "3",
        "KVWEAVE_SHARED": "redis://host",
        "KVWEAVE_SHARED_BYTES": "4",
    }
    store = read_config(Path("/nowhere"), environment).store
    assert (store.limit_bytes, store.host_bytes, store.device_bytes, store.shared_bytes) == (1, 2, 3, 4)
    assert store.shared == "redis://host"


def test_an_int_is_accepted_for_a_float():
    """Also where None is possible: a budget is a share of the entries, or a number of them."""
    config = read_config(Path("/nowhere"), {}, kv_budget=1024, idle_seconds_per_day=60, temperature=1)
    assert config.decoding.kv_budget == 1024
    assert config.idle.idle_seconds_per_day == 60
    assert config.generation.temperature == 1


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("true", True), ("No", False), ("0", False), ("", False)]
)
def test_a_switch_from_the_environment(text, on):
    assert read_config(Path("/nowhere"), {"KVWEAVE_THINK": text}).generation.think is on


def test_home_from_the_environment():
    assert default_home({"KVWEAVE_HOME": "/somewhere"}) == Path("/somewhere")
    assert default_home({}).name == "kvweave"


@pytest.mark.parametrize(
    ("environment", "given", "message"),
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
        ({}, {"kv_budget": 1.5}, "kv_budget is 1.5"),
        ({"KVWEAVE_RESIDENT_BYTES": "0"}, {}, "resident_bytes is 0"),
        ({"KVWEAVE_STORAGE": "int2"}, {}, "storage is 'int2'; choose one of auto, exact, int8, int4"),
        ({}, {"prediction_stride": 6}, "prediction_stride is 6"),
        ({}, {"decode_cutoff": 1.5}, "decode_cutoff is 1.5"),
        ({}, {"idle_power": "solar"}, "idle_power is 'solar'"),
        ({"KVWEAVE_IDLE_QUIET_S": "soon"}, {}, "KVWEAVE_IDLE_QUIET_S is 'soon'"),
        ({}, {"idle_seconds_per_day": -1}, "idle_seconds_per_day is -1"),
        ({"KVWEAVE_THINK": "maybe"}, {}, "KVWEAVE_THINK is 'maybe'; it must be true or false"),
        ({}, {"think": 1}, "think is 1; it must be bool"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, environment, given, message):
    with pytest.raises(InvalidRequest, match=message):
        read_config(tmp_path, environment, **given)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "config.toml").write_text("top_k = 3\n", encoding="utf-8-sig")
    assert read_config(tmp_path, {}).retrieval.top_k == 3
