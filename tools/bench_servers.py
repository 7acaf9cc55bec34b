"""Servers on the same loads, asked by one client, and their figures beside each other, each as soon as it is there.

python tools/bench_servers.py NAME=URL [NAME=URL ...] LOAD [LOAD ...] [results=FILE.jsonl] [of=LABEL] [sides=A,B]

A load is REQUESTSxPROMPT+OUTPUT: so many requests at once, of so many tokens each ("64x128+1024"); or, with a number of
turns, so many conversations ("24x20x128+32"). Keys of the workload may follow, after colons:
"24x20x128+32:shared_prefix_len=4096:think_s=[0.5,1]". As many short requests warm the server up before each load.

results: figures that the file has stand beside new ones, which are added to it, so that servers can run one after the
other; without a load, all that it has. of: what the servers serve, put before a load's name. sides: the two servers
that are compared, by default the first two; ratios are the second's speed by the first's.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hookline.core.bench.latencies import request_latencies
from hookline.core.bench.recorder import Recording
from hookline.core.bench.remote.command import serve_load
from hookline.core.bench.remote.recording import figures
from hookline.core.bench.remote.settings import Address, ClientConfig
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import WorkloadConfig, draw_load, workload_of

LOAD = re.compile(r"(\d+)x(?:(\d+)x)?(\d+)\+(\d+)")
WARM_TOKENS = 8
SHOWN_TURNS = (1, 2, 5, 10, 15, 20)
HEAD = "output tok/s; first token, p50 and p99 ms; ms a token; tok/s while all decode"
Results = dict[tuple[str, str], dict[str, Any]]
"""Figures by load and server."""


def workload(text: str) -> WorkloadConfig:
    """The workload that a load's text means."""
    form, *more = text.split(":")
    found = LOAD.fullmatch(form)
    if found is None:
        raise SystemExit(f"{form!r} is not REQUESTSxPROMPT+OUTPUT or REQUESTSxTURNSxPROMPT+OUTPUT")
    count, turns, prompt, output = (int(one or 1) for one in found.groups())
    keys = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in more)}
    lengths = {"prompt_len": [prompt, prompt], "output_len": [output, output], "turns": [turns, turns]}
    return workload_of({"num_prompts": count, **lengths, **keys})


def measure(url: str, load: WorkloadConfig) -> dict[str, Any]:
    """A server's figures under a load."""
    address, client = Address.of(url), ClientConfig()
    low, high = load.output_len
    short = replace(load, turns=(1, 1), think_s=(0, 0), output_len=(min(low, WARM_TOKENS), min(high, WARM_TOKENS)))
    serve_load(address, client, short, partial(draw_load, short), 1)
    loads = iter((short, load))  # the first one's first request only shows whether the server answers
    served = serve_load(address, client, load, lambda *arguments: draw_load(next(loads), *arguments), 1)
    found = figures(served.recording, Slo())
    waits = {name: found[name] for name in ("seconds", "output_tok_s", "ttft_s", "tpot_s", "refused", "cached_tokens")}
    more = {"decode_tok_s": decode_tok_s(served.recording), "turns": by_turn(served.recording)}
    return {**waits, **more, "client_busy_percent": served.client["busy_percent"]}


def decode_tok_s(recording: Recording) -> float | None:
    """Tokens per second from the last request's first token to the first end of a request; None if that is no time."""
    served = [one for one in recording.requests if one.error is None]
    begin_s, end_s = max(one.first_token_s or 0 for one in served), min(one.finish_s or 0 for one in served)
    times_s, counts = recording.steps["end_s"], recording.steps["num_drawn"]
    inside = (times_s > begin_s) & (times_s <= end_s)
    return round(float(counts[inside].sum() / (end_s - begin_s)), 1) if inside.any() else None


def by_turn(recording: Recording) -> list[dict[str, float]]:
    """Of each turn of the conversations: its first tokens' p50 and p90 in seconds, and the part that was cached."""
    numbers: list[int] = []
    turns = defaultdict(list)
    for one in recording.requests:
        numbers.append(0 if one.follows is None else numbers[one.follows] + 1)
        if one.first_token_s is not None:
            turns[numbers[-1]].append(one)
    found = []
    for requests in turns.values():
        p50, p90 = np.percentile([request_latencies(one)["ttft_s"] for one in requests], (50, 90))
        cached = sum(one.cached_tokens for one in requests) / sum(one.prompt_tokens for one in requests)
        found.append({"p50_s": round(float(p50), 6), "p90_s": round(float(p90), 6), "cached": round(cached, 4)})
    return found


