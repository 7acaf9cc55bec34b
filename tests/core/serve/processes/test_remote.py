"""A front end's client and the engine's process, talking over real sockets in one process, around a fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from hookline.core.contracts import ApiError
from hookline.core.errors import (
    EngineError,
    PluginFault,
    PromptTooLongError,
    QueueFullError,
    RankError,
    RequestError,
    StepFault,
)
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.frontend.step_guard import StepGuard
from hookline.core.outputs import Delta, FinishReason, RequestOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.engine_client import ServedModel
from hookline.core.serve.processes.engine_link import EngineLink
from hookline.core.serve.processes.engine_server import EngineServer
from hookline.core.serve.processes.messages import (
    Broken,
    Cancel,
    Gone,
    Message,
    Refused,
    StepNews,
    Submit,
    decode_from_engine,
    encode,
    end_of,
    error_of,
    output_of,
    packed,
    refusal_of,
    unpacked,
)
from hookline.core.serve.processes.remote_client import TOKENIZER_THREADS, RemoteClient
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import tiny_model
from hookline.core.testing.fakes import completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler

MODEL = tiny_model(max_model_len=128)
Talk = Callable[[RemoteClient], Awaitable[Any]]


class Running:
    """An EngineServer in a thread, and clients of it."""

    def __init__(self, folder: Any, settings: ServeConfig, **options: Any) -> None:
        self.engine = fake_engine(PlainScheduler(), max_num_seqs=16, max_num_batched_tokens=64, **options)
        self.address, self.settings = f"ipc://{folder}/engine", settings
        llm: Any = SimpleNamespace(
            engine=self.engine, observers={"one": SimpleNamespace(text=lambda: "some metrics\n")}
        )
        llm.device_works = lambda: True
        llm.output_processor = OutputProcessor(self.engine, MODEL.codec)
        self.is_over = False
        self.server = EngineServer(llm, self.address, settings.max_requests, lambda: self.is_over)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def talk(self, what: Talk, model: ServedModel = MODEL) -> Any:
        """Run a coroutine function with a client."""

        async def run() -> Any:
            link = EngineLink(self.address, f"front-{time.monotonic_ns()}", lambda messages: client.receive(messages))
            client = RemoteClient(model, link.send, self.settings)
            try:
                return await asyncio.wait_for(what(client), 60)
            finally:
                await client.aclose()
                link.close()

        return asyncio.run(run())

    def close(self) -> None:
        self.server._is_stopping = self.is_over = True  # it looks once a second, or with the next message
        self.talk(noop)
        self.thread.join(30)
        assert not self.thread.is_alive()


async def noop(client: RemoteClient) -> None:
    pass


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = Running(tmp_path_factory.mktemp("s"), ServeConfig(max_requests=8), max_queued_requests=4)
    yield found
    found.close()


async def deltas(client: RemoteClient, prompt: Any, params: SamplingParams, **options: Any) -> list[Delta]:
    return [delta async for delta in client.stream(prompt, params, **options)]


async def idle(running: Running) -> None:
    while running.engine.has_work:
        await asyncio.sleep(0.005)


def test_a_stream_brings_every_token_once_and_its_text(running: Running) -> None:
    params = SamplingParams(max_tokens=20, seed=5)
    found = running.talk(lambda client: deltas(client, [3, 1, 4], params))
    ids = [one for delta in found for one in delta.token_ids]
    output = found[-1].output
    assert ids == output.token_ids == completion(5, [3, 1, 4], 20, 50)
    assert "".join(delta.text for delta in found) == output.text == MODEL.codec.decode(ids)
    assert (output.finish_reason, output.prompt_token_ids) == (FinishReason.LENGTH, [3, 1, 4])
    assert output.timings.time_to_first_token_s is not None


def test_the_completions_of_a_prompt_keep_their_indices(running: Running) -> None:
    params = SamplingParams(max_tokens=5, seed=5, n=3)
    found = running.talk(lambda client: deltas(client, [3, 1, 4], params))
    outputs = {delta.index: delta.output for delta in found if delta.output is not None}
    expected = [completion(one.seed, [3, 1, 4], 5, 50) for one in params.each()]
    assert [outputs[index].token_ids for index in range(3)] == expected


def test_a_stop_string_ends_a_completion_at_once_and_the_engine_s_request_soon(running: Running) -> None:
    text = MODEL.codec.decode(completion(5, [3, 1, 4], 30, 50))
    stop = text[10:12]
    params = SamplingParams(max_tokens=100, seed=5, stop=(stop,))

    async def talk(client: RemoteClient) -> list[Delta]:
        found = await deltas(client, [3, 1, 4], params)
        await idle(running)
        return found

    output = running.talk(talk)[-1].output
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert output.text == text[: text.index(stop)]
    assert len(output.token_ids) < 100 and running.engine.num_free_blocks == running.engine.num_blocks


def test_who_reads_late_gets_one_delta_of_all(running: Running) -> None:
    async def talk(client: RemoteClient) -> list[Delta]:
        stream = client.stream([3, 1, 4], SamplingParams(max_tokens=20, seed=5))
        while client.num_open:
            await asyncio.sleep(0.005)
        return [delta async for delta in stream]

    (only,) = running.talk(talk)
    assert only.token_ids == completion(5, [3, 1, 4], 20, 50) and only.output is not None


def test_a_stream_that_is_left_frees_its_blocks(running: Running) -> None:
    async def talk(client: RemoteClient) -> None:
        stream = client.stream([3, 1, 4], SamplingParams(max_tokens=100, seed=5))
        await anext(stream)
        await stream.aclose()
        await idle(running)

    running.talk(talk)
    assert running.engine.num_free_blocks == running.engine.num_blocks


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error"),
    [
        ([3, 99], {}, {}, RequestError),
        ([], {}, {}, RequestError),
        ([1] * 200, {}, {}, PromptTooLongError),
        ("word " * 3000, {}, {}, PromptTooLongError),
        ([3, 2**70], {}, {}, RequestError),
        (["x"], {}, {}, RequestError),
        ([3], {"n": 9}, {}, QueueFullError),
        ([3], {"n": 7}, {}, RequestError),  # 4 may wait
        ([3], {}, {"timeout_s": -1}, RequestError),
        ([3], {}, {"tags": {"A": "b"}}, RequestError),
        ([3], {"extra_args": {"none": {"a": 1}}}, {}, RequestError),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(
    running: Running, prompt: Any, params: dict[str, Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        running.talk(lambda client: deltas(client, prompt, SamplingParams(**params), **options))
    assert caught.type is error and not running.engine.has_work


def test_a_plugin_that_fails_on_arrival_is_known_as_that_in_the_front_end(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> int:
        raise PluginFault("processor 'x' fails")

    monkeypatch.setattr(running.engine, "add", fail)
    with pytest.raises(PluginFault, match="processor 'x' fails"):
        running.talk(lambda client: deltas(client, [3], SamplingParams()))


def test_whether_a_fault_ended_a_completion_reaches_the_front_end() -> None:
    for is_fault in (False, True):
        output = RequestOutput(3, None, [1], [2], FinishReason.ERROR, error="so", is_fault=is_fault)
        assert output_of(end_of(3, output), None, [1], [2], 0) == output


def test_the_engine_s_observers_hear_of_prompts_that_a_front_end_refuses(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(running.engine, "refuse", lambda ids, error: heard.append((list(ids), error.reason)))
    monkeypatch.setattr("hookline.core.serve.processes.remote_client.TELL_S", 0.0)

    async def talk(client: RemoteClient) -> None:
        for _ in range(3):
            with pytest.raises(QueueFullError, match=r"serve\.max_requests=8"):
                client.stream([3, 1, 4], SamplingParams(n=9))
        while len(heard) < 3:
            await asyncio.sleep(0.005)

    running.talk(talk)
    assert heard == [([], "queue_full")] * 3


def test_tags_and_priority_reach_the_engine_and_come_back(running: Running) -> None:
    options = {"priority": 3, "tags": {"tenant": "a"}}
    found = running.talk(lambda client: deltas(client, [3], SamplingParams(max_tokens=2), **options))
    assert (found[-1].output.priority, found[-1].output.tags) == (3, {"tenant": "a"})


def test_a_time_limit_ends_a_completion_with_its_reason(running: Running) -> None:
    running.engine.sleep, before = (lambda seconds: None), running.engine.sleep
    found = running.talk(lambda client: deltas(client, [3], SamplingParams(max_tokens=100), timeout_s=1e-6))
    running.engine.sleep = before
    assert found[-1].output.finish_reason is FinishReason.ABORT and "timeout_s" in found[-1].output.error


def test_load_and_metrics_are_the_engine_s(running: Running) -> None:
    async def talk(client: RemoteClient) -> tuple[Any, str]:
        metrics = await client.metrics()
        while not client.load().num_blocks:
            await asyncio.sleep(0.005)
        return client.load(), metrics

    load, metrics = running.talk(talk)
    assert (load.num_running, load.num_blocks, metrics) == (0, running.engine.num_blocks, "some metrics\n")


def test_a_client_that_closes_ends_its_streams_with_a_word(running: Running) -> None:
    async def talk(client: RemoteClient) -> None:
        stream = client.stream([3, 1, 4], SamplingParams(max_tokens=100))
        await client.aclose()
        with pytest.raises(ApiError, match="stopping"):
            [delta async for delta in stream]
        with pytest.raises(EngineError, match="stopping"):
            client.stream([3], SamplingParams())

    running.talk(talk)


@pytest.mark.parametrize("how", ["the server stops", "another engine takes the place of one that died"])
def test_a_long_prompt_whose_stream_was_failed_meanwhile_never_reaches_an_engine(how: str) -> None:
    sent, complaints, may_go = list[Any](), list[Any](), threading.Event()
    codec: Any = SimpleNamespace(encode=lambda ids: may_go.wait(60) and list(ids), detokenizer=lambda *_, **__: None)

    async def talk() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        client = RemoteClient(replace(MODEL, codec=codec), sent.append, ServeConfig())
        streams = [client.stream([3] * 5000, SamplingParams()) for _ in range(TOKENIZER_THREADS + 1)]
        if how == "the server stops":
            await client.aclose()
        else:
            client.break_off("it was killed")
            client.revive()
        may_go.set()
        await asyncio.to_thread(client._tokenizing.shutdown)
        for stream in streams:
            with pytest.raises((ApiError, EngineError)):
                await anext(stream)

    asyncio.run(talk())
    assert not complaints and not [one for one in sent if isinstance(one, Submit)]


def test_a_step_that_raises_ends_its_requests_and_a_lost_rank_the_engine(tmp_path: Any) -> None:
    broken = Running(tmp_path, ServeConfig())
    launch = broken.engine.executor.launch
    errors = [RankError("rank 1 was lost"), RuntimeError("out of luck")]

    def fail(step: Any) -> Any:
        raise errors.pop()

    async def talk(client: RemoteClient) -> None:
        broken.engine.executor.launch = fail
        with pytest.raises(EngineError, match="out of luck"):
            await deltas(client, [3], SamplingParams(max_tokens=5))
        broken.engine.executor.launch = launch
        assert len(await deltas(client, [3], SamplingParams(max_tokens=5, seed=1))) >= 1
        assert client.death is None and client.is_ready
        broken.engine.executor.launch = fail
        with pytest.raises(EngineError, match="rank 1 was lost"):
            await deltas(client, [3], SamplingParams(max_tokens=5))
        assert client.death is not None and not client.is_ready
        with pytest.raises(EngineError, match="rank 1 was lost"):
            client.stream([3], SamplingParams())

    broken.talk(talk)
    broken.thread.join(30)
    assert broken.server.death == "rank 1 was lost"


class Mailbox:
    """In the place of an EngineServer's socket: what lies in it, and what is sent."""

    def __init__(self) -> None:
        self.unread: deque[tuple[bytes, bytes]] = deque()
        self.sent: list[Message] = []

    def put(self, name: bytes, *messages: Message) -> None:
        self.unread.extend((name, encode(one)) for one in messages)

    def recv_multipart(self, flags: int) -> tuple[bytes, bytes]:
        if not self.unread:
            raise zmq.Again
        return self.unread.popleft()

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int, copy: bool) -> None:
        self.sent.append(decode_from_engine(parts[1]))

    def poll(self, milliseconds: int) -> int:
        return len(self.unread)


