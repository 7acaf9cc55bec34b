"""What a caller may ask of a request's sampling, validated on arrival. Knows no torch and no engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from core.errors import RequestError
from core.registry import near_miss

MAX_SEED = 2**63 - 1


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

    Raises: RequestError naming the field, the value and the allowed range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _finite("temperature", self.temperature))
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"sampling.min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"sampling.ignore_eos={self.ignore_eos!r} is not a bool")

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
