"""`kvweave bench soak`: a server under mixed traffic for minutes, killed and started again, and what became of it.

1. For the given time, users send requests one after the other: chat, documents, questions, uploads, deletions. Some leave on
   the way. The server's memory is sampled.
2. Users stop; the server must be healthy and have no request left.
3. Some times: the server is killed (SIGKILL) under load. Everything stored is verified, the server starts again, and must
   have every document whose upload it had acknowledged, and none whose deletion it had.
4. The server is asked to end (SIGTERM) under load. Each request must be answered, or refused or cancelled with an error that says
   so. Everything is verified again.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.bench.serving.client import http_client
from kvweave_lab.bench.serving.processes import MemoryWatch, ProcessMemory, ServerProcess, kvweave_server
from kvweave_lab.bench.serving.soak_ledger import Discrepancies
from kvweave_lab.bench.serving.soak_users import SoakState, User
from kvweave_lab.bench.serving.stored import StoredDamage, verify_stored
from kvweave_lab.bench.serving.systems import served_model, tokenizer_of
from kvweave_lab.bench.serving.traffic import Corpus, ServedRequest, ServedTraffic

Numbers = npt.NDArray[np.float64]

_SAMPLE_EVERY_S = 0.5
_DRAIN_S = 120.0
"""How long the server may take until no request is left after all users stopped."""
_MOST_GROWTH = 0.05
"""Memory is flat if it grows by at most this share from the first quarter after the warm-up to the last."""
_POINTS = 10
"""Into so many parts of equal length the time after the warm-up is cut, to see how memory grows."""


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """How a server is soaked.

    Attributes:
        model: as `--model` takes it.
        seconds: of traffic before the first kill.
        warm_up_s: of them, until memory counts.
        users: at a time; each sends one request after the other.
        kills: how often the server is killed and started again.
        load_s: how long users load the server before it is killed or asked to end.
        document_tokens, new_tokens: sizes of what requests bring and get.
        flags: for `kvweave serve`.
        seed: of what users do.
    """

    model: str | None = None
    seconds: float = 600.0
    warm_up_s: float = 120.0
    users: int = 16
    kills: int = 3
    load_s: float = 10.0
    document_tokens: int = 256
    new_tokens: int = 16
    flags: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MemoryTrend:
    """One measure of the server's memory after the warm-up.

    Attributes:
        first_bytes, last_bytes: medians of the first and the last quarter.
        growth: of the last above the first, as a share of it.
        peak_bytes: largest.
        slope_bytes_per_minute: of a line fitted to all samples.
        flat: whether the growth is at most 5 %.
        points: medians of ten parts of equal length, (seconds at its end, bytes).
    """

    first_bytes: float
    last_bytes: float
    growth: float
    peak_bytes: int
    slope_bytes_per_minute: float
    flat: bool
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class SoakMemory:
    """The server's memory: all that is resident, and of it what no file backs.

    The rest are mapped files, of code, weights and stored KV. The system takes their pages back when it needs them, so the
    second one tells whether the server loses memory.
    """

    resident: MemoryTrend
    anonymous: MemoryTrend


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds until answers were complete: median, 95th percentile and longest."""

    median_s: float
    p95_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class SoakBench:
    """What became of the server and its requests.

    Attributes:
        settings: what was done.
        outcomes: counts by action and outcome: answered, refused, stopped (refused or cancelled with an error while the server
            ended), left (by the user), interrupted (by a kill), failed.
        waits: of answered requests, by action.
        failures: the first requests that were lost, and when.
        refused_without_time: refusals that do not say when to try again.
        memory: None if there was no time to sample.
        healthy: whether the server was healthy and without requests after the traffic.
        left_over: requests that it still counted then.
        restarts: for each kill: what was damaged, lost or came back.
        exit_code: after SIGTERM under load.
        damage: what was damaged after it.
    """

    settings: SoakSettings
    outcomes: dict[str, dict[str, int]]
    waits: dict[str, Waits]
    failures: list[str]
    refused_without_time: int
    memory: SoakMemory | None
    healthy: bool
    left_over: float
    restarts: list["Restart"]
    exit_code: int
    damage: StoredDamage

    @property
    def problems(self) -> list[str]:
        """What a server should not do; nothing if it held."""
        found = [f"lost: {failure}" for failure in self.failures]
        if not self.healthy:
            found.append("the server was not healthy after the traffic")
        if self.left_over:
            found.append(f"{self.left_over:g} requests were still counted after all users had stopped")
        if self.refused_without_time:
            found.append(f"{self.refused_without_time} refusals did not say when to try again")
        if self.memory is not None and not self.memory.anonymous.flat:
            found.append(
                f"memory that no file backs grew by {self.memory.anonymous.growth:.1%} after the warm-up"
            )
        for number, restart in enumerate(self.restarts, 1):
            found += [f"kill {number}: {text}" for text in restart.problems]
        found += [f"after SIGTERM: {text}" for text in self.damage.problems]
        if self.exit_code:
            found.append(f"SIGTERM ended the server with exit code {self.exit_code}")
        return found