def rows(name: str, results: Results, sides: Sequence[str]) -> list[str]:
    """A load's lines of the table; a dash is for what is missing."""
    pair = [results.get((name, side)) for side in sides]
    if any(one is not None and len(one["turns"]) > 1 for one in pair):
        count = max(len(one["turns"]) for one in pair if one is not None)
        chosen = [turn for turn in SHOWN_TURNS if turn <= count]
        turns = [[None if one is None else one["turns"][turn - 1] for one in pair] for turn in chosen]
        return [
            f"| {name}, turn {turn} | {' | '.join(map(_turn_cell, both))} | {_ratio(both, 'p50_s', inverted=True)} |"
            for turn, both in zip(chosen, turns, strict=True)
        ]
    firsts = [None if one is None else one["ttft_s"] for one in pair]
    decodes = _ratio(pair, "decode_tok_s")
    ratios = f"{_ratio(pair, 'output_tok_s')}; {_ratio(firsts, 'p50', inverted=True)}; {decodes}"
    return [f"| {name} | {' | '.join(map(_cell, pair))} | {ratios} |"]


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "–"
    first, token, decode = one["ttft_s"], one["tpot_s"], one["decode_tok_s"]
    refused = f"; {one['refused']} REFUSED" if one["refused"] else ""
    busy = f"; CLIENT BUSY {one['client_busy_percent']} %" if one["client_busy_percent"] > 80 else ""
    waits = f"{1000 * first['p50']:,.1f}, {1000 * first['p99']:,.1f}; {1000 * token['p50']:.2f}"
    return f"{one['output_tok_s']:,.0f}; {waits}; {'–' if decode is None else format(decode, ',.0f')}{refused}{busy}"


def _turn_cell(one: dict[str, float] | None) -> str:
    if one is None:
        return "–"
    return f"{1000 * one['p50_s']:,.1f}, {1000 * one['p90_s']:,.1f} ms, {100 * one['cached']:.0f} % cached"


def _ratio(pair: Sequence[dict[str, Any] | None], key: str, *, inverted: bool = False) -> str:
    values = [one[key] for one in pair if one is not None and one[key]]
    if len(values) != 2:
        return "–"
    theirs, ours = values
    return f"{theirs / ours if inverted else ours / theirs:.2f}"


def read(path: Path | None) -> Results:
    """The figures in a file, the last ones of each load and server."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["load"], line["side"]): line for line in lines}


def main(arguments: list[str]) -> int:
    pairs = [one.split("=", 1) for one in arguments if LOAD.match(one) is None]
    settings = {name: value for name, value in pairs if "://" not in value}
    urls = {name: value for name, value in pairs if "://" in value}
    path = Path(settings.pop("results")) if "results" in settings else None
    label, sides = settings.pop("of", ""), settings.pop("sides", ",".join(list(urls)[:2])).split(",")
    if settings:
        raise SystemExit(f"unknown: {', '.join(settings)}; known are results, of, sides, and NAME=http://...")
    results = read(path)
    print(f"| | {' | '.join(f'{side}: {HEAD}' for side in sides)} | ratio |", "|---" * (len(sides) + 2) + "|", sep="\n")
    loads = {f"{label} {text}".strip(): workload(text) for text in arguments if LOAD.match(text)}
    if not loads:
        names = dict.fromkeys(name for name, _ in results)
        print(*(row for name in names for row in rows(name, results, sides)), sep="\n")
    for name, load in loads.items():
        for side, url in urls.items():
            try:
                found = measure(url, load)
            except Exception as error:  # the other loads and servers are still to be measured
                print(f"{side} failed under {name}: {error}", file=sys.stderr, flush=True)
                continue
            results[name, side] = found
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps({"load": name, "side": side, **found}) + "\n")
        print(*rows(name, results, sides), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
