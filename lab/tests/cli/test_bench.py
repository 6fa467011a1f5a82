"""`kvweave bench store` and `bench reuse` through the command line."""

FEW = (
    "bench",
    "store",
    "--model",
    "reference",
    "--context-tokens",
    "64",
    "--chunk-tokens",
    "32",
    "--rounds",
    "1",
    "--catalog-entries",
    "50",
)


def test_store_prints_a_table_or_json(command, tmp_path):
    text = command(*FEW, "--full-rounds", "1", "--folder", tmp_path, "--quiet").stdout
    assert "64 tokens of reference" in text
    assert "cold throughput, of plain" in text
    assert "one look-up of 2 entries among 50:" in text
    assert not list(tmp_path.glob("kvweave-bench-*"))  # temporary folders are removed
    found = command.json(*FEW, "--full-rounds", "0", "--storage", "int8")
    assert [speed["storage"] for speed in found["storages"]] == ["int8"]
    assert found["full_s"] is None
    assert found["catalog"]["look_up_s"]["median"] > 0
    assert found["command"].startswith("kvweave bench store --model reference")


def test_reuse_counts_caches_in_a_table_or_json(command):
    few = ("bench", "reuse", "--queries", "20", "--known-chunks", "30", "--shared-chunks", "10", "--quiet")
    one = ("--chunks-per-query", "3", "--exponent", "1", "--shuffled", "1", "--repeated", "0")
    text = command(*few, *one).stdout
    assert "20 questions for 3 chunks each, exponent 1, 100% shuffled, 0% repeated" in text
    assert "60% of 30 known, 30% of 10 new and shared" in text
    found = command.json(*few, *one, "--exponent", "2", "--ratio", "0.5")
    assert [point["traffic"]["exponent"] for point in found["points"]] == [1.0, 2.0, 1.0]
    names = [cache["cache"] for cache in found["points"][0]["caches"]]
    assert names == ["prefix", "ordered prefix", "anywhere", "both"]
    anywhere = found["points"][0]["caches"][2]
    assert anywhere["answering_share"] == 0.5 * anywhere["stale"] / anywhere["retrieved"]
    assert found["points"][2]["cap"] == anywhere["stored"]


def test_impossible_measurements_are_refused(command):
    refused = command("bench", "reuse", "--chunks-per-query", "600", code=1)
    assert "600 chunks per query cannot be drawn from groups of 1000 and 500; give 1 to 500" in refused.stderr
    refused = command("bench", "store", "--storage", "int2", code=1)
    assert "there is no storage 'int2'; choose one of exact, int8, int4" in refused.stderr
    refused = command("bench", "store", "--shape", "nothing", code=1)
    assert "there is no shape 'nothing'" in refused.stderr