MakeServer = Callable[[Any], tuple[EngineServer, Mailbox]]


@pytest.fixture
def make_server(tmp_path: Any) -> Iterator[MakeServer]:
    """Makes a server of an engine that does its turns when it is asked to, and its mailbox."""
    made = list[tuple[EngineServer, Any]]()

    def make(engine: Any) -> tuple[EngineServer, Mailbox]:
        processor = OutputProcessor(engine, MODEL.codec)
        llm: Any = SimpleNamespace(output_processor=processor, observers={}, device_works=lambda: True)
        server, mailbox = EngineServer(llm, f"ipc://{tmp_path}/engine", 64, lambda: False), Mailbox()
        made.append((server, server._socket))
        server._socket = mailbox  # type: ignore[assignment]
        return server, mailbox

    yield make
    for server, socket in made:
        server._socket = socket
        server._context.destroy(linger=0)


@pytest.fixture
def unstarted(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineServer, Mailbox, list[int]]:
    """A server that queues two prompts a step at most, its mailbox, and the first token of each prompt it queued."""
    monkeypatch.setattr("hookline.core.frontend.engine_driver.MAX_ADMITTED", 2)
    engine, queued = fake_engine(PlainScheduler(), max_num_seqs=16), list[int]()
    add = engine.add
    monkeypatch.setattr(
        engine, "add", lambda ids, *rest, **options: queued.append(ids[0]) or add(ids, *rest, **options)
    )
    return *make_server(engine), queued


