"""What HTTP adds to the time to a first token: the same requests to a server and to the engine in a process, in turn."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.engine.state import Progress, no_progress
from kvweave_lab.bench.measurement import MedianRange
from kvweave_lab.bench.serving.client import Reply, run_in_turn
from kvweave_lab.bench.serving.in_process import LOADED
from kvweave_lab.bench.serving.processes import ServerFailed, end_with_parent
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
    """Ask a server and a process with the same engine in turn; both have everything stored. Raises ServerFailed."""
    system = System(DEFAULT, common, Corpus(tokenizer_of(common.model), traffic), folder)
    requests = traffic.draw(rounds)
    warm = [system.call(request, new_tokens=1).body for request in traffic.covering()]
    with system.server, _InProcess(common.model, folder) as engine:
        system.start()
        for body in warm:
            engine.first_token_s(body)
        _answered(run_in_turn(system.server.url, [system.call(request, 1) for request in traffic.covering()]))
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

    def __init__(self, model: str | None, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "kvweave_lab.bench.serving.in_process",
            str(folder / "in-process-home"),
        ]
        self._log = (folder / "in-process.log").open("ab")
        self._process = subprocess.Popen(
            [*command, *([model] if model else [])],
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
