"""Runs texts through an engine: measures the inputs of its linears, and the perplexity of texts that were held out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from hookline.core.config.settings import Config
from hookline.core.contracts import Quantization
from hookline.core.errors import ConfigError
from hookline.core.frontend.llm import LLM
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import QUANTIZATION, Entry, Option, Origin
from hookline.core.quantize.recording import Moments, RecordingConfig
from hookline.core.sampling_params import SamplingParams

PIECE = 512
"""Tokens of a prompt that texts are cut into, unless the model's positions are fewer."""
MAX_CALIBRATING, MAX_HELD_OUT = 256, 32
"""Most pieces of a file that are used, in its order; the last eighth of its text is held out."""
MOMENTS_BYTES = 2 << 30
"""Memory of the moments of one pass over the texts; a large model takes several passes."""
STDIN = "-"
CHARACTERS = 1000
"""Characters of a text that are tokenized at a time."""
SCORES = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
"""Asks for the log-probabilities of prompts, without which the last layer would skip most rows."""


@dataclass(frozen=True)
class Texts:
    """Pieces of a file as token ids. held_out: pieces of its end, which are not used for calibration."""

    calibrating: Sequence[Sequence[int]]
    held_out: Sequence[Sequence[int]]

    @property
    def num_held_out(self) -> int:
        """Tokens that are predicted: all but the first of each piece."""
        return sum(len(piece) - 1 for piece in self.held_out)


def read_texts(path: Path) -> str:
    """A file's text: the `text` of each row of a .jsonl file, or all of another file; standard input for -.

    Raises: ConfigError if there is no such file or no text in it.
    """
    try:
        text = sys.stdin.read() if str(path) == STDIN else path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"texts={path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'texts={path}: each line of a .jsonl file is {{"text": "..."}}: {error!r}') from error
    if not text.strip():
        raise ConfigError(f"texts={path} has no text")
    return text


def cut(llm: LLM, text: str, path: Path) -> Texts:
    """A text as pieces of equal length for this model.

    Raises: ConfigError if the last eighth of the text, or the rest, has fewer tokens than a piece.
    """
    size = min(PIECE, llm.engine.limits.max_len - 1)
    num_held_out = max(len(text) // 8, 1)
    calibrating = _pieces(llm, text[:-num_held_out], size, MAX_CALIBRATING)
    held_out = _pieces(llm, text[-num_held_out:], size, MAX_HELD_OUT)
    if not held_out or not calibrating:
        raise ConfigError(f"texts={path} has {len(text):,} characters, and its last eighth not even {size} tokens")
    return Texts(calibrating, held_out)


def _pieces(llm: LLM, text: str, size: int, most: int) -> list[list[int]]:
    """At most `most` pieces of `size` tokens; the text is tokenized only as far as they need."""
    ids: list[int] = []
    for start in range(0, len(text), CHARACTERS):  # a tokenizer is given no more than what a prompt may have
        ids += llm.codec.encode_text(text[start : start + CHARACTERS], add_special_tokens=not start)
        if len(ids) >= size * most:
            break
    return [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)][:most]


def perplexity(llm: LLM, pieces: Sequence[Sequence[int]]) -> float:
    """The exponential of the mean negative log-probability of each token but a piece's first."""
    outputs = llm.generate([list(piece) for piece in pieces], SCORES)
    logprobs = [one.logprob for output in outputs for one in output.prompt_logprobs or () if one is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


def reading(config: Config, host: PluginHost) -> LLM:
    """An engine that computes texts and keeps nothing of them."""
    engine = replace(config.engine, prefix_caching=False, cuda_graphs=False)
    return LLM.from_config(replace(config, engine=engine), host, is_command=False)


def recording(config: Config, quantization: Quantization, moments: Moments) -> Config:
    """The configuration with plain weights that record their inputs, for linears that this quantization quantises."""
    place = "hookline.core.quantize.recording"
    entry = Entry(QUANTIZATION, "recording", f"{place}:Recording", Origin("quantize", place, "hookline", "-"))
    chosen = RecordingConfig(moments=moments, quantization=quantization)
    return replace(config, quantization=Option(entry, chosen))


def passes(llm: LLM, pieces: Sequence[Sequence[int]], moments: Moments) -> Iterator[Mapping[str, Tensor]]:
    """Yields, pass by pass, the moments of all linears that the texts reach, by linear: as many as memory allows."""
    while True:
        moments.begin_pass()
        llm.generate([list(piece) for piece in pieces], SCORES)
        moments.end_pass()
        yield moments.of
        if not moments.num_left:
            return
