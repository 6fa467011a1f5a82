"""What HTTP adds to the time to a first token: the same requests to a server and to the engine in a process, in turn."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.bench.measurement import MedianRange
from kvweave_lab.bench.serving.client import Reply, run_in_turn
from kvweave_lab.bench.serving.in_process import LOADED
from kvweave_lab.bench.serving.processes import ServerFailed, end_with_parent, home_in
from kvweave_lab.bench.serving.systems import DEFAULT, System, SystemSettings, tokenizer_of
from kvweave_lab.bench.serving.traffic import Corpus, ServedTraffic


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds to the first token of the same requests.

    Attributes:
        prompt_tokens: of the longest request.
        rounds: requests of each kind.
        http_s, in_process_s: from sending the request until its first piece of text.
        added_s: the difference, request by request.
    """

    prompt_tokens: int
    rounds: int
    http_s: MedianRange
    in_process_s: MedianRange
    added_s: MedianRange


def bench_first_token(
    common: SystemSettings,
    traffic: ServedTraffic,
    rounds: int,
    folder: Path,
    progress: Progress = no_progress,
) -> FirstToken:
    """Ask a server and a process with the same engine in turn; both start with the same store. Raises ServerFailed."""
    folder = folder / "first-token"
    folder.mkdir()
    system = System(DEFAULT, common, Corpus(tokenizer_of(common.model), traffic), folder)
    requests = traffic.draw(rounds)
    with system.server:
        system.start()
        warm = [system.call(request, 1) for request in traffic.covering()]
        _answered(run_in_turn(system.server.url, warm))
        system.server.terminate()
    home = home_in(folder, "in-process")
    shutil.copytree(system.home, home)
    with system.server, _InProcess(common, home) as engine:
        system.start()
        _answered(run_in_turn(system.server.url, warm[:1]))
        engine.first_token_s(warm[0].body)
        http, own, longest = [], [], 0
        for number, request in enumerate(requests):
            call = system.call(request)
            reply = _answered(run_in_turn(system.server.url, [call]))[0]
            assert reply.ttft_s is not None
            http.append(reply.ttft_s)
            own.append(engine.first_token_s(call.body))
            longest = max(longest, reply.prompt_tokens)
            progress("first tokens", number + 1, rounds)
    added = [there - here for there, here in zip(http, own, strict=True)]
    return FirstToken(longest, rounds, MedianRange.of(http), MedianRange.of(own), MedianRange.of(added))


class _InProcess:
    """The engine in a process of its own, without HTTP. A context manager, which ends it."""

    def __init__(self, common: SystemSettings, home: Path) -> None:
        self._log = home.with_suffix(".log").open("ab")
        model = ["--model", common.model] if common.model else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvweave_lab.bench.serving.in_process", *model, *common.flags],
            env={**os.environ, "KVWEAVE_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=end_with_parent,
        )

    def __enter__(self) -> "_InProcess":
        if self._line() != LOADED:
            raise ServerFailed(f"the engine did not load in a process of its own; see {self._log.name}")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        with self._process:  # closes the pipes
            self._log.close()

    def first_token_s(self, body: Any) -> float:
        """Return the seconds until the first piece of a request's answer. Raises ServerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(body) + "\n")
        self._process.stdin.flush()
        try:
            return float(self._line())
        except ValueError:
            raise ServerFailed(
                f"the engine did not answer in a process of its own; see {self._log.name}"
            ) from None

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _answered(replies: Sequence[Reply]) -> Sequence[Reply]:
    for reply in replies:
        if reply.outcome != "answered":
            raise ServerFailed(f"the server did not answer: {reply.detail}")
    return replies