def submits(handles: range) -> list[Submit]:
    """Prompts whose first token is their handle."""
    return [Submit(one, packed([one, 3]), {"max_tokens": 50, "seed": 1}, {}, 0.0) for one in handles]


@pytest.mark.parametrize("how", ["its client leaves", "its front end ends"])
def test_a_prompt_that_was_left_before_it_is_queued_is_never_computed(how: str, unstarted: Any) -> None:
    server, mailbox, queued = unstarted
    mailbox.put(b"left", *submits(range(1, 20)))
    server.turn()
    assert queued == [1, 2]
    mailbox.put(b"stays", *submits(range(30, 33)))
    if how == "its client leaves":
        mailbox.put(b"left", *(Cancel([one]) for one in range(1, 20)))
    else:
        mailbox.put(b"supervisor", Gone("left"))
    for _ in range(3):
        server.turn()
    assert queued == [1, 2, 30, 31, 32] and server._engine.num_running == 3


def broken_turn(server: EngineServer, mailbox: Mailbox, error: Exception) -> list[int]:
    """A turn whose step raises this; returns the handles of the completions that are told to have failed."""

    def fail(step: Any) -> Any:
        raise error

    text = str(error)
    mailbox.sent.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server._engine.executor, "launch", fail)
        server.turn()
    assert not any(isinstance(one, Broken) for one in mailbox.sent)
    refused = [one for one in mailbox.sent if isinstance(one, Refused)]
    assert all(text in str(error_of(one)) and type(error_of(one)) is EngineError for one in refused)
    return [one.handle for one in refused]


