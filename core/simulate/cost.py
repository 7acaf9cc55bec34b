"""The cost of a step: seconds of the device and of the host, from what the step computes.

Coefficients are fitted to measured steps by `core.simulate.fit`, or given. docs/simulation.md explains the file.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hookline.core.bench.step_counts import StepCounts
from hookline.core.contracts import Joining
from hookline.core.errors import ConfigError, shown
from hookline.core.sampling_params import as_float
from hookline.core.step.captured import (
    MOST_MIXED,
    PromptShape,
    graph_sizes,
    holding_shape,
    joining,
    prompt_shapes,
    token_sizes,
)
from hookline.core.util.files import read_bounded
from hookline.core.util.json_lines import json_fault

FORMAT = 1
DECODE, CAPTURED, PREFILL, MIXED = "decode", "captured_prefill", "prefill", "mixed"
KINDS_OF_STEPS = (DECODE, CAPTURED, PREFILL, MIXED)


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens: straight lines between points, and the last line goes on.

    tokens: ascending. Below the first point it costs as much as there.
    Raises: ConfigError for another number of seconds than tokens, negative seconds, or tokens out of order.
    """

    tokens: Sequence[float]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        numbers = [*self.tokens, *self.seconds]
        is_sound = len(self.tokens) == len(self.seconds) > 0 and all(map(_is_cost, numbers))
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        if not is_sound or any(one >= other for one, other in pairs):
            raise ConfigError(
                f"tokens={shown(list(self.tokens))}, seconds={shown(list(self.seconds))} is no curve: give as many "
                "seconds as tokens, none negative, and tokens in ascending order"
            )

    def at(self, tokens: float) -> float:
        """Seconds that this many tokens take."""
        last = len(self.tokens) - 1
        if last == 0 or tokens <= self.tokens[0]:
            return self.seconds[0]
        right = min(bisect_right(self.tokens, tokens), last)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.tokens[right] - self.tokens[left])
        return self.seconds[left] + slope * (tokens - self.tokens[left])


@dataclass(frozen=True)
class HostCost:
    """Seconds of the host for a step: plan, dispatch and commit before the device can begin, and then the launch."""

    step_s: float = 0.0
    decode_row_s: float = 0.0
    prefill_chunk_s: float = 0.0
    prefill_token_s: float = 0.0
    launch_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the launch by kind of step; missing kinds cost nothing."""

    def before_s(self, counts: StepCounts) -> float:
        """Seconds before the launch."""
        return (
            self.step_s
            + self.decode_row_s * counts.decode_rows
            + self.prefill_chunk_s * counts.prefill_chunks
            + self.prefill_token_s * counts.prefill_tokens
        )


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step. The curves are the part by the number of tokens; attention is added.

    decode is over rows, prompt over the tokens of steps that compute prompts; both with the padding of captured steps.
    captures: whether decodes are captured, and with captures_prompts small steps with prompts. Others take the device
    at least as long as the host launches them.
    origin: the measured machine and configuration, and the errors of the fit; empty for given coefficients.
    Raises: ConfigError naming the coefficient that is not a finite number of at least 0.
    """

    decode: Curve
    prompt: Curve
    prefill_pair_s: float = 0.0
    """Seconds for each pair of a query and a key of a prompt chunk."""
    context_token_s: float = 0.0
    """Seconds for each token that a decode reads by itself."""
    shared_token_s: float = 0.0
    """Seconds for each token that a decode reads together with others."""
    gap_s: float = 0.0
    """Seconds that the device waits between two steps even if the host is ahead."""
    captures: bool = False
    captures_prompts: bool = True
    captured_prompt_tokens: int = MOST_MIXED
    """Tokens of the largest captured step of prompts."""
    captured_joined_decodes: int = 0
    """Most decodes in a captured step of prompts; see engine.joined_decodes."""
    host: HostCost = field(default_factory=HostCost)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.host.launch_s, Mapping):
            raise ConfigError(f"cost.host.launch_s={shown(self.host.launch_s)} is not a mapping of kinds to seconds")
        host = {f"host.{name}": value for name, value in vars(self.host).items() if name != "launch_s"}
        launches = {f"host.launch_s.{kind}": value for kind, value in self.host.launch_s.items()}
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name.endswith("_s")}
        for name, value in {**own, **host, **launches}.items():
            if not _is_cost(value):
                raise ConfigError(f"cost.{name}={shown(value)} must be a finite number of seconds, at least 0")
        for kind in self.host.launch_s:
            if kind not in KINDS_OF_STEPS:
                known = ", ".join(KINDS_OF_STEPS)
                raise ConfigError(f"cost.host.launch_s.{kind} names no kind of step; there are {known}")

    @property
    def captured(self) -> dict[str, Any]:
        """The arguments of StepShapes.of from this model."""
        names = "captures", "captures_prompts", "captured_prompt_tokens", "captured_joined_decodes"
        return {name: getattr(self, name) for name in names}

    def device_s(self, counts: StepCounts, shape: StepShape) -> float:
        """Seconds that the device computes if it need not wait for the host."""
        curve = self.decode if shape.kind == DECODE else self.prompt
        own_tokens = counts.decode_context_tokens - counts.decode_shared_tokens
        return (
            curve.at(shape.num_tokens)
            + self.prefill_pair_s * counts.prefill_pairs
            + self.context_token_s * own_tokens
            + self.shared_token_s * counts.decode_shared_tokens
        )

    def launch_s(self, shape: StepShape) -> float:
        """Seconds of the host to launch the step."""
        return self.host.launch_s.get(shape.kind, 0.0)


