"""The examples, without vLLM: the chain against a server that records what it is asked, and the commands of the replicas."""

import importlib.util
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvweave.remote.fields import read_task
from kvweave.testing import tiny_tokenizer
from kvweave_vllm import session_key

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded():
    """The URL of a server that answers like vLLM, and the headers and bodies that it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            got.append((dict(self.headers), body))
            choice = {"index": 0, "text": " Osgood ", "finish_reason": "stop", "logprobs": None}
            reply = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", got
        server.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore")
def test_a_langchain_chain_asks_about_its_retrievers_documents(recorded, tmp_path, capsys):
    pytest.importorskip("langchain_core")
    chain, (url, got) = example("langchain_chain"), recorded
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    question = "Who repairs the kiln in the yard?"
    chain.main(["m", question, "--tokenizer", str(tmp_path), "--url", url])
    assert capsys.readouterr().out == "Osgood\n"
    *prepared, (headers, asked) = got
    assert len(prepared) == len(chain.DOCUMENTS)
    assert all(body["kv_transfer_params"]["kvweave"]["prepare"] for _, body in prepared)
    task = read_task(asked["kv_transfer_params"], asked["prompt"])
    chunks = [asked["prompt"][start:end] for start, end in task.spans]
    found = chain.WordRetriever(documents=chain.DOCUMENTS).invoke(question)
    assert found[0].id == "kiln"
    for ids, document in zip(chunks, found, strict=True):
        assert (
            tokenizer.decode(ids).strip()
            == tokenizer.decode(tokenizer(document.page_content)["input_ids"]).strip()
        )
    assert headers["x-session-id"] == session_key(chunks)
    assert headers["x-session-id"] in {sent["x-session-id"] for sent, _ in prepared}
    assert asked["model"] == "m"


def test_replicas_share_a_store_behind_a_router(capsys):
    example("replicas").main(["m", "--store", "/s", "--port", "9000", "--dry-run", "--dtype", "float32"])
    *replicas, router = map(shlex.split, capsys.readouterr().out.splitlines())
    ports = [command[command.index("--port") + 1] for command in replicas]
    assert ports == ["9001", "9002"]
    for command in replicas:
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"] == {"store": "/s"}
        assert command[-2:] == ["--dtype", "float32"]
    assert router[router.index("--policy") + 1] == "power_of_two"
    assert router[router.index("--worker-urls") + 1 :] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
