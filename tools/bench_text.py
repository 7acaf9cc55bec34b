"""What text costs per token while requests run: the detokeniser, the stop-string search, and both as a stream has them.

    python tools/bench_text.py

Takes the bundled tokenizer and this repository's own source as text; no model runs. Best of several rounds, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.detokenizer import Detokenizer
from hookline.core.tokenizer.reader import TextReader

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 15
STOPS = ("\n\n\n\n", "</answer>")


def main() -> None:
    codec = Codec(ROOT / "plugins/models/qwen3_tiny")
    ids = codec.encode((ROOT / "core/engine/engine.py").read_text())[:2000]
    few, window = ids[: len(ids) // 10], partial(Detokenizer, codec.decode)
    ways: dict[str, tuple[Callable[[], TextReader], list[int]]] = {
        "everything again each time, 200 tokens": (lambda: TextReader(SamplingParams(), Everything(codec), None), few),
        "a window": (lambda: TextReader(SamplingParams(), window(), None), ids),
        "remembered texts": (lambda: TextReader(SamplingParams(), codec.detokenizer(), None), ids),
        "... and two stop strings": (
            lambda: TextReader(SamplingParams(stop=STOPS), codec.detokenizer(), None),
            ids,
        ),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, (make, tokens) in ways.items():
            best[name] = min(best[name], seconds(make(), tokens) / len(tokens))
    for name, taken_s in best.items():
        print(f"{name:40} {taken_s * 1e6:8.2f} us a token")


class Everything(Detokenizer):
    """What a detokeniser without a window would do."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.decode)

    def push(self, token_id: int) -> str:
        self._tokens.append(token_id)
        return self._decode(self._tokens)


def seconds(reader: TextReader, ids: list[int]) -> float:
    started = time.perf_counter()
    for token_id in ids:
        reader.see(token_id, None)
        reader.take()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