def test_prompts_that_are_not_queued_yet_outlive_an_error_that_ends_all_others(unstarted: Any) -> None:
    server, mailbox, queued = unstarted
    mailbox.put(b"front", *submits(range(1, 6)))
    assert broken_turn(server, mailbox, RuntimeError("out of luck")) == [1, 2]
    server.turn()
    assert queued == [1, 2, 3, 4] and server._engine.num_running == 2


def test_a_lost_step_ends_its_requests_and_no_others(unstarted: Any) -> None:
    server, mailbox, queued = unstarted
    mailbox.put(b"one", *submits(range(1, 3)))
    server.turn()
    mailbox.put(b"other", *submits(range(3, 6)))
    assert broken_turn(server, mailbox, StepFault("model 'm' fails in forward")) == [3, 4]
    mailbox.sent.clear()
    for _ in range(3):
        server.turn()
    assert queued == [1, 2, 3, 4, 5] and server._engine.num_running == 3
    assert {handle for one in mailbox.sent for handle in unpacked(one.handles).tolist()} == {1, 2, 5}


def test_a_completion_that_ended_before_a_lost_step_is_told_though_nobody_else_is_there(
    make_server: MakeServer,
) -> None:
    server, mailbox = make_server(fake_engine(PlainScheduler(), overlap=True))
    mailbox.put(b"one", Submit(1, packed([1, 3]), {"max_tokens": 1, "seed": 1}, {}, 0.0))
    server.turn()
    mailbox.put(b"other", *submits(range(2, 3)))
    assert broken_turn(server, mailbox, StepFault("model 'm' fails in forward")) == [2]
    server.turn()
    assert [end.handle for one in mailbox.sent if isinstance(one, StepNews) for end in one.ends] == [1]
    assert not server._open and not server._engine.has_work


