import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def command(tmp_path):
    """The real command in a process of its own, with an empty home."""
    environment = {
        **os.environ,
        "KVWEAVE_HOME": str(tmp_path / "home"),
        "KVWEAVE_CHUNK_TOKENS": "48",
        "HOME": str(tmp_path),
        "COLUMNS": "200",
    }

    def run(*words, code=0, timeout_s=120, input_text="", **more):
        done = subprocess.run(
            [sys.executable, "-m", "kvweave", *map(str, words)],
            capture_output=True,
            text=True,
            input=input_text,
            env=environment | more,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == code, done.stderr or done.stdout
        assert "Traceback" not in done.stderr
        return done

    run.environment = environment
    run.json = lambda *words: json.loads(run(*words, "--json").stdout)
    return run
