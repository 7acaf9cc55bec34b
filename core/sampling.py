"""What a caller may ask of a request's sampling, validated on arrival. Knows no torch and no engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import xxhash

from core.errors import RequestError
from core.registry import near_miss

MAX_SEED = 2**63 - 1
MAX_COMPLETIONS = 1024


def derived_seed(seed: int, number: int) -> int:
    """A seed for the `number`th of the things that share one."""
    return xxhash.xxh64_intdigest(f"{seed}:{number}".encode()) & MAX_SEED


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature:    dimensionless, >= 0; 0 means greedy.
    max_tokens:     most tokens to generate, >= 1.
    min_tokens:     fewest tokens to generate before an end-of-sequence or stop token may be drawn.
    seed:           fixes the draws of this request whatever else runs; None derives one from the engine's seed and the
                    request's number.
    stop_token_ids: further token ids that end the request; they stay in token_ids, not in the text.
    ignore_eos:     do not stop at the checkpoint's end-of-sequence tokens.
    n:              completions of the prompt, 1 to 1024. The first draws with `seed`, the others with seeds made of it.
    stop:           texts that end the request, once min_tokens are there; the text ends before the one that is complete
                    first, the token that completed it is the last. One text, or several.
    include_stop_str_in_output: leave the stop string in the text.
    skip_special_tokens: leave special tokens out of the text.

    Raises: RequestError naming the field, the value and the allowed range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _finite("temperature", self.temperature))
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"sampling.min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _whole("n", self.n, 1, MAX_COMPLETIONS)
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"sampling.{name}={getattr(self, name)!r} is not a bool")

    def each(self) -> list[SamplingParams]:
        """The parameters of each of the n completions, as requests of their own."""
        if self.n == 1:
            return [self]
        seeds = [self.seed, *(None if self.seed is None else derived_seed(self.seed, i) for i in range(1, self.n))]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, as the configuration and JSON requests give it.

        Raises: RequestError for an unknown key, with the near miss.
        """
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                hint = near_miss(key, known)
                raise RequestError(f"unknown key 'sampling.{key}'.{hint} Available: {', '.join(known)}")
        return cls(**values)


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise RequestError(f"sampling.{name}={value!r} must be a finite number of at least 0")
    return float(value)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"sampling.{name}={value!r} must be a whole number")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"sampling.{name}={value} must be {bounds}")


def _token_ids(values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise RequestError(f"sampling.stop_token_ids={values!r} must be a list of token ids")
    ids = tuple(values)
    for token_id in ids:
        _whole("stop_token_ids", token_id, 0)
    return ids


def _texts(name: str, values: object) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"sampling.{name}={values!r} must be a text or a list of texts, none of them empty")
    return tuple(texts)