class FailsInReports(PlainScheduler):
    """Fails once in a report of requests that ended between steps, and in each plan once it is told to."""

    has_failed = fails_in_plan = False

    def plan(self, view: Any) -> Any:
        if self.fails_in_plan:
            raise ValueError("a plan that fails")
        return super().plan(view)

    def committed(self, step: Any) -> None:
        if step.plan is None and not self.has_failed:
            self.has_failed = True
            raise ValueError("a report that fails")


@pytest.mark.parametrize("how", ["a client leaves", "a front end is lost", "a plan fails, too"])
def test_a_policy_that_fails_in_a_report_ends_its_requests_and_not_the_process(
    how: str, make_server: MakeServer
) -> None:
    policy = FailsInReports()
    server, mailbox = make_server(fake_engine(policy))
    mailbox.put(b"one", *submits(range(1, 4)))
    mailbox.put(b"gone", *submits(range(4, 5)))
    server.turn()
    if how == "a client leaves":
        mailbox.put(b"one", Cancel([1]))
    elif how == "a front end is lost":
        server._outboxes[b"gone"].flush = lambda: (_ for _ in ()).throw(LookupError)  # type: ignore[method-assign]
    policy.fails_in_plan = how == "a plan fails, too"
    server.turn()
    server.turn()
    told = {one.handle for one in mailbox.sent if isinstance(one, Refused)}
    assert policy.has_failed and not server._open and {2, 3} <= told
    policy.fails_in_plan = False
    mailbox.put(b"one", *submits(range(5, 6)))
    server.turn()
    assert server._engine.num_running == 1


class NeverReturns(PlainScheduler):
    """Loops for ever in each plan while it is told to."""

    is_stuck = True

    def plan(self, view: Any) -> Any:
        while self.is_stuck:
            pass
        return super().plan(view)


@pytest.mark.slow
def test_a_policy_that_never_returns_is_broken_off_and_the_server_goes_on(make_server: MakeServer) -> None:
    policy, limits = NeverReturns(), SimpleNamespace(stall_timeout_s=0.3, step_timeout_s=60.0)
    server, mailbox = make_server(fake_engine(policy))
    server.output_processor.guard = StepGuard(server._engine, limits, [])  # type: ignore[arg-type]
    mailbox.put(b"one", *submits(range(1, 3)))
    server.turn()
    refused = [one for one in mailbox.sent if isinstance(one, Refused)]
    assert [one.handle for one in refused] == [1, 2] and all("is stuck for 0.3 s" in one.message for one in refused)
    policy.is_stuck = False
    mailbox.put(b"one", *submits(range(3, 4)))
    server.turn()
    assert server._engine.num_running == 1
    server.output_processor.guard.stop()


def test_a_socket_that_fails_ends_the_engine_s_process(make_server: MakeServer) -> None:
    server, mailbox = make_server(fake_engine(PlainScheduler()))
    mailbox.put(b"one", *submits(range(1, 2)))
    server.turn()

    def fail(flags: int) -> Any:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    mailbox.recv_multipart = fail  # type: ignore[method-assign]
    with pytest.raises(zmq.ZMQError):
        server.turn()


def test_a_reader_hears_of_the_error_though_the_engine_reads_nothing() -> None:
    def send(message: Any) -> None:
        if isinstance(message, Cancel):
            raise EngineError("the engine's process takes no more requests")

    async def talk() -> None:
        client = RemoteClient(MODEL, send, ServeConfig())
        stream = client.stream([3], SamplingParams(n=2))
        client.receive([refusal_of(1, EngineError("a step failed"))])
        with pytest.raises(EngineError, match="a step failed"):
            await asyncio.wait_for(anext(stream), 30)

    asyncio.run(talk())


def test_a_prompt_of_which_one_completion_fails_ends_with_the_others(tmp_path: Any) -> None:
    """They are requests of one caller, who hears of the error and of nothing behind it."""
    sent = list[Any]()

    async def talk() -> None:
        client = RemoteClient(MODEL, sent.append, ServeConfig())
        stream = client.stream([3], SamplingParams(n=3))
        client.receive([refusal_of(2, EngineError("a step failed"))])
        with pytest.raises(EngineError, match="a step failed"):
            await anext(stream)
        assert client.num_open == 0

    asyncio.run(talk())
    assert sent[1:] == [Cancel([1, 3])]
