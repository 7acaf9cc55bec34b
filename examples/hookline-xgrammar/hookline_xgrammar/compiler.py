"""The process that compiles: `python -m hookline_xgrammar.compiler SECONDS`.

The first line of its input is the vocabulary, each further one a grammar; every line is answered by one. Each grammar
is compiled in a fork, which is killed when it takes too long, and which may crash: nothing else is touched by it.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import sys
import time
from typing import Any

import xgrammar


def tokenizer_info(vocabulary: dict[str, Any]) -> xgrammar.TokenizerInfo:
    """XGrammar's view of a vocabulary: {"tokens": bytes in base64, "stop_ids": ...}."""
    return xgrammar.TokenizerInfo(
        [base64.b64decode(token) for token in vocabulary["tokens"]],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary["tokens"]),
        stop_token_ids=vocabulary["stop_ids"],
        add_prefix_space=False,
    )


def compiled(compiler: xgrammar.GrammarCompiler, wanted: dict[str, Any]) -> xgrammar.CompiledGrammar:
    """The grammar of {"kind", "value", "whitespace", "max_whitespace"}."""
    kind, value = wanted["kind"], wanted["value"]
    if kind == "json":
        options = {"any_whitespace": wanted["whitespace"], "max_whitespace_cnt": wanted["max_whitespace"]}
        if not wanted["whitespace"]:
            options = {"any_whitespace": False, "separators": (",", ":")}
        return compiler.compile_json_schema(value, **options)
    if kind == "regex":
        return compiler.compile_regex(value)
    if kind == "choice":
        value = "root ::= " + " | ".join(json.dumps(text) for text in value)
    return compiler.compile_grammar(value)


def answer(compiler: xgrammar.GrammarCompiler, line: str) -> dict[str, str]:
    """What the fork says."""
    try:
        return {"grammar": compiled(compiler, json.loads(line)).serialize_json()}
    except Exception as error:
        return {"error": str(error)}


def in_a_fork(compiler: xgrammar.GrammarCompiler, line: str, limit_s: float) -> bytes:
    """The answer as JSON, within about limit_s seconds."""
    until = time.monotonic() + limit_s
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "wb") as out:
            out.write(json.dumps(answer(compiler, line)).encode())
        os._exit(0)
    os.close(writer)
    said = b""
    while select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(reader, 1 << 20)
        if not piece:
            break
        said += piece
    else:
        os.kill(child, signal.SIGKILL)
        said = json.dumps({"error": f"compiling it takes longer than {limit_s:g} s; make it smaller"}).encode()
    os.close(reader)
    os.waitpid(child, 0)
    return said or json.dumps({"error": "the compiler crashed on it"}).encode()


def main() -> None:
    """Serve until the input ends."""
    limit_s = float(sys.argv[1])
    vocabulary = json.loads(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1, cache_enabled=False)
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    for line in sys.stdin:
        out.write(in_a_fork(compiler, line, limit_s) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
