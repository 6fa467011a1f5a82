"""Requests made from the server's own OpenAPI schema, right and wrong ones: nothing may fail inside.

A longer run: KVWEAVE_FUZZ_EXAMPLES=1000 with this file alone.
"""

import os
from collections import Counter
from contextlib import suppress

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from kvweave.samples import DOCUMENTS
from support.running_server import server

EXAMPLES = int(os.environ.get("KVWEAVE_FUZZ_EXAMPLES", "4"))
PATIENCE_S = 60.0
"""How long a request may take: a right one may ask for 128 long answers. It is then given up, and must end soon."""
UNANSWERED = 0
KNOWN = {"name": "notes", "conversation": "main"}
"""Every other request is about what is there."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server whose answers are short where a request names no length: the model is not what is tested."""
    with server(tmp_path_factory.mktemp("fuzzed") / "home", max_new_tokens=4) as running:
        running.http.post("/v1/kb", json={"name": "notes"}).raise_for_status()
        files = [
            ("files", (name, (DOCUMENTS / name).read_bytes())) for name in ("passwords.md", "badges.txt")
        ]
        running.http.post("/v1/kb/notes/documents", files=files).raise_for_status()
        yield running


def test_the_schema_lists_the_errors_that_the_server_sends(served):
    schema = served.http.get("/openapi.json").json()
    body = {"$ref": "#/components/schemas/ErrorBody"}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            found = {
                status: reply["content"]["application/json"]["schema"]
                for status, reply in operation["responses"].items()
                if not status.startswith("2")
            }
            health = {"503": {"$ref": "#/components/schemas/Health"}} if path == "/health" else {}
            assert found == {"4XX": body, "5XX": body, **health}, (method, path)
    error = schema["components"]["schemas"]["ErrorFields"]
    assert set(error["required"]) == set(served.http.get("/v1/kb/nothing").json()["error"])


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.timeout(0 if "KVWEAVE_FUZZ_EXAMPLES" in os.environ else 300)
def test_no_request_fails_inside(served, mode):
    # Not above: processes that only collect this test need not import it.
    schemathesis = pytest.importorskip("schemathesis")
    checks = pytest.importorskip("schemathesis.specs.openapi.checks")
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    statuses = Counter()
    for operation in operations:
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        known = {} if operation.label == "DELETE /v1/kb/{name}" else KNOWN
        found = Counter(_statuses(cases, served, known, checks.status_code_conformance))
        print(mode, operation.label, dict(found), flush=True)
        statuses.update(found)
    if mode == "positive":
        assert any(200 <= status < 300 for status in statuses)
    else:
        assert any(400 <= status < 500 for status in statuses)


def _statuses(cases, served, known, conformance):
    found = []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def call(case):
        if len(found) % 2:
            case.path_parameters.update({name: known[name] for name in known if name in case.path_parameters})
        try:
            reply = case.call(timeout=PATIENCE_S)
        except requests.ReadTimeout:
            found.append(UNANSWERED)
            served.wait(lambda: not served.parts.busy, 60)
            return
        found.append(reply.status_code)
        assert reply.status_code != 500, reply.text
        case.validate_response(reply, checks=[conformance])
        if (
            reply.status_code >= 400
            and reply.content
            and "json" in reply.headers.get("content-type", [""])[0]
        ):
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}

    with suppress(Unsatisfiable):  # an operation without parameters has no wrong requests
        call()
    assert served.http.get("/v1/kb/notes").status_code == 200
    return found