@dataclass(frozen=True, slots=True)
class Restart:
    """What was found after a kill: damage in files, then documents that the server lists wrongly."""

    damage: StoredDamage
    documents: Discrepancies

    @property
    def problems(self) -> list[str]:
        """What should not be."""
        return [
            *self.damage.problems,
            *(f"document {name} was acknowledged and is lost" for name in self.documents.lost),
            *(f"document {name} was deleted and is back" for name in self.documents.back),
        ]


def bench_soak(settings: SoakSettings, folder: Path, progress: Progress = no_progress) -> SoakBench:
    """Soak a server whose home is in `folder`. Raises ServerFailed if it does not start, or dies by itself."""
    home = folder / "home"
    server = kvweave_server("soak", folder, model=settings.model, flags=settings.flags, home=home)
    with server:
        server.start()
        traffic = ServedTraffic(documents=24, per_request=3, document_tokens=settings.document_tokens)
        corpus = Corpus(tokenizer_of(settings.model), traffic)
        texts = corpus.texts(ServedRequest(0, tuple(range(traffic.documents)), ""))
        state = SoakState(server.url, served_model(server.url), texts, settings.new_tokens)
        return asyncio.run(_Soak(settings, server, home, state, progress).run())


class _Soak:
    """One soak, in an event loop."""

    def __init__(
        self, settings: SoakSettings, server: ServerProcess, home: Path, state: SoakState, progress: Progress
    ) -> None:
        self._settings, self._server, self._home = settings, server, home
        self._state, self._progress = state, progress
        self._moments = random.Random(settings.seed)

    async def run(self) -> SoakBench:
        """Run all parts; see the module."""
        settings = self._settings
        async with http_client(self._server.url, keep_alive=False) as client:
            users = [User(number, self._state, client, settings.seed) for number in range(settings.users)]
            self._state.up.set()
            for user in users:
                await user.prepare()
            with MemoryWatch(self._server.pid, _SAMPLE_EVERY_S) as memory:
                await self._traffic(users, settings.seconds, "seconds of traffic")
            healthy, left_over = await self._health(client)
            restarts = [await self._kill(users, client, number) for number in range(settings.kills)]
            exit_code = await self._terminate(users)
        damage = await asyncio.to_thread(verify_stored, self._home)
        return SoakBench(
            settings,
            _by_action(self._state),
            {action: _waits(seconds) for action, seconds in sorted(self._state.waits_s.items())},
            self._state.failures,
            self._state.refused_without_time,
            soak_memory(memory.samples, settings.warm_up_s),
            healthy,
            left_over,
            restarts,
            exit_code,
            damage,
        )

    async def _traffic(self, users: Sequence[User], seconds: float, stage: str) -> None:
        """Let users send requests for a while, then let each finish its last one."""
        self._state.stop.clear()
        tasks = [asyncio.create_task(user.run()) for user in users]
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (spent := loop.time() - began) < seconds:
            self._progress(stage, int(spent), int(seconds))
            await asyncio.sleep(min(1.0, seconds - spent))
        self._state.stop.set()
        await asyncio.gather(*tasks)

    async def _health(self, client: Any) -> tuple[bool, float]:
        """Return whether the server is healthy, and how many requests it still counts after all have ended."""
        left_over, until = 0.0, asyncio.get_running_loop().time() + _DRAIN_S
        while asyncio.get_running_loop().time() < until:
            left_over = counted_requests((await client.get("/metrics")).text)
            if not left_over:
                break
            await asyncio.sleep(0.2)
        return (await client.get("/health")).status_code == 200, left_over

    async def _kill(self, users: Sequence[User], client: Any, number: int) -> Restart:
        """Kill the server under load, verify what it stored, start it again and compare its documents."""
        state = self._state
        state.stop.clear()
        tasks = [asyncio.create_task(user.run()) for user in users]
        await asyncio.sleep(self._moments.uniform(0.3, 1) * self._settings.load_s)
        state.up.clear()
        state.mode = "down"
        self._server.kill()
        state.stop.set()
        state.up.set()  # for users that wait; they see `stop` after one more request, which finds no server
        await asyncio.gather(*tasks)
        damage = await asyncio.to_thread(verify_stored, self._home)
        await asyncio.to_thread(self._server.start)
        state.mode = "up"
        self._progress("kills", number + 1, self._settings.kills)
        listed = {}
        for base in state.ledger.bases:
            response = await client.get(f"/v1/kb/{base}")
            documents = response.json()["documents"] if response.status_code == 200 else []
            listed[base] = [one["source"] for one in documents]
        return Restart(damage, state.ledger.compare(listed))

    async def _terminate(self, users: Sequence[User]) -> int:
        """Ask the server to end under load; return its exit code."""
        state = self._state
        state.stop.clear()
        tasks = [asyncio.create_task(user.run()) for user in users]
        await asyncio.sleep(self._settings.load_s)
        state.mode = "stopping"
        ended = asyncio.create_task(asyncio.to_thread(self._server.terminate))
        await asyncio.sleep(0.5)  # users go on for a moment: what comes now must be refused
        state.stop.set()
        await asyncio.gather(*tasks)
        return await ended


