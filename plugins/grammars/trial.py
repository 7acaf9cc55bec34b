"""Grammars tried out in a child process that can be killed: llguidance's own budgets leave out much of its work.

`multipleOf: 9999991`, or 37 patterns of which a text has to match all, compile for minutes and take gigabytes, and no
thread can be ended. So a grammar is compiled in a child first, which has a limit of processor time and of memory; only
a grammar that passes there is compiled in the engine's process, where it takes as much again. Plain grammars, whose
cost their size bounds, are not tried: a trial takes some eight milliseconds.

The child is started by the first grammar that is not plain, holds a back end, and forks for each trial.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hookline.core.contracts import GrammarVocabulary, StructuredOutputs
from hookline.core.errors import RequestError, one_short_line

if TYPE_CHECKING:
    from hookline.plugins.grammars import LLGuidanceConfig

CPU_S = 0.75
"""Most processor time for compiling a grammar and its first mask, in seconds."""
WALL_S = 20.0
"""Longest time of a trial in seconds, on a machine that is busy with other work."""
MAX_BYTES = 64 * 2**20
"""Most memory for a grammar and its parser's first mask."""
PLAIN_CHARACTERS = 32_768
"""Most characters of a plain grammar."""
PLAIN_REGEX_CHARACTERS = 500
"""Most characters of a plain regular expression, and of a grammar in rules."""
PLAIN_REPEATS = 10_000
"""Largest product of the repetition counts in a plain regular expression, as if they were all nested."""
ANNOTATIONS = frozenset("title description default examples $schema $id $defs definitions $comment deprecated".split())
"""Keywords of a schema that constrain nothing by themselves."""
PLAIN_KEYS = ANNOTATIONS | frozenset(
    "type properties required additionalProperties items prefixItems minItems maxItems minLength maxLength enum const "
    "anyOf $ref format pattern minimum maximum exclusiveMinimum exclusiveMaximum".split()
)
"""Keywords of a plain schema. For other keywords, and for some combinations, llguidance must compute an
intersection."""
_BEGUN = b"+"
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from hookline.plugins.grammars.trial import serve
sys.exit(serve())
"""
"""The child's command. -P keeps the working folder off the path of modules."""
_COUNT = re.compile(r"\{ *(\d*) *,? *(\d*) *\}|~ *(\d+)(?: *\.\. *(\d+))?")


