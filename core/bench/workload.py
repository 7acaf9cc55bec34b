"""What a benchmark asks of an engine: requests as token ids, when they arrive, and how many tokens each wants back.

Drawn from a seed alone, so that every engine and every run gets the same load. Knows no engine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from hookline.core.errors import ConfigError, RequestError
from hookline.core.sampling_params import UNTRUNCATED, SamplingParams
from hookline.core.structured_outputs import StructuredOutputs
from hookline.core.util.ranges import bounded, check_ranges

DISTRIBUTIONS = ("uniform", "lognormal")
Z_90 = 1.6449
"""Standard deviations around the mean that hold 90 % of a normal distribution."""


@dataclass(frozen=True)
class WorkloadConfig:
    """Lengths in tokens, times in seconds; a pair is a range with both ends included.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    num_prompts: int = bounded(8, 1)
    """Requests; with several turns, conversations."""
    prompt_len: tuple[int, int] = (16, 64)
    """Tokens of a prompt, without the shared prefix."""
    output_len: tuple[int, int] = (8, 16)
    """Tokens that a request asks for."""
    length_distribution: str = "uniform"
    """How lengths are drawn from their range: "uniform", or "lognormal" with 90 % of the draws inside and none out."""
    shared_prefix_len: int = bounded(0, 0)
    """Leading tokens that all prompts share, on top of prompt_len."""
    request_rate: float | None = bounded(None, above=0)
    """Requests that arrive per second, whatever the engine has finished by then; None: all at the start."""
    burstiness: float = bounded(1.0, above=0)
    """Shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less comes in bursts."""
    turns: tuple[int, int] = (1, 1)
    """Turns of a conversation: each later prompt is what was said so far and prompt_len new tokens."""
    think_s: tuple[float, float] = (0.0, 0.0)
    """Wait between an answer's end and the next turn."""
    trace: str | None = None
    """A .jsonl file of recorded requests in place of all that is drawn; core.bench.trace says what a line holds."""
    max_token_id: int = bounded(10000, 1)
    """Token ids are drawn from 0 to this; a smaller vocabulary lowers it."""
    temperature: float = 0.6
    """Of all requests; 0 is greedy."""
    json_schema: str | None = None
    """A JSON schema, as JSON text, that every completion follows; None leaves them free."""
    seed: int = 0
    """Of all that is drawn."""

    def __post_init__(self) -> None:
        check_ranges(WorkloadConfig, vars(self), "workload")
        for name in ("prompt_len", "output_len", "turns", "think_s"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # configurations bring lists
        for name in ("prompt_len", "output_len", "turns"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"workload.{name}=[{low}, {high}] must be two whole numbers, 1 <= first <= second")
        if self.length_distribution not in DISTRIBUTIONS:
            known = ", ".join(DISTRIBUTIONS)
            raise ConfigError(f"workload.length_distribution={self.length_distribution!r} is not one of {known}")
        self._check_times()
        self._check_trace()
        if self.json_schema is not None:
            try:
                StructuredOutputs(json=self.json_schema)
            except RequestError as error:
                raise ConfigError(f"workload.json_schema: {error}") from error

    def _check_times(self) -> None:
        low, high = self.think_s
        if not 0 <= low <= high < math.inf:
            raise ConfigError(f"workload.think_s=[{low}, {high}] must be two finite numbers, 0 <= first <= second")
        if high and self.turns == (1, 1):
            raise ConfigError(f"workload.think_s=[{low}, {high}] has no effect without workload.turns")
        if self.burstiness != 1 and self.request_rate is None:
            raise ConfigError(f"workload.burstiness={self.burstiness} has no effect without workload.request_rate")

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("trace", "max_token_id", "temperature", "seed") and value != field.default:
                raise ConfigError(
                    f"workload.{field.name}={value} has no effect beside workload.trace={self.trace}, "
                    "which brings its own requests"
                )


@dataclass(frozen=True)
class LoadRequest:
    """One request. tokens: its prompt; of a later turn of a conversation, what that turn adds to it.

    arrival_s: seconds after the load's start; of a later turn, after the end of the turn before.
    follows: place in the load of the turn before, whose prompt and answer come first in the prompt.
    """

    tokens: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    follows: int | None = None


@dataclass(frozen=True)
class Load:
    """Requests in a fixed order; a later turn stands behind the one that it follows."""

    requests: list[LoadRequest]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, without what later turns repeat."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens wanted of all requests."""
        return sum(request.params.max_tokens for request in self.requests)


@dataclass
class TokenSource:
    """Random token ids, other ones in each repetition, so that no prefix hit crosses over."""

    rng: random.Random
    max_token_id: int
    vocab_size: int
    repetition: int = 0

    def draw(self, count: int) -> list[int]:
        """As many token ids below the vocabulary's size."""
        bound, shift = min(self.max_token_id, self.vocab_size - 1) + 1, 7919 * self.repetition
        # What rng.randint draws, at a fifth of its time: a simulation draws longer than it simulates.
        draw_bits, num_bits, found = self.rng.getrandbits, bound.bit_length(), list[int]()
        while len(found) < count:
            found += [token for _ in range(count - len(found)) if (token := draw_bits(num_bits)) < bound]
        return [(token + shift) % self.vocab_size for token in found] if shift else found


def draw_load(workload: WorkloadConfig, vocab_size: int, repetition: int = 0) -> Load:
    """The load of a repetition: the same lengths and times each time and other token ids.

    A workload with a trace is `core.bench.trace.read_trace`'s matter.
    """
    assert workload.trace is None
    rng = random.Random(workload.seed)
    source = TokenSource(rng, workload.max_token_id, vocab_size, repetition)
    turns, arrivals_s, thinking_s = _draw_times(workload)
    total = sum(turns)
    prompts = [source.draw(_draw_len(rng, workload, workload.prompt_len)) for _ in range(total)]
    structured = None if workload.json_schema is None else StructuredOutputs(json=workload.json_schema)
    params = [
        SamplingParams(
            structured_outputs=structured,
            temperature=workload.temperature,
            max_tokens=_draw_len(rng, workload, workload.output_len),
            ignore_eos=True,
            **UNTRUNCATED,
        )
        for _ in range(total)
    ]
    shared = source.draw(workload.shared_prefix_len)
    requests: list[LoadRequest] = []
    for num_turns, arrival_s in zip(turns, arrivals_s, strict=True):
        for turn in range(num_turns):
            place = len(requests)
            tokens = prompts[place] if turn else [*shared, *prompts[place]]
            due_s, follows = (thinking_s[place], place - 1) if turn else (arrival_s, None)
            requests.append(LoadRequest(tokens, params[place], due_s, follows))
    return Load(requests)


def _draw_times(workload: WorkloadConfig) -> tuple[list[int], list[float], list[float]]:
    """Turns and arrival of each conversation, and the pause before each turn; a stream of their own, so that lengths
    and tokens are the same for every rate.
    """
    rng = random.Random(f"times {workload.seed}")
    turns = [rng.randint(*workload.turns) for _ in range(workload.num_prompts)]
    arrivals_s, now_s = [], 0.0
    for _ in turns:
        arrivals_s.append(now_s)
        if workload.request_rate is not None:
            shape = workload.burstiness
            now_s += rng.gammavariate(shape, 1 / (workload.request_rate * shape))
    return turns, arrivals_s, [rng.uniform(*workload.think_s) for _ in range(sum(turns))]


def _draw_len(rng: random.Random, workload: WorkloadConfig, bounds: tuple[int, int]) -> int:
    low, high = bounds
    if workload.length_distribution == "uniform" or low == high:
        return rng.randint(low, high)
    middle, spread = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / 2
    return min(max(round(rng.lognormvariate(middle, spread / Z_90)), low), high)
