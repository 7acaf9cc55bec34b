"""What a benchmark asks of an engine: prompts as token ids, and how many tokens each wants back.

Drawn from a seed alone, so that every engine and every run gets the same load. Knows no engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from core.errors import ConfigError
from core.sampling import SamplingParams


@dataclass(frozen=True)
class WorkloadConfig:
    """Lengths in tokens; a pair is drawn from uniformly, both ends included.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    num_prompts: int = 8
    prompt_len: tuple[int, int] = (16, 64)
    output_len: tuple[int, int] = (8, 16)
    shared_prefix_len: int = 0
    """Leading tokens that all prompts share, on top of prompt_len."""
    max_token_id: int = 10000
    """Token ids are drawn from 0 to this; a smaller vocabulary lowers it."""
    temperature: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "output_len"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"workload.{name}=[{low}, {high}] must be two whole numbers, 1 <= first <= second")
        if self.num_prompts < 1 or self.shared_prefix_len < 0 or self.max_token_id < 1:
            raise ConfigError("workload.num_prompts and max_token_id must be at least 1, shared_prefix_len at least 0")


@dataclass(frozen=True)
class Load:
    """Prompts and their parameters, one each."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens wanted of all prompts."""
        return sum(params.max_tokens for params in self.params)


def draw_load(workload: WorkloadConfig, vocab_size: int, repetition: int = 0) -> Load:
    """The load of a repetition: the same lengths each time and other token ids, so that no prefix hit crosses over."""
    rng = random.Random(workload.seed)
    size = min(workload.max_token_id + 1, vocab_size)

    def tokens(count: int) -> list[int]:
        return [(rng.randint(0, size - 1) + 7919 * repetition) % vocab_size for _ in range(count)]

    prompts = [tokens(rng.randint(*workload.prompt_len)) for _ in range(workload.num_prompts)]
    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=rng.randint(*workload.output_len), ignore_eos=True)
        for _ in range(workload.num_prompts)
    ]
    shared = tokens(workload.shared_prefix_len)
    return Load([[*shared, *prompt] for prompt in prompts], params)
