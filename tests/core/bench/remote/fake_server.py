"""An OpenAI-compatible server that computes nothing: it streams tokens over real sockets and fails as it is told to.

Also `python -m tests.core.bench.remote.fake_server PORT GAP_S`, to see what a client can do.
"""

import asyncio
import json
import sys
import threading

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**members):
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def whole(status, body):
    body = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class FakeServer:
    """`with FakeServer() as server`: server.url. bodies: of all requests. faults: what happens to the next ones, by
    the order in which they come; None serves. usage, ids, burst: whether streams say how many tokens there were and
    which, and how many come in a chunk. together: after the first request, which warms up, no stream ends before so
    many have begun. card: of its model.
    """

    def __init__(
        self, faults=(), usage=True, ids=True, burst=1, gap_s=0.0, api_key=None, short=0, card=None, together=0
    ):
        self.faults, self.usage, self.ids, self.burst, self.gap_s = list(faults), usage, ids, burst, gap_s
        self.together = together
        self.api_key, self.short, self.card = api_key, short, {"id": "fake", "vocab_size": 500, **(card or {})}
        self.bodies, self.connections, self.paths = [], 0, []

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = asyncio.run_coroutine_threadsafe(self._start(0), self.loop).result(10)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *details):
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    async def _start(self, port):
        return await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=2048)

    async def _stop(self):
        self.server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        path = head.split()[1]
        self.paths.append(path)
        if self.api_key is not None and headers.get("authorization") != f"bearer {self.api_key}":
            writer.write(whole(401, {"error": {"message": "a key is needed"}}))
            return True
        if path.endswith("/v1/models"):
            writer.write(whole(200, {"object": "list", "data": [self.card]}))
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            writer.write(whole(fault, {"error": {"message": f"status {fault}", "type": "x"}}))
            return True
        if fault == "hang up":
            return False
        return await self._stream(writer, body, path, fault)

    async def _stream(self, writer, body, path, fault):
        is_chat = path.endswith("chat/completions")
        count = body["max_tokens"] - self.short
        writer.write(HEAD)
        if is_chat:
            opening = {"role": "assistant", "content": ""}
            writer.write(chunked(event(choices=[{"index": 0, "delta": opening, "finish_reason": None}])))
        for first in range(0, count, self.burst):
            tokens = list(range(first, min(first + self.burst, count)))
            text = "".join(f" t{token}" for token in tokens)
            last = "length" if tokens[-1] == count - 1 else None
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            choice |= {"index": 0, "finish_reason": last, **({"token_ids": tokens} if self.ids else {})}
            data = chunked(event(choices=[choice]))
            if fault == "half" and first:
                writer.write(data[: len(data) // 2])
                return False
            writer.write(data)
            if fault == "error" and first:
                writer.write(chunked(event(error={"message": "the engine died"})) + chunked(b"data: [DONE]\n\n"))
                writer.write(b"0\r\n\r\n")
                return True
            if fault == "silence" and first:
                await asyncio.sleep(30)
            while 1 < len(self.bodies) <= self.together and last is None:
                await asyncio.sleep(0.001)
            if self.gap_s:
                await asyncio.sleep(self.gap_s)
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
            writer.write(chunked(event(choices=[], usage=usage)))
        writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True


async def _forever(port, gap_s):
    server = await FakeServer(gap_s=gap_s)._start(port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_forever(int(sys.argv[1]), float(sys.argv[2])))
