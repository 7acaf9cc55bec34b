"""The contract of drafters, which guess the next tokens of running requests; one step then checks all guesses at once.

Legend: L tokens of a request, T of them that a step computed, N rows, D hidden of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.draft_head import Shapes
from hookline.core.contracts.kernels import AttentionSpec, Kernels
from hookline.core.contracts.model import ModelSpec, Runtime
from hookline.core.contracts.optional import optional
from hookline.core.contracts.sampler import SamplingBatch
from hookline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hookline.core.contracts.weights import WeightTarget


@dataclass(frozen=True)
class DrafterSpec:
    """The sizes and the model that a drafter is built for.

    vocab_size: every draft must be below it. max_num_seqs: most requests that run at a time. max_model_len: longest
    request, in tokens. device, dtype: the model's, as the configuration writes them, e.g. "cuda" and "bfloat16".
    target: the model itself; None outside of an engine.
    """

    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    device: str = "cpu"
    dtype: str = "float32"
    target: DraftTarget | None = None


@dataclass(frozen=True)
class DraftRow:
    """A request for which the engine asks for drafts.

    id: of the request, unique in the engine. tokens: (L,) int32, its prompt and all tokens drawn so far; read-only, and
    valid during the call alone. num_prompt_tokens: how many of them are the prompt. num_drafts: most drafts that the
    step has room for, at least 1. params, seed: the request's; a draft model that samples with them uses the same noise
    as the model at each position.
    """

    id: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    num_prompt_tokens: int
    num_drafts: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


class DraftTarget(Protocol):
    """The model that drafts are for, as drafters see it.

    spec, hf_config, model_class: of the model. checkpoint: the reference of its checkpoint. is_random: whether its
    weights are drawn at random; the weights of its head are then random too.
    """

    spec: ModelSpec
    hf_config: Mapping[str, Any]
    model_class: type
    checkpoint: str
    is_random: bool

    def config_of(self, checkpoint: str) -> Mapping[str, Any]:
        """The config.json of another checkpoint, a folder or a hub id. Raises: CheckpointError."""
        ...

    def shapes(self, checkpoint: str = "") -> Shapes:
        """The tensors of the model's checkpoint, or of another one; empty if weights are random.

        Raises: CheckpointError.
        """
        ...

    @property
    def runtime(self) -> Runtime:
        """The Runtime to build a head with, on one rank in the engine's process: the model's device, dtype and kernels,
        and the quantization of its checkpoint.
        """
        ...

    def fill(self, targets: Mapping[str, WeightTarget], checkpoint: str = "") -> None:
        """Fill these targets from the model's checkpoint, or from another one, whose weights must not be quantised.

        If the model's weights are random, so are these.
        Raises: CheckpointError for tensors that are missing or have another shape.
        """
        ...

    def attention(self, spec: ModelSpec, num_rows: int, num_ahead: int) -> HeadAttention:
        """Kernels for the attention of a head with these sizes, and a cache for it, allocated now.

        num_rows: most requests in a batch with one entry each. num_ahead: most entries of a request beyond its tokens.
        Raises: PluginError if the kernels do not compute such attention, CapacityError if its cache does not fit.
        """
        ...

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        """Sample tokens as the model's are sampled: with the same noise for the same seed and position.

        Shapes: logits_NV (N, V); returns (N,) int64, NO_TOKEN where logits hold NaN.
        Device: no host sync; may be captured by `capture`.
        """
        ...

    @property
    def captures(self) -> bool:
        """Whether `capture` may be called: on a GPU, unless the configuration has no CUDA graphs."""
        ...

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record the launches of `step` as a CUDA graph; returns a call that replays it, and the tensor that it writes.

        step: called twice. All graphs share their memory, so a tensor is valid until another graph is replayed. To be
        called while the drafter is constructed.
        """
        ...


@dataclass(frozen=True)
class HeadAttention:
    """The kernels and the KV cache of a drafting head's attention.

    spec: the head's sizes; its max_model_len includes the entries that are drafted ahead. kernels: made for them.
    kv_2NSKE: the cache in the layout of Kernels; its last block is scratch memory that padding rows write to.
    """

    spec: AttentionSpec
    kernels: Kernels
    kv_2NSKE: Tensor


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """The T tokens of one request that a step computed, without wrong drafts.

    id, tokens: as in DraftRow; at least one of the tokens follows the computed ones. start: position of the first
    computed token. states: for each layer of `Drafter.reads_layers`, the residual stream after it, (S, D) float32, of
    all S tokens of the step, which its rows share: torch tensors on the model's device if rank 0 computes in the
    engine's process, else numpy arrays. first, count: the row's T tokens among the S; count None: all from first on.
    The drafter may keep the states, and must not write to them.
    """

    id: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    start: int
    states: Mapping[int, Any]
    first: int = 0
    count: int | None = None

    @property
    def num_computed(self) -> int:
        """T."""
        return len(next(iter(self.states.values()))) - self.first if self.count is None else self.count

    @property
    def streams(self) -> Mapping[int, np.ndarray[Any, np.dtype[np.float32]]]:
        """The row's part of `states` on the host, (T, D) for each layer; for states on a GPU, the host waits for it."""
        end = self.first + self.num_computed
        own = {layer: one[self.first : end] for layer, one in self.states.items()}
        return {layer: one.cpu().numpy() if hasattr(one, "cpu") else one for layer, one in own.items()}