class Trials:
    """Tries grammars for one back end, from any thread. Its process ends with it."""

    def __init__(self, config: LLGuidanceConfig, vocabulary: GrammarVocabulary) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._starting = threading.Lock()
        self._control: socket.socket | None = None
        self._end: weakref.finalize[..., Trials] | None = None

    def try_out(self, wanted: StructuredOutputs) -> int:
        """Compile a grammar in the child; returns its memory in bytes.

        Raises: RequestError if it is invalid, or exceeds the limits of time or memory; RuntimeError if the back end
        fails.
        """
        for _ in range(2):  # the child may have been killed, which is noticed only when the trial does not begin
            if begun := self._ask(wanted):
                break
        else:
            raise RuntimeError("the process that tries grammars out does not start")
        if not (answer := begun.removeprefix(_BEGUN)):
            raise RequestError(
                f"compiling it takes more than {CPU_S:g} s of processor time, or more than {MAX_BYTES // 2**20} MiB; "
                "make it smaller"
            )
        kind, value = json.loads(answer)
        if kind == "refused":
            raise RequestError(value)
        if kind == "failed":
            raise RuntimeError(value)
        return int(value)

    def _ask(self, wanted: StructuredOutputs) -> bytes:
        """Run a trial; returns _BEGUN, followed by the answer unless the trial was killed; b"" if the trial
        did not begin.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            with self._starting:
                if self._control is None:
                    self._start()
                assert self._control is not None and self._end is not None
                control, end = self._control, self._end
            try:
                socket.send_fds(control, [b"t"], [theirs.fileno()])
                theirs.close()
                ours.settimeout(WALL_S + 10)
                ours.sendall(json.dumps([wanted.kind, wanted.value, wanted.whitespace]).encode())
                ours.shutdown(socket.SHUT_WR)
                found = _read_all(ours)
            except OSError:
                found = b""
            with self._starting:
                if not found and self._control is control:
                    self._control = None
                    end()
        return found

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # panics of llguidance, with their backtraces
                process_group=0,
            )
        self._control, self._end = ours, weakref.finalize(self, _end, ours, process)
        vocabulary = self._vocabulary
        told = json.dumps(
            {
                "config": {**asdict(self._config), "num_threads": 1},
                "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
                "special_ids": sorted(vocabulary.special_ids),
                "stop_ids": sorted(vocabulary.stop_ids),
            }
        ).encode()
        ours.sendall(len(told).to_bytes(8) + told)


def serve() -> int:
    """The child's main function: make a back end, and fork for each channel that comes, until the other
    end is closed.
    """
    from hookline.plugins.grammars import LLGuidanceConfig
    from hookline.plugins.grammars.llguidance_backend import LLGuidance

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: a trial's end is known from its channel
    with socket.socket(fileno=0) as control:
        told = json.loads(_read(control, int.from_bytes(_read(control, 8))))
        tokens = [token.encode("latin-1") for token in told["tokens"]]
        special_ids, stop_ids = frozenset(told["special_ids"]), frozenset(told["stop_ids"])
        vocabulary = GrammarVocabulary(tokens, special_ids, stop_ids, _longest_first(tokens))
        backend = LLGuidance(LLGuidanceConfig(**told["config"]), vocabulary, tries=False)
        gc.freeze()
        while True:
            data, descriptors, *_ = socket.recv_fds(control, 1, 1)
            if not data:
                return 0
            if not os.fork():
                try:
                    control.close()
                    with socket.socket(fileno=descriptors[0]) as channel:
                        channel.sendall(_BEGUN)
                        _try(backend, channel)
                finally:
                    os._exit(0)
            os.close(descriptors[0])


def _try(backend: Any, channel: socket.socket) -> None:
    """A trial in a process of its own, which is killed by a signal or by its allocator at a limit."""
    kind, value, whitespace = json.loads(_read_all(channel))
    wanted = StructuredOutputs(**{kind: value}, whitespace=whitespace)
    before = 0
    with suppress(OSError), open("/proc/self/statm") as statm:  # without it, only the time is limited
        size, before = (int(pages) * resource.getpagesize() for pages in statm.read().split()[:2])
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, size + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    answer: list[Any]
    try:
        backend.compile(wanted)
    except RequestError as error:
        answer = ["refused", str(error)]
    except MemoryError:
        return
    except Exception as error:
        answer = ["failed", one_short_line(error)]
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = ["took", max(0, peak - before) if before else 0]
    channel.sendall(json.dumps(answer).encode())


def _longest_first(tokens: list[bytes]) -> Any:
    """A tokenizer that needs nothing but the tokens, and always takes the longest token that matches."""
    ids = {token: index for index, token in enumerate(tokens) if token}
    longest = min(max(map(len, ids), default=1), 32)

    def encode(text: str) -> list[int]:
        data, place, found = text.encode(), 0, []
        while place < len(data):
            sizes = range(min(longest, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in ids), 0)
            if size:
                found.append(ids[data[place : place + size]])
            place += size or 1
        return found

    return encode


def is_plain(wanted: StructuredOutputs) -> bool:
    """Whether the cost of compiling a grammar is bounded by its size."""
    if wanted.num_characters > PLAIN_CHARACTERS:
        return False
    if wanted.kind == "json":
        return _is_plain_schema(json.loads(wanted.value))
    if wanted.kind == "regex":
        return _is_plain_regex(wanted.value)
    if wanted.kind == "grammar":  # `&`, `~` and `%` have it intersect, complement, or read another language
        return not re.search(r"[&~%]", wanted.value) and _is_plain_regex(wanted.value)
    if wanted.kind == "structural_tag":
        structures = json.loads(wanted.value).get("structures")
        return isinstance(structures, list) and all(
            isinstance(one, Mapping) and _is_plain_schema(one.get("schema")) for one in structures
        )
    return True


def _is_plain_regex(text: str) -> bool:
    counts = [max([int(one) for one in found if one], default=1) for found in _COUNT.findall(text)]
    return len(text) <= PLAIN_REGEX_CHARACTERS and math.prod(max(1, count) for count in counts) <= PLAIN_REPEATS


def _is_plain_schema(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return isinstance(schema, bool)
    told = schema.keys() - ANNOTATIONS
    if not told <= PLAIN_KEYS or (told & {"$ref", "anyOf"} and len(told) > 1):
        return False
    if len(told & {"pattern", "format", "enum", "const"}) + bool(told & {"minLength", "maxLength"}) > 1:
        return False
    if not _is_plain_regex(str(schema.get("pattern", ""))):
        return False
    named = [schema[key] for key in ("properties", "$defs", "definitions") if key in schema]
    listed = [schema[key] for key in ("anyOf", "prefixItems") if key in schema]
    if not all(isinstance(one, Mapping) for one in named) or not all(isinstance(one, list) for one in listed):
        return False
    inner = [one for many in named for one in many.values()] + [one for many in listed for one in many]
    inner += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return all(map(_is_plain_schema, inner))


def _read(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := source.recv(size - len(data))):
        data += piece
    return bytes(data)


def _read_all(source: socket.socket) -> bytes:
    """Read until the other end is closed or killed."""
    data = bytearray()
    with suppress(OSError):  # it took too long, or was killed with unread data
        while piece := source.recv(65536):
            data += piece
    return bytes(data)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Stop the child, which notices that its other end is closed."""
    control.close()
    process.kill()
    process.wait()
