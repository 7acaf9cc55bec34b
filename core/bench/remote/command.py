"""A benchmark of a server: asks for its model, warms it up, sends it the workload, and reports the figures."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hookline.core.bench.remote.settings import Address, ClientConfig
from hookline.core.bench.workload import Load, WorkloadConfig
from hookline.core.cli.output import say
from hookline.core.errors import ConfigError, HooklineError, RequestError

try:
    import httptools  # noqa: F401
except ImportError as error:
    raise ConfigError('url= needs httptools; pip install "hookline[serve]"') from error

from hookline.core.bench.recorder import Recording
from hookline.core.bench.remote.body import Bodies
from hookline.core.bench.remote.connection import ConnectionPool
from hookline.core.bench.remote.driver import drive
from hookline.core.bench.remote.recording import failures, lateness
from hookline.core.util.garbage import settled

LATE_S = 0.02
"""Seconds of lateness: a client that sends 1 % of requests later than this is too slow for the load."""
BUSY_PERCENT = 80
"""Percent of a core: a client that is busier may see tokens late."""
SMALLEST_FILES = 65536
"""File descriptors that the client asks the system for: each concurrent request has a connection."""
MakeLoad = Callable[[int, int], Load]
"""Makes the load for a vocabulary's size and a repetition's number."""


class Served(NamedTuple):
    """The best repetition, and the facts of the server and the client for the result line."""

    recording: Recording
    server: dict[str, Any]
    client: dict[str, Any]


class NoServer(HooklineError):
    """The address has no OpenAI-compatible server that answers."""


def serve_load(
    address: Address, config: ClientConfig, workload: WorkloadConfig, make_load: MakeLoad, repeats: int
) -> Served:
    """Send each repetition of the workload to the server; the fastest repetition counts.

    Token ids differ from run to run, so that no prefix of an earlier run is found in the server's cache.
    Raises: NoServer; RequestError if every request failed; a warning says so of some.
    """
    _allow_many_connections()
    needs_answers = workload.turns != (1, 1)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(address, config, workload, make_load, repeats, needs_answers))


async def _serve(
    address: Address,
    config: ClientConfig,
    workload: WorkloadConfig,
    make_load: MakeLoad,
    repeats: int,
    needs_answers: bool,
) -> Served:
    pool = ConnectionPool(address, config.api_key())
    try:
        card = await _model_card(pool, config)
        vocab_size = card.get("vocab_size") or workload.max_token_id + 1
        number = random.SystemRandom().randrange(10**6)
        runs = []
        await _warm_up(pool, config, card["id"], make_load(vocab_size, number))
        for repetition in range(1, repeats + 1):
            load = make_load(vocab_size, number + repetition)
            bodies = Bodies(config, card["id"], needs_answers=needs_answers)
            runs.append(await _timed(pool, bodies, load))
    finally:
        await pool.close()
    recording, busy_percent = min(runs, key=lambda run: run[0].seconds)
    client = {"late_s": lateness(recording), "busy_percent": busy_percent, "failures": _counts(recording)}
    return Served(recording, {"model": card["id"], "max_model_len": card.get("max_model_len")}, client)


async def _timed(pool: ConnectionPool, bodies: Bodies, load: Load) -> tuple[Recording, float]:
    with settled():  # garbage collections would delay the measurement of tokens
        busy_s, wall_s = time.process_time(), time.perf_counter()
        recording = await drive(pool, bodies, load)
        busy_s, wall_s = time.process_time() - busy_s, time.perf_counter() - wall_s
    percent = round(100 * busy_s / wall_s, 1)
    _warn(recording, percent, load)
    return recording, percent


def _counts(recording: Recording) -> dict[str, int]:
    return {kind: count for kind, (count, _) in failures(recording).items()}


def _warn(recording: Recording, busy_percent: float, load: Load) -> None:
    """Report failed requests, and reasons to doubt the figures.

    Raises: RequestError if every request failed.
    """
    failed, total = failures(recording), len(recording.requests)
    if sum(count for count, _ in failed.values()) == total:
        raise RequestError(f"every request of the workload failed: {next(iter(failed.values()))[1]}")
    for count, message in failed.values():
        say(f"{count} of {total} requests failed: {message}")
    late = lateness(recording)
    is_spread = len({one.arrival_s for one in load.requests if one.follows is None}) > 1
    # Requests that are all due at once are necessarily late.
    late_s = late["p99"] if late is not None and is_spread else 0.0
    if busy_percent > BUSY_PERCENT or late_s > LATE_S:
        say(
            f"the client was the bottleneck: busy for {busy_percent} % of the time, and p99 of its requests "
            f"{late_s:.3f} s late; take a faster or less busy machine, or a lower request_rate"
        )
    short = sum(
        record.error is None and record.output_tokens != request.params.max_tokens
        for record, request in zip(recording.requests, load.requests, strict=True)
    )
    if short:
        say(f"{short} of {total} answers do not have the length that was asked for: does the server know ignore_eos?")


async def _model_card(pool: ConnectionPool, config: ClientConfig) -> dict[str, Any]:
    """The card of the served model; a name that was given needs no card."""
    try:
        status, body = await _get(pool, "/v1/models")
        cards = json.loads(body)["data"] if status == 200 else []
        found = [card for card in cards if isinstance(card, Mapping) and isinstance(card.get("id"), str)]
    except (ValueError, KeyError, TypeError):
        status, found = 0, []
    if config.model is not None:
        return next((dict(card) for card in found if card["id"] == config.model), {"id": config.model})
    if status == 401:
        raise NoServer(f"the server wants an API key: put it into the environment's {config.api_key_env}")
    if not found:
        raise NoServer(f"the server's /v1/models names no model (HTTP {status}); name one: client.model=")
    return dict(found[0])


async def _warm_up(pool: ConnectionPool, config: ClientConfig, model: str, load: Load) -> None:
    """Send a single request, whose failure ends the benchmark: all others would fail for the same reason."""
    recording = await drive(pool, Bodies(config, model, needs_answers=False), Load(load.requests[:1]))
    if (error := recording.requests[0].error) is not None:
        raise RequestError(f"a first request to the server failed: {error}")


class _Whole:
    """A `connection.Reader` that waits for the whole answer: `done` gets its status and its body."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._body = 0, b""

    def on_status(self, status: int) -> None:
        """See Reader."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """See Reader."""
        self._body += data

    def on_end(self) -> None:
        """See Reader."""
        if not self.done.done():
            self.done.set_result((self._status, self._body))

    def on_failure(self, reason: str) -> None:
        """See Reader."""
        if not self.done.done():
            self.done.set_exception(NoServer(f"the server does not answer: {reason}"))


async def _get(pool: ConnectionPool, path: str, timeout_s: float = 30.0) -> tuple[int, bytes]:
    whole = _Whole()
    pool.send(pool.request("GET", path), whole)
    try:
        return await asyncio.wait_for(whole.done, timeout_s)
    except TimeoutError:
        raise NoServer(f"the server does not answer GET {path} within {timeout_s:g} s") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _allow_many_connections() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SMALLEST_FILES if hard == resource.RLIM_INFINITY else min(hard, SMALLEST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