def soak_memory(samples: Sequence[tuple[float, ProcessMemory]], warm_up_s: float) -> SoakMemory | None:
    """Return how memory developed after the warm-up; None for fewer than eight samples. Samples are (seconds, memory)."""
    counted = [(at - samples[0][0], one) for at, one in samples if at - samples[0][0] >= warm_up_s]
    if len(counted) < 8:
        return None
    times = np.array([at for at, _ in counted])
    resident, anonymous = (
        _trend(times, np.array([getattr(one, name) for _, one in counted], dtype=float))
        for name in ("resident", "anonymous")
    )
    return SoakMemory(resident, anonymous)


def _trend(times: Numbers, sizes: Numbers) -> MemoryTrend:
    """Return the trend of sizes (n,) in bytes at times (n,) in seconds."""
    quarter = len(sizes) // 4
    first, last = float(np.median(sizes[:quarter])), float(np.median(sizes[-quarter:]))
    slope = float(np.polyfit(times - times[0], sizes, 1)[0]) * 60
    growth = last / max(1.0, first) - 1
    parts = zip(np.array_split(times, _POINTS), np.array_split(sizes, _POINTS), strict=True)
    points = tuple((round(float(at[-1]), 1), float(np.median(part))) for at, part in parts if len(part))
    return MemoryTrend(first, last, growth, int(sizes.max()), slope, growth <= _MOST_GROWTH, points)


def _waits(seconds: Sequence[float]) -> Waits:
    median, p95, longest = np.percentile(seconds, (50, 95, 100))
    return Waits(float(median), float(p95), float(longest))


def counted_requests(metrics: str) -> float:
    """Return how many requests a server's metrics count as running or waiting."""
    found = 0.0
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in ("kvweave:num_requests_running", "kvweave:num_requests_waiting"):
            found += float(value)
    return found


def _by_action(state: SoakState) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (action, outcome), count in sorted(state.counts.items()):
        found.setdefault(action, {})[outcome] = count
    return found
