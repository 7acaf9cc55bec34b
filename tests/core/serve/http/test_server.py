"""The HTTP server on a real socket, around a fake engine client: limits that only a connection knows, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hookline.core.errors import ConfigError
from hookline.core.serve.http import protocol, server
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.app import Served, make_app
from hookline.core.serve.http.server import serve_http
from hookline.core.serve.http.sockets import listening_sockets
from hookline.core.serve.http.stopping import Stopping
from hookline.core.serve.http.tls import check_tls
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
from tests.core.serve.http.certificates import ENCRYPTED, ONE, TWO

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]
STREAM = {"prompt": "x", "stream": True, "ignore_eos": True}


def serve(
    client: FakeEngineClient, settings: ServeConfig, talk: Callable[..., Awaitable[Any]], keys: tuple[str, ...] = ()
) -> Any:
    """Serve while `talk` runs, which gets the port, the served application and what ends it with a drain."""

    async def run() -> Any:
        sockets = listening_sockets(settings, 1)
        stopping = Stopping()
        listens = asyncio.Event()
        served = make_app(client, settings, ApiKeys(keys))
        running = asyncio.ensure_future(serve_http(served, sockets, settings, stopping, listens.set))
        await listens.wait()
        try:
            return await asyncio.wait_for(talk(sockets[0].getsockname()[1], served, stopping), 60)
        finally:
            stopping.tell(0.0)
            await asyncio.wait_for(running, 60)

    return asyncio.run(run())


def request(body: dict[str, Any], **headers: str) -> bytes:
    data = json.dumps(body).encode()
    given = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{given}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


@pytest.mark.parametrize("head", ["GET / HTTP/1.1\r\nA: {}", "GET /{} HTTP/1.1\r\n\r\n"])
def test_a_head_that_is_too_large_is_refused(head: str) -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, head.format("x" * 3000).encode())

    answer = serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"serve.max_header_bytes=2000" in answer


def test_a_head_that_is_too_large_is_refused_in_the_form_of_the_api_that_was_asked() -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, b"POST /v1/messages?beta=true HTTP/1.1\r\nA: " + b"x" * 3000)

    answer = serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert b'"type":"error"' in answer


def test_a_large_body_is_no_large_head() -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, request({"prompt": "x " * 1500, "max_tokens": 1}, Connection="close"))

    assert serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk).startswith(b"HTTP/1.1 200 ")


CHUNKED = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
MIB = 2**20
FLOODS = {
    "many trailers": (b"\r\n0\r\n", b"a:\r\n"),
    "one long trailer": (b"\r\n0\r\na:", b"b"),
    "a trailer's long name": (b"\r\n0\r\n", b"b"),
    "many header lines": (b"", b"a:\r\n"),
    "one long header line": (b"a:", b"b"),
    "a chunk's long extension": (b"\r\n1;", b"b"),
    "extensions of many chunks": (b"\r\n", b"1;" + b"b" * 250 + b"\r\nx\r\n"),
    "empty lines": (b"\r\n0\r\n\r\n", b"\r\n"),
}


UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"", b"X-API-Key: secret\r\n"])
@pytest.mark.parametrize("flood", FLOODS)
def test_whatever_a_client_sends_beside_a_body_takes_no_memory(flood: str, key: bytes) -> None:
    begin, piece = FLOODS[flood]
    block = piece * (MIB // len(piece))
    paths = (b"GET /health", b"POST /v1/completions", b"POST /v1/messages", b"POST /nothing", b"GET /metrics")

    async def send(port: int, head: bytes) -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(head + key + begin)
            for _ in range(40):
                writer.write(block)
                await writer.drain()
        other = await exchange(port, b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        writer.close()
        return other

    async def talk(port: int, served: Served, stopping: Any) -> tuple[int, list[bytes], int]:
        await send(port, b"GET /v1/models" + CHUNKED)  # what is made once
        tracemalloc.start()
        heads = [path + CHUNKED + upgrade for path in paths for upgrade in (b"", UPGRADE)]
        others = [await send(port, head) for head in heads]
        return tracemalloc.get_traced_memory()[1], others, served.gate.num_open

    try:
        peak, others, num_open = serve(FakeEngineClient(), ServeConfig(port=0), talk, ("secret",))
    finally:
        tracemalloc.stop()
    assert peak < 5 * MIB and num_open == 0 and all(other.startswith(b"HTTP/1.1 200 ") for other in others)


@pytest.mark.parametrize("line", [b"a:\r\n", b"abc: %b\r\n" % (b"x" * 90)])
def test_trailers_count_as_the_head_does(line: bytes) -> None:
    body = b"\r\n2\r\n{}\r\n0\r\n"

    async def talk(port: int, served: Served, stopping: Any) -> list[bytes]:
        head = b"POST /v1/completions" + CHUNKED + b"Connection: close\r\n"
        few, many = (line * (size // len(line)) for size in (1000, 2500))
        return [await exchange(port, head + body + trailers + b"\r\n") for trailers in (few, many)]

    few, many = serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk)
    assert answers(few) == [b"400"] and b"prompt" in few
    assert answers(many) == [b"431"] and b"trailers" in many and b"serve.max_header_bytes=2000" in many


def test_chunks_may_be_small() -> None:
    data = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps({"prompt": "x " * 900, "max_tokens": 1}).encode())

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        head = b"POST /v1/completions" + CHUNKED + b"Connection: close\r\n\r\n"
        return await exchange(port, head + data + b"0\r\n\r\n")

    assert answers(serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk)) == [b"200"]


def test_small_chunks_do_not_save_up_for_a_large_trailer() -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        head = b"POST /v1/completions" + CHUNKED + b"Connection: close\r\n\r\n"
        return await in_pieces(port, head, b"1\r\nx\r\n" * 1000, b"0\r\na:" + b"b" * 2500)

    assert answers(serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk)) == [b"431"]


def test_an_answered_request_gets_no_second_answer_for_its_trailers() -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await in_pieces(port, b"GET /ping" + CHUNKED + b"\r\n", b"0\r\n" + b"a:\r\n" * 1000)

    assert answers(serve(FakeEngineClient(), ServeConfig(port=0, max_header_bytes=2000), talk)) == [b"200"]


@pytest.mark.parametrize("upgrade", [b"", UPGRADE])
@pytest.mark.parametrize("is_late", [False, True])
def test_trailers_are_no_headers(is_late: bool, upgrade: bytes) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    trailers = b"X-API-Key: secret\r\nX-Request-Id: mine\r\nHost: y\r\nExpect: 100-continue\r\nX-Priority: 9\r\n\r\n"
    key = b"Authorization: Bearer secret\r\n"

    async def talk(port: int, served: Served, stopping: Any) -> list[bytes]:
        pieces = b"Connection: close\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body), trailers
        if upgrade:
            pieces = pieces[0].replace(b"Connection: close\r\n", b""), pieces[1] + b"GET /ping HTTP/1.0\r\n\r\n"
        sent = pieces if is_late else (b"".join(pieces),)
        found = []
        for given in (b"", key):
            head = b"POST /v1/completions" + CHUNKED + upgrade + given
            found.append(await in_pieces(port, head + sent[0], *sent[1:]))
        return found

    client = FakeEngineClient()
    without, with_key = serve(client, ServeConfig(port=0), talk, ("secret",))
    assert answers(without)[0] == b"401" and answers(with_key)[0] == b"200"
    assert b"x-request-id: mine" not in with_key and b"100 Continue" not in with_key
    options = [{key: value for key, value in asked.options.items() if key != "trace"} for asked in client.asked]
    assert options == [{}]


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", request({"prompt": "x"})[:-3]])
def test_who_does_not_finish_a_request_is_not_waited_for(data: bytes) -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, data)

    assert serve(FakeEngineClient(), ServeConfig(port=0, receive_s=0.1), talk) in (b"", b"reset")


def test_a_tls_handshake_is_not_waited_for_longer_than_a_request(tmp_path: Path) -> None:
    path = tmp_path / "both.pem"
    path.write_text(ONE)
    settings = ServeConfig(port=0, receive_s=0.1, tls_certificate=str(path))

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, b"")

    assert serve(FakeEngineClient(), settings, talk) in (b"", b"reset")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_has_said_its_last_is_answered(is_stream: bool) -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = request({"prompt": "x", "max_tokens": 3})
        writer.write(first + request({**STREAM, "max_tokens": 20, "stream": is_stream}))
        writer.write_eof()
        found = await reader.read()
        writer.close()
        return found

    answer = serve(FakeEngineClient(pause_s=0.01), ServeConfig(port=0), talk)
    assert answers(answer) == [b"200", b"200"] and answer.count(b'"finish_reason":"length"') == 2


def test_a_client_that_has_said_half_a_request_is_not_waited_for() -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({"prompt": "x"})[:-3])
        writer.write_eof()
        found = await reader.read()
        writer.close()
        return found

    assert serve(FakeEngineClient(), ServeConfig(port=0), talk) == b""


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_client_that_leaves_while_its_answer_is_made_ends_it(version: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROBE_S", 0.01)
    client = FakeEngineClient(pause_s=0.005)

    async def talk(port: int, served: Served, stopping: Any) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({"prompt": "x", "max_tokens": 4000, "ignore_eos": True}).replace(b"HTTP/1.1", version, 1))
        while not client.asked:
            await asyncio.sleep(0.005)
        writer.close()
        while client.num_open:
            await asyncio.sleep(0.005)

    serve(client, ServeConfig(port=0), talk)
    assert client.asked[0].is_cancelled


def test_bodies_that_never_end_take_bounded_memory_and_the_largest_are_refused() -> None:
    settings = ServeConfig(port=0, max_body_bytes=MIB, max_unfinished_bytes=2 * MIB)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MIB

    async def send(port: int) -> bytes:
        return await exchange(port, head + b" " * (MIB - 1000))

    async def talk(port: int, served: Served, stopping: Any) -> tuple[set[bytes], bytes, int]:
        whole = request({"prompt": "x", "max_tokens": 1}, Connection="close")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole[:-5])
        large, refused = {asyncio.ensure_future(send(port)) for _ in range(12)}, set()
        while len(large) > 2:
            done, large = await asyncio.wait(large, return_when=asyncio.FIRST_COMPLETED)
            refused |= {one.result()[:12] for one in done}
        unfinished = served.gate._unfinished._sum
        writer.write(whole[-5:])
        answer = await reader.read()
        writer.close()
        for one in large:
            one.cancel()
        await asyncio.wait(large)
        return refused, answer, unfinished

    refused, answer, unfinished = serve(FakeEngineClient(), settings, talk)
    assert refused <= {b"HTTP/1.1 503", b"reset"} and answers(answer) == [b"200"] and 0 < unfinished <= 2 * MIB


def test_a_body_that_is_refused_for_its_size_beside_others_is_told_so() -> None:
    client, settings = FakeEngineClient(), ServeConfig(port=0, max_body_bytes=1000, max_unfinished_bytes=1000)

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        small = await asyncio.open_connection("127.0.0.1", port)
        small[1].write(request({"prompt": "x" * 500})[:-5])
        answer = await in_pieces(port, request({"prompt": "x" * 700})[:-5])
        small[1].close()
        return answer

    answer = serve(client, settings, talk)
    assert answers(answer) == [b"503"] and b"serve.max_unfinished_bytes=1000" in answer and b"retry-after" in answer


LOCAL = (
    b"localhost",
    b"LOCALHOST:80",
    b"x",
    b"127.0.0.1:1",
    b"[::1]:80",
    b"api.localhost",
    b"box.example",
    b"10.0.0.1",
)


@pytest.mark.parametrize("path", [b"GET /v1/models", b"GET /", b"POST /v1/completions", b"GET /metrics"])
def test_a_page_whose_own_name_leads_to_loopback_cannot_use_a_server_without_keys(path: bytes) -> None:
    async def talk(port: int, served: Served, stopping: Any) -> dict[bytes, bytes]:
        hosts = (*LOCAL, b"evil.example:80", b"127.0.0.1.evil.example", b"localhost.evil.example.", b"evil.box.example")
        data = b"%b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        return {host: await exchange(port, data % (path, host)) for host in hosts}

    settings = ServeConfig(port=0, hosts=("Box.example",))
    found = serve(FakeEngineClient(), settings, talk)
    refused = {host for host, answer in found.items() if answers(answer) == [b"403"]}
    assert refused == found.keys() - set(LOCAL) and b"serve.hosts" in found[b"evil.example:80"]
    assert not any(answers(one) == [b"403"] for one in serve(FakeEngineClient(), settings, talk, ("key",)).values())
    settings = ServeConfig(port=0, hosts=("*",))
    assert not any(answers(one) == [b"403"] for one in serve(FakeEngineClient(), settings, talk).values())


def test_who_reads_nothing_loses_its_request() -> None:
    client = FakeEngineClient(" a rather long word" * 20)
    client.facts = client.facts.__class__(**{**vars(client.facts), "max_model_len": 200_000})

    async def talk(port: int, served: Served, stopping: Any) -> None:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(one, request({**STREAM, "max_tokens": 190_000}))
        while not client.asked or client.num_open:
            await asyncio.sleep(0.01)
        one.close()

    serve(client, ServeConfig(port=0, unread_s=0.1), talk)
    assert client.asked[0].is_cancelled


def test_a_drain_answers_what_runs_and_refuses_what_comes() -> None:
    client = FakeEngineClient(pause_s=0.005)

    async def talk(port: int, served: Served, stopping: Stopping) -> tuple[bytes, bytes]:
        running = asyncio.ensure_future(exchange(port, request({**STREAM, "max_tokens": 60}, Connection="close")))
        while not client.asked:
            await asyncio.sleep(0.005)
        stopping.tell(10.0)
        await asyncio.sleep(0)
        while not served.life.is_draining:
            await asyncio.sleep(0.005)
        refused = await exchange(port, request(STREAM))
        return await running, refused

    answer, refused = serve(client, ServeConfig(port=0), talk)
    assert b"data: [DONE]" in answer and b'"finish_reason":"length"' in answer
    assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after" in refused.lower()


UPGRADES = ("h2c", "websocket", "TLS/1.0")


def answers(data: bytes) -> list[bytes]:
    """The status of each answer that came over one connection."""
    return [part.split(b" ")[0] for part in data.split(b"HTTP/1.1 ")[1:]]


async def in_pieces(port: int, *pieces: bytes, pause_s: float = 0.05) -> bytes:
    """Send bytes with pauses between them, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("cut", [0, 5, None])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_that_would_have_another_protocol_is_answered_in_this_one(
    upgrade: str, cut: int | None, is_chunked: bool
) -> None:
    """As Java's client and curl --http2 send them; the body comes with the head, apart from it, or in two parts."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": upgrade, "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    first = request({"prompt": "x", "max_tokens": 1}, **headers)
    head, _, body = first.partition(b"\r\n\r\n")
    if is_chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    whole = head + b"\r\n\r\n" + body
    place = len(whole) if cut is None else len(head) + 4 + cut
    second = request({"prompt": "y", "max_tokens": 1}, Connection="close")

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await in_pieces(port, whole[:place], whole[place:] + second)

    client = FakeEngineClient()
    assert answers(serve(client, ServeConfig(port=0), talk)) == [b"200", b"200"]
    assert [client.facts.codec.decode(asked.prompt_token_ids) for asked in client.asked] == ["x", "y"]


@pytest.mark.parametrize("method", [b"POST", b"CONNECT"])
def test_a_body_is_no_request_whatever_protocol_the_head_asks_for(method: bytes) -> None:
    inner = b"GET /version?smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    head = b"%s /v1/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (method, upgrade, len(inner))

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await in_pieces(port, head, inner, b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    answer = serve(FakeEngineClient(), ServeConfig(port=0), talk)
    assert len(answers(answer)) == 2 and answers(answer)[1] == b"200" and b'"version"' not in answer


def test_an_empty_line_behind_a_body_does_not_end_its_answer() -> None:
    client = FakeEngineClient(pause_s=0.01)

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        data = request({**STREAM, "max_tokens": 60}, Connection="close")
        return await in_pieces(port, data, b"\r\n", pause_s=0.1)

    assert b"data: [DONE]" in serve(client, ServeConfig(port=0, receive_s=0.2), talk)


@pytest.mark.parametrize("is_stream", [False, True])
def test_http_1_0_gets_no_chunks(is_stream: bool) -> None:
    data = request({**STREAM, "max_tokens": 3, "stream": is_stream}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, data)

    head, _, body = serve(FakeEngineClient(), ServeConfig(port=0), talk).partition(b"\r\n\r\n")
    assert b" 200 " in head and b"transfer-encoding" not in head.lower()
    assert body.endswith(b"data: [DONE]\n\n") if is_stream else json.loads(body)["choices"]


@pytest.mark.parametrize("hosts", [b"", b"Host: x\r\nHost: y\r\n"])
def test_a_request_needs_one_host(hosts: bytes) -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, b"GET /version HTTP/1.1\r\n%b\r\n" % hosts)

    head, _, body = serve(FakeEngineClient(), ServeConfig(port=0), talk).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request") and b"x-request-id" in head
    assert "Host" in json.loads(body)["error"]["message"]


def test_what_is_no_http_is_told_so_in_the_form_of_errors() -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await exchange(port, b"garbage\r\n\r\n")

    head, _, body = serve(FakeEngineClient(), ServeConfig(port=0), talk).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"x-request-id" in head
    assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."


@pytest.mark.parametrize("upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_a_body_that_is_no_http_is_told_so(upgrade: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n" % upgrade

    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await in_pieces(port, head, b"ZZ\r\n")

    client = FakeEngineClient()
    assert answers(serve(client, ServeConfig(port=0), talk)) == [b"400"] and not client.asked


@pytest.mark.parametrize(
    "second",
    [
        b"GET /version HTTP/1.1\r\n\r\n",
        b"garbage\r\n\r\n",
        b"\x00\r\n\r\n",
        b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 3000),
    ],
)
def test_what_cannot_be_served_does_not_end_the_answer_before_it(second: bytes) -> None:
    async def talk(port: int, served: Served, stopping: Any) -> bytes:
        return await in_pieces(port, request({**STREAM, "max_tokens": 40}), second)

    settings = ServeConfig(port=0, max_header_bytes=2000, receive_s=0.2)
    answer = serve(FakeEngineClient(pause_s=0.01), settings, talk)
    assert answers(answer) == [b"200"] and b"data: [DONE]" in answer


def test_a_drain_does_not_wait_for_a_request_that_has_not_come_whole() -> None:
    async def talk(port: int, served: Served, stopping: Stopping) -> bytes:
        asked = asyncio.ensure_future(exchange(port, request({"prompt": "x"})[:-3]))
        while not served.gate.num_open:
            await asyncio.sleep(0.005)
        stopping.tell(30.0)
        return await asyncio.wait_for(asked, 5)

    answer = serve(FakeEngineClient(), ServeConfig(port=0), talk)
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"stopping"' in answer


def test_a_server_that_is_told_again_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LAST_WORDS_S", 0.2)
    client = FakeEngineClient(pause_s=0.1)

    async def talk(port: int, served: Served, stopping: Stopping) -> bytes:
        asked = asyncio.ensure_future(exchange(port, request({**STREAM, "max_tokens": 600}, Connection="close")))
        while not client.asked:
            await asyncio.sleep(0.005)
        stopping.tell(60.0)
        await asyncio.sleep(0.1)
        stopping.tell(60.0)
        return await asyncio.wait_for(asked, 20)

    assert serve(client, ServeConfig(port=0), talk).startswith(b"HTTP/1.1 200 ")


def test_a_port_that_is_taken_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"serve.port={port} cannot be listened on: Address already in use; serve.*="
        ):
            listening_sockets(ServeConfig(port=port), 2)


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_else_gets_the_port_of_a_server_that_still_starts(count: int) -> None:
    sockets = listening_sockets(ServeConfig(port=0), count)
    port = sockets[0].getsockname()[1]
    for others in (1, 2):
        with pytest.raises(ConfigError, match=rf"serve.port={port} cannot be listened on: Address already in use"):
            listening_sockets(ServeConfig(port=port), others)
    for one in sockets:
        one.close()


def test_a_server_takes_the_port_of_one_that_has_just_ended() -> None:
    async def talk(port: int, served: Served, stopping: Stopping) -> int:
        answer = await exchange(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")  # the server closed first, and its end stays for a minute
        return port

    port = serve(FakeEngineClient(), ServeConfig(port=0), talk)
    assert serve(FakeEngineClient(), ServeConfig(port=port), talk) == port


def test_front_ends_share_a_free_port() -> None:
    sockets = listening_sockets(ServeConfig(port=0), 3)
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        one.close()


def test_a_certificate_that_cannot_be_used_costs_no_start_up(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"serve\.tls_certificate=.* cannot be used"):
        check_tls(ServeConfig(tls_certificate=str(tmp_path / "none.pem")))
    with pytest.raises(ConfigError, match=r"needs serve\.tls_certificate"):
        check_tls(ServeConfig(tls_key="key.pem"))


def test_a_key_that_wants_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    (tmp_path / "both.pem").write_text(ENCRYPTED)
    with pytest.raises(ConfigError, match="cannot be used"):
        check_tls(ServeConfig(tls_certificate=str(tmp_path / "both.pem")))


async def certificate(port: int) -> str:
    """Who the server says it is, to a connection that is made now."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(found)


def test_new_connections_get_the_certificate_that_the_file_holds_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hookline.core.serve.http.tls.LOOK_S", 0.01)
    path = tmp_path / "both.pem"
    path.write_text(ONE)

    async def talk(port: int, served: Served, stopping: Any) -> list[str]:
        async def until(ends: Callable[[], bool]) -> None:
            while not ends():
                await asyncio.sleep(0.01)

        found = [await certificate(port)]
        path.write_text("half a cer")
        await until(lambda: "stays as it was" in caplog.text)
        found.append(await certificate(port))
        path.write_text(TWO)
        await until(lambda: "was loaded again" in caplog.text)
        return [*found, await certificate(port)]

    with caplog.at_level(logging.INFO, "hookline"):
        found = serve(FakeEngineClient(), ServeConfig(port=0, tls_certificate=str(path)), talk)
    assert [one in ONE for one in found] == [True, True, False] and found[2] in TWO
