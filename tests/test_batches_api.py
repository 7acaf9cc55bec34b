"""OpenAI's files and batches, by OpenAI's own package, unmodified, against a running server."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
from tests.live_server import live_server

openai = pytest.importorskip("openai")
pytest.importorskip("python_multipart")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CHAT = "/v1/chat/completions"


def row(custom_id: str, body: Any = None, url: str = CHAT) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is two and two?"}]
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"messages": messages}}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in rows).encode()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:

        def _connect(make: Callable[[], Any] = FakeEngineClient, **config: Any) -> Any:
            store = {"name": "batches", "folder": str(tmp_path / "store"), **config}
            server = stack.enter_context(live_server(make, ServeConfig(apis=("openai", store))))
            options: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
            return stack.enter_context(openai.OpenAI(**options))

        yield _connect


def ended(client: Any, batch: Any, timeout_s: float = 60) -> Any:
    until_s = time.monotonic() + timeout_s
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < until_s, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_a_batch_is_uploaded_answered_and_downloaded(connect: Callable[..., Any]) -> None:
    client = connect()
    bad = row("bad", {"messages": [], "temperature": "hot"})
    data = lines(row("a"), bad, row("b"), row("elsewhere", {"prompt": "x"}, "/v1/completions"), {"custom_id": "none"})
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    assert client.files.content(file.id).read() == data
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"who": "test"}
    )
    batch = ended(client, made)
    assert batch.status == "completed" and batch.metadata == {"who": "test"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == ["a", "b"]
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)
    failed = {
        one["custom_id"]: one
        for line in client.files.content(batch.error_file_id).text.splitlines()
        if (one := json.loads(line))
    }
    assert failed["bad"]["response"]["status_code"] == 400 and failed["none"]["error"]["code"] == "invalid_line"
    assert "is not the batch's endpoint" in failed["elsewhere"]["response"]["body"]["error"]["message"]
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert {one.id for one in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
    assert [one.id for one in client.files.list(purpose="batch")] == [file.id]
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert gone.value.param == "input_file_id"


def answered(client: Any, *rows: Any) -> tuple[Any, dict[str, Any]]:
    """A batch of these rows once it has ended, and its lines by their custom_ids."""
    file = client.files.create(file=("in.jsonl", lines(*rows)), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    ids = filter(None, (batch.output_file_id, batch.error_file_id))
    found = [json.loads(line) for id in ids for line in client.files.content(id).text.splitlines()]
    return batch, {one["custom_id"]: one for one in found}


def test_rows_name_fields_without_an_effect_and_have_lines_in_the_access_log(
    connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "What is two and two?"}]
    with caplog.at_level(logging.INFO, "hookline"):
        _, found = answered(
            connect(),
            row("plain"),
            row("odd", {"messages": messages, "baz": 1, "tools": [{"type": "web_search"}]}),
            row("bad", {"messages": messages, "max_tokens": -8}),
        )
    assert "headers" not in found["plain"]["response"]
    assert found["odd"]["response"]["headers"] == {"X-Hookline-Ignored": "tools.web_search, baz"}
    logged = [vars(one)["fields"] for one in caplog.records if one.name == "hookline.access"]
    by_id = {one["request_id"]: one for one in logged}
    of_rows = {name: by_id[one["response"]["request_id"]] for name, one in found.items()}
    assert [(one["client"], one["path"]) for one in of_rows.values()] == [("batch", CHAT)] * 3
    usage = found["plain"]["response"]["body"]["usage"]
    assert (of_rows["plain"]["prompt"], of_rows["plain"]["output"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert of_rows["bad"]["status"] == 400 and "max_tokens=-8" in of_rows["bad"]["reason"]
    others = [one for one in logged if one["client"] != "batch"]
    assert others and not any("output" in one for one in others)
    assert any("'tools.web_search, baz' had no effect" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("body", ["{", "[]", "3", '{"input_file_id": [{}]}'])
def test_what_is_no_batch_is_refused_in_openais_form(body: str, connect: Callable[..., Any]) -> None:
    response = httpx.post(f"{connect().base_url}batches", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and {"message", "type"} <= set(response.json()["error"])


class Slow(FakeEngineClient):
    """Answers one request after the other, each in a while."""

    def stream(self, *args: Any, **keys: Any) -> Any:
        inner, delay_s = super().stream(*args, **keys), 0.15

        class _Later:
            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> Any:
                await asyncio.sleep(delay_s)
                return await inner.__anext__()

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        return _Later()


def test_a_cancelled_batch_keeps_what_is_answered(connect: Callable[..., Any]) -> None:
    client = connect(Slow, max_rows=1)
    file = client.files.create(file=("in.jsonl", lines(*(row(str(i)) for i in range(500)))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    while not client.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.05)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and 0 < batch.request_counts.completed < 500
    assert len(client.files.content(batch.output_file_id).text.splitlines()) == batch.request_counts.completed
    with pytest.raises(openai.ConflictError, match="nothing to cancel"):
        client.batches.cancel(batch.id)


def test_an_expired_batch_names_the_lines_that_have_no_answer(connect: Callable[..., Any]) -> None:
    client = connect(Slow, max_rows=1)
    file = client.files.create(file=("in.jsonl", lines(*(row(str(i)) for i in range(50)))), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1s"))
    assert batch.status == "expired"
    assert batch.request_counts.completed + batch.request_counts.failed == 50
    codes = {json.loads(one)["error"]["code"] for one in client.files.content(batch.error_file_id).text.splitlines()}
    assert codes == {"batch_expired"}


def test_a_batch_goes_on_in_another_process_of_the_same_store(connect: Callable[..., Any], tmp_path: Path) -> None:
    with live_server(
        Slow, ServeConfig(apis=("openai", {"name": "batches", "folder": str(tmp_path / "store"), "max_rows": 1}))
    ) as first:
        with openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("in.jsonl", lines(*(row(str(i)) for i in range(40)))), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            while not client.batches.retrieve(batch.id).request_counts.completed:
                time.sleep(0.05)
    client = connect()
    batch = ended(client, client.batches.retrieve(batch.id))
    assert (batch.status, batch.request_counts.completed) == ("completed", 40)
    answers = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(one["custom_id"]) for one in answers) == list(range(40))


def test_storage_is_bounded_and_expires(connect: Callable[..., Any]) -> None:
    client = connect(max_bytes=2**20, max_file_bytes=700_000)
    client.files.create(
        file=("a.jsonl", b"x" * 600_000), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
    )
    with pytest.raises(openai.APIStatusError, match="do not fit: the store holds") as full:
        client.files.create(file=("b.jsonl", b"x" * 600_000), purpose="batch")
    assert full.value.status_code == 413
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("c.jsonl", b"x" * 720_000), purpose="batch")
    assert large.value.status_code == 413
    until_s = time.monotonic() + 20
    while list(client.files.list()):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    client.files.create(file=("b.jsonl", b"x" * 600_000), purpose="batch")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"endpoint": "/v1/files"}, "endpoint='/v1/files' is not one of"),
        ({"completion_window": "soon"}, "completion_window='soon' is no time"),
        ({"input_file_id": "../objects.sqlite"}, "There is no file"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata holds at most 16 pairs"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(asked: dict[str, Any], told: str, connect: Callable[..., Any]) -> None:
    client = connect()
    file = client.files.create(file=("in.jsonl", lines(row("a"))), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **asked}
    with pytest.raises(openai.APIStatusError, match=told):
        client.batches.create(**given)


PART = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\nx\r\n'


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (PART * 9 + b"--B--\r\n", "Too many fields"),
        (FILE * 2 + b"--B--\r\n", "Too many files"),
        (b"--B\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\nx\r\n--B--\r\n", ""),
        (PART.replace(b"batch", b"b" * 2**20) + FILE + b"--B--\r\n", ""),
        (b"no part of it", ""),
    ],
)
def test_an_upload_that_is_no_form_or_too_much_of_one_is_refused(
    body: bytes, told: str, connect: Callable[..., Any]
) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=B"}
    found = httpx.post(f"{connect().base_url}files", content=body, headers=headers, timeout=30)
    assert found.status_code == 400 and told in found.json()["error"]["message"]
