"""No key, question or text of a document is in a log, however much is logged."""

import logging

from kvweave.server.json_logs import JsonLines
from support.running_server import server

KEY, WRONG = "sk-canary-of-the-owner", "sk-canary-of-a-guest"
SECRETS = {
    "key": KEY,
    "wrong key": WRONG,
    "document": "The canary of the vault is violet.",
    "damaged document": "canary-in-a-damaged-file",
    "question": "Which canary is in the vault?",
    "message": "A canary sings in a chat.",
    "caller's document": "The canary of the caller is green.",
    "damaged request": "canary-in-a-damaged-request",
    "query": "canary-in-a-query",
}


def test_a_server_that_logs_all_logs_no_key_question_or_document(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with server(tmp_path / "home", key=KEY, api_key=KEY) as running:
        http = running.http
        http.post("/v1/kb", json={"name": "notes"}).raise_for_status()
        broken = b"%PDF-1.7 " + SECRETS["damaged document"].encode()
        files = [
            ("files", ("vault.md", f"# Vault\n\n{SECRETS['document']}\n".encode())),
            ("files", ("broken.pdf", broken)),
        ]
        assert http.post("/v1/kb/notes/documents", files=files).status_code < 300

        def ask(**body):
            return http.post("/v1/chat/completions", json={"max_tokens": 4, **body})

        question = [{"role": "user", "content": SECRETS["question"]}]
        assert ask(messages=question, kb="notes").status_code == 200
        assert ask(messages=[{"role": "user", "content": SECRETS["message"]}]).status_code == 200
        given = [{"id": "a", "text": SECRETS["caller's document"]}]
        assert ask(messages=question, documents=given).status_code == 200
        assert ask(messages=SECRETS["damaged request"]).status_code == 400
        assert ask(messages=question, kb=SECRETS["damaged request"]).status_code == 404
        http.get("/v1/kb/notes", params={"q": SECRETS["query"]})
        refused = http.get("/v1/kb", headers={"Authorization": f"Bearer {WRONG}"})
        assert refused.status_code == 401
    records = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    logged = "\n".join(JsonLines().format(each) for each in records)
    assert '"path": "/v1/chat/completions"' in logged
    assert [name for name, secret in SECRETS.items() if secret in logged] == []