@dataclass
class DraftCounts:
    """Counts of an engine's drafts. drafted, kept: drafts computed and drafts kept, by their place behind the newest
    token, the first place first. no_drafts: decodes without drafts, by the reason.
    """

    drafted: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    no_drafts: dict[str, int] = field(default_factory=dict)
    pretended_length: float | None = None
    """The drafter's pretended_length; if it is set, `kept` does not measure how good the drafts are."""

    def add(self, num_drafts: int, num_kept: int, num_rows: int = 1) -> None:
        """Count the drafts of a step's row, or of num_rows rows with the same numbers."""
        missing = num_drafts - len(self.drafted)
        self.drafted += [0] * missing
        self.kept += [0] * missing
        for place in range(num_drafts):
            self.drafted[place] += num_rows
            self.kept[place] += num_rows * (place < num_kept)

    def skip(self, reason: str, count: int = 1) -> None:
        """Count decodes without drafts."""
        self.no_drafts[reason] = self.no_drafts.get(reason, 0) + count

    @property
    def num_drafted(self) -> int:
        """Drafts that were computed."""
        return sum(self.drafted)

    @property
    def num_kept(self) -> int:
        """Tokens that requests got beyond one for each step: right drafts, up to the end of the request."""
        return sum(self.kept)


class Drafter(Protocol):
    """Proposes drafts on the host, between steps. For classes to extend; one object per engine.

    Constructed as `Drafter(config, spec)`, config being the dataclass that it was registered with. Drafts do not change
    a request's tokens: a draft is kept only if the model samples the same token at its position (but see
    pretended_length). So a drafter can make requests slower, but not wrong. If it raises, or proposes a number that is
    no token id, the request goes on without drafts, and the log names the drafter once.
    """

    k: int
    """Most drafts for a request in a step; the engine asks for no more. At least 1."""

    adaptive: bool = True
    """Whether the engine asks less often for drafts of a request whose drafts were all wrong: in one of two steps, then
    of four, up to one of 64, until a draft is right again; and in up to one of 8 once 16 steps had no proposal. Wrong
    drafts, and texts that do not repeat, cost little then. On a GPU the engine also limits the number of drafts to the
    one with the most tokens a second, by the times of steps and the rate of right drafts."""

    by_tokens: bool = False
    """Whether proposals depend on the row's tokens alone, and a longer one begins with a shorter one. The engine then
    asks for one draft more, and, while the device computes a step, for what follows if all of these are right."""

    pretended_length: float | None = None
    """Only for benchmarks: the mean number of tokens that a request keeps of a step with k drafts, from 1 to 1 + k,
    whether its drafts are right or not. Answers are then not the model's, and the log and benchmarks say so. None: a
    draft is kept if it is right."""

    def __init__(self, config: Any, spec: DrafterSpec) -> None:
        """Allocate the drafter's memory. Raises: ConfigError for a field that does not fit, naming it and the fix."""
        ...

    def propose(self, row: DraftRow) -> Sequence[int]:
        """Guess the request's next tokens, at most row.num_drafts; empty if the drafter has no good guess."""
        ...

    @classmethod
    @optional
    def reads_layers(cls, config: Any, spec: ModelSpec, config_of: Callable[[str], Mapping[str, Any]]) -> Sequence[int]:
        """The layers of the model whose residual stream `observe` gets; asked on every rank, before weights are loaded.

        If there are any, each step keeps the streams of its tokens, and steps with prompts are no CUDA graphs.

        config: as the constructor's. config_of: as DraftTarget's.
        Raises: ConfigError or CheckpointError if the drafter does not fit the model.
        """
        return ()

    @optional
    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """A step that computed tokens of these requests was committed; called after each step, before `propose`.

        Not called while too many requests run for drafts in a step.

        The first row of a request that began with a cached prefix, or was preempted, may start behind position 0, and
        may repeat positions of earlier rows, with the same tokens.
        """
        return

    @optional
    def propose_all(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """`propose` for all requests of a step at once, in their order; called in place of it if it is there."""
        return [self.propose(row) for row in rows]

    @optional
    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Tensor:
        """`propose` for many requests at once, on the model's device: asked for where one GPU computes steps as graphs.

        Such a step begins with its drafts, and is launched before the tokens of the step before it are known on the
        host. Steps with prompts, and with requests that ask for more than plain samples, have drafts by `propose` or
        `propose_all`; so have all steps of a drafter with `reads_layers`.
        Shapes: tokens_RL int32, the tokens of all requests, a row each; rows_B (B,) int64, the rows to draft for; one
        may be named several times. lengths_B (B,) int32: how many tokens each row has. Returns (B, num_drafts) int64,
        -1 from the first place on that has no draft.
        Device: no host sync. Writes to none of its inputs. Called while the engine starts, to make kernels ready.
        """
        return rows_B.new_full((len(rows_B), num_drafts), -1)

    @optional
    def forget(self, id: int) -> None:
        """Drop the state of a request that has ended."""
        return

    @optional
    def close(self) -> None:
        """Release the drafter's memory; called when the engine is closed."""
        return