@dataclass(frozen=True)
class StepShape:
    """The shape of a step for the device: its kind, its tokens with padding, and whether it is captured."""

    kind: str
    num_tokens: int
    is_captured: bool = False


class StepShapes:
    """The shapes of steps. sizes, prompts: of captured decodes and steps with prompts; empty if nothing is captured."""

    def __init__(self, sizes: Sequence[int] = (), prompts: Sequence[PromptShape] = ()) -> None:
        self._sizes, self._prompts = sizes, prompts

    @classmethod
    def of(
        cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, *, captures: bool,
        captures_prompts: bool = True, captured_prompt_tokens: int = MOST_MIXED, captured_joined_decodes: int = 0,
    ) -> StepShapes:  # fmt: skip
        """The shapes for an engine with these limits; the other arguments are as in CostModel."""
        if not captures:
            return cls()
        limits = max_num_seqs, max_num_batched_tokens, max_model_len
        most = captured_prompt_tokens, captured_joined_decodes
        drafts = [size for size in token_sizes(max_num_seqs, max_num_batched_tokens) if size > max_num_seqs]
        sizes = [*graph_sizes(max_num_seqs), *drafts]  # further tokens of decodes are drafts
        return cls(sizes, prompt_shapes(*limits, *most) if captures_prompts else [])

    @property
    def joining(self) -> Joining:
        """The sizes of prompt steps that decodes may join."""
        return joining(self._prompts)

    def shape(self, counts: StepCounts) -> StepShape:
        """The shape of a step."""
        rows, tokens, sizes = counts.decode_rows, counts.prefill_tokens, self._sizes
        if not tokens:
            return (
                StepShape(DECODE, sizes[bisect_left(sizes, rows)], is_captured=True)
                if sizes
                else StepShape(DECODE, rows)
            )
        if captured := holding_shape(self._prompts, rows, tokens, counts.prefill_chunks):
            return StepShape(CAPTURED, captured.num_tokens, is_captured=True)
        return StepShape(MIXED, rows + tokens) if rows else StepShape(PREFILL, tokens)


def _is_cost(value: object) -> bool:
    return 0 <= as_float(value) < math.inf


def cost_of(values: Mapping[str, Any], where: str) -> CostModel:
    """The model that a mapping describes, as docs/simulation.md says.

    Raises: ConfigError naming `where` and what is wrong with it.
    """
    given = dict(values)
    if given.pop("format", FORMAT) != FORMAT:
        raise ConfigError(f"{where}: format={shown(values['format'])} is not {FORMAT}; fit the model again")
    try:
        curves = {name: _curve(name, given.pop(name, None)) for name in ("decode", "prompt")}
        return CostModel(**curves, host=HostCost(**given.pop("host", {})), **given)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        text = " ".join(re.sub(r"\w+\.__init__\(\) ", "", str(error)).split())
        raise ConfigError(f"{where} is no cost model: {text}; docs/simulation.md shows one") from None


def _curve(name: str, values: object) -> Curve:
    if not isinstance(values, Mapping) or not {"tokens", "seconds"}.issubset(values):
        raise ConfigError(f"{name} needs tokens and seconds")
    return Curve(**values)


def read_cost(path: Path) -> CostModel:
    """The model in a .json file.

    Raises: ConfigError naming the file.
    """
    try:
        values = json.loads(read_bounded(path, "cost").decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cost={path} cannot be read: {json_fault(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"cost={path} holds no JSON object")
    return cost_of(values, f"cost={path}")


def write_cost(cost: CostModel, path: Path) -> None:
    """Write a model where `read_cost` finds it.

    Raises: ConfigError if the file cannot be written.
    """
    text = json.dumps({"format": FORMAT, **_short(asdict(cost))}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"save={path} cannot be written: {error.strerror or error}") from None


def _short(value: Any) -> Any:
    """Numbers with six significant digits."""
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
