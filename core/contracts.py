"""The contracts between core and its plugins: five protocols and the plain values that cross them.

A plugin author reads this file and `core/hookspecs.py`, nothing else. Core owns requests, blocks and bytes; plugins
decide (Scheduler), compute (Model, Kernels) and draw (LogitsProcessor, Sampler). Importing this file imports no torch.
Legend: T tokens of a step, B requests of a step, N rows whose logits are wanted, D hidden, H heads, K kv heads,
E head dim, V vocabulary, C = (H + 2K) * E, M blocks in a table row, R rows of the request table, L tokens of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

    from core.batch import Batch
    from core.engine import Engine, StepStats
    from core.outputs import RequestOutput
    from core.parallel import Ranks
    from core.weights import WeightTarget

API_VERSION = 1
"""Version of everything in this file and in `core/hookspecs.py`; a plugin states the one it was written for."""


@dataclass(frozen=True)
class Needs:
    """What an entry requires of the machine, the model and the engine. An empty value means anything will do.

    Core compares needs with the facts once, before any weight is loaded, and says what does not fit.
    """

    devices: tuple[str, ...] = ()
    """Device types, e.g. ("cuda",)."""
    dtypes: tuple[str, ...] = ()
    """Names of torch dtypes, e.g. ("bfloat16", "float16")."""
    block_size_multiple: int = 1
    """engine.block_size must be a multiple of this."""
    preferred_block_size: int = 16
    """Kernels: engine.block_size where the user names none; small blocks share prefixes more finely."""
    head_dims: tuple[int, ...] = ()
    compute_capability: tuple[int, int] | None = None
    """Lowest CUDA compute capability, e.g. (8, 0)."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable; looked up without importing them."""
    graph_safe: bool = False
    """A capability: every operation may be captured in a CUDA graph (no host sync, no data-dependent shape)."""
    graph_prefill: bool = False
    """A capability of kernels that are graph_safe: so may steps with prompts, be there decodes in them or not, whose
    lengths then only the device knows (`core.batch.Batch` says what such a batch looks like). Without it, decode steps
    alone are captured."""
    shared_prefix: bool = False
    """A capability of kernels: `attend` makes use of Batch.shared_lens_B."""
    vocabulary_shards: bool = False
    """A capability of samplers: `sample_shard` works on one rank's part of the vocabulary."""


# ---------------------------------------------------------------------------------------------------------------- model


@dataclass
class ModelConfig:
    """Base of every model option's config dataclass: where the weights come from."""

    checkpoint: str = ""
    """A local folder, a hub id (owner/name), or package:MODULE/FOLDER for one shipped inside a Python package."""
    weights: str = "checkpoint"
    """"checkpoint", or "random": deterministic per seed and parameter name, nothing is read but the config."""
    tokenizer: str = ""
    """Where the tokenizer comes from, if not from the checkpoint; same forms."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Values laid over the checkpoint's config.json."""
    random_shape: dict[str, Any] = field(default_factory=dict)
    """The config.json to use with weights=random when no checkpoint folder is at hand."""
    chat: bool = False
    """Take a text as a user's message, by the tokenizer's chat template; false completes it as it is."""


@dataclass(frozen=True)
class ModelSpec:
    """The sizes core needs of a model, before any weight exists. Counts are of the whole model, not of one rank."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    """Longest sequence the model was made for, in tokens (after RoPE scaling)."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as the model wants it applied.

    table_PE: (P, E) float32, cos of the E/2 frequencies then sin of the same; row p is position p (half-split layout,
    as in Hugging Face's Llama family: the first half of a head pairs with the second).
    """

    table_PE: Tensor


@dataclass(frozen=True)
class QKNorm:
    """RMS norm of each query and key head before the rotation (Qwen3). Weights have shape (E,)."""

    q_weight_E: Tensor
    k_weight_E: Tensor
    eps: float


class CheckpointSource(Protocol):
    """A checkpoint that is no folder of safetensors: what a model class's `open_checkpoint` returns.

    Small enough to be pickled: another process opens its files itself. Nothing is read before it is asked for.
    """

    def config(self) -> dict[str, Any]:
        """The values of a config.json, `eos_token_id` among them."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, under the names that `weight_targets` uses."""
        ...

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in any floating dtype. Called once for each that is needed, one at a time."""
        ...

    def tokenizer(self) -> Any:
        """A transformers tokenizer; None if there is none."""
        ...


class OpensCheckpoint(Protocol):
    """What a model class has besides Model's methods if its weights may come from elsewhere than core can read."""

    @classmethod
    def open_checkpoint(cls, config: Any) -> CheckpointSource | None:
        """The checkpoint that the option's config names; None leaves it to core. With weights=random no tensor is read.

        Raises: CheckpointError with what was tried and the fix.
        """
        ...


class Attend(Protocol):
    """What core hands to a model's forward: rotate, write the KV cache and attend, for one layer.

    Core's own also has `rows_N`, which `core.rows.wanted_rows` reads: the tokens whose hidden states are wanted, (N,)
    int64 on the device, in any order, some perhaps twice; None, or no such attribute, means all.
    """

    def __call__(self, layer: int, qkv_TC: Tensor, rope: Rope | None, norm: QKNorm | None = None) -> Tensor:
        """Attend with this rank's heads over the paged cache.

        Shapes: qkv_TC (T, (H + 2K) * E), heads of q, then of k, then of v; returns (T, H * E).
        Device: no host sync. May overwrite qkv_TC.
        """
        ...


@dataclass(frozen=True)
class Runtime:
    """What a model is built with: where it lives and which operations it computes with."""

    device: device
    dtype: dtype
    ranks: Ranks
    kernels: Kernels


class Model(Protocol):
    """A network: `forward` gives hidden states, `logits` this rank's shard of the vocabulary.

    Constructed as `Model(hf_config, runtime)` on each rank; parameters are left uninitialised, core fills them through
    `weight_targets`. The plugin owns its HF config mapping and its weight names; a class that also has
    `OpensCheckpoint.open_checkpoint` may bring its own source of weights.
    """

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        """Allocate the parameters of this rank on runtime.device."""
        ...

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """Sizes read from a config.json.

        Raises: ConfigError for a feature this model does not implement: never ignore one silently.
        """
        ...

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Checkpoint tensor name -> where this rank puts it. Missing and surplus tensors are core's errors."""
        ...

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm.

        Shapes: token_ids_T (T,) int64, positions_T (T,) int64; returns hidden_TD (T, D), or (N, D) of the rows that
        `core.rows.wanted_rows(attend)` names: what follows the last layer's attention need be computed for those alone.
        Device: no host sync; graph-safe if the kernels are.
        """
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits of this rank's vocabulary shard: (N, D) -> (N, V / ranks)."""
        ...


# -------------------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes that a Kernels object is built for. Head counts are of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    device: device
    dtype: dtype

    @property
    def scale(self) -> float:
        """Softmax scale, 1 / sqrt(E)."""
        return float(self.head_dim**-0.5)


class Kernels(Protocol):
    """The numerical back end of one rank. Constructed as `Kernels(config, spec)`; holds no request state.

    The KV cache of a layer is `kv_2NSKE`: (2, blocks, block_size, K, E), keys then values. `core.batch.Batch` says
    which tokens, positions, cache slots and block tables a step has. Decode rows come first in a batch.

    A class may say `own_row_counts: Sequence[int]`: numbers of rows for which products are compiled by themselves. Each
    is computed once before the engine starts, so that no request waits for a compiler.
    """

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        """Keep the sizes; allocate scratch space if the kernels need any."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Root mean square norm: x / sqrt(mean(x²) + eps) * weight, computed in float32, returned in x's dtype."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). May overwrite both inputs."""
        ...

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product x @ W.T + b: (T, D) -> (T, O), as functional.linear; few rows may deserve a kernel of their own.

        The weight is a parameter: nothing writes it while steps run.
        """
        ...

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """silu_mul(x @ W.T): (T, D) -> (T, F) for W (2F, D), gate then up. Need not round the product in between."""
        ...

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """silu(first half) * second half along the last dimension: (T, 2F) -> (T, F)."""
        ...

    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        """Normalise each head (if norm), then rotate by position (if rope). May overwrite q and k."""
        ...

    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        """Store token t's key and value at flat slot slot_mapping_T[t] = block * block_size + offset."""
        ...

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """qk_norm_rope and write_kv in one go, as the engine calls it: returns q (T, H, E)."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Called once a step before the first layer; may put what `attend` needs into batch.scratch.

        A captured step captures this call too, so what depends on lengths is derived on the device at each replay.
        """
        ...

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        """Causal attention of ragged queries over the paged cache: prefill, decode and mixed.

        Query i of request b sits at position context_lens_B[b] - query_len_b + i and sees positions up to its own.
        Shapes: q_THE (T, H, E); returns (T, H, E). Head h reads kv head h // (H / K).
        Device: no host sync.
        """
        ...


class ExpertKernels(Protocol):
    """Operations that a Kernels class may offer besides, for models with experts; each one by itself.

    `core.expert_layers` computes plainly what is not there. Legend: F intermediate features of this rank, X experts,
    A experts of a token. Graph-safe if the entry is; no tensor's shape depends on the routing.
    """

    def route_experts(self, logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """The A = top_k experts that softmax(logits) favours, best first, and their probabilities.

        normalise: divide each token's probabilities by their sum.
        Shapes: logits_TX (T, X); returns expert_TA (T, A) int64 and weight_TA (T, A) float32.
        """
        ...

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """Sum over a token's experts of weight * (silu_mul(x @ gate_up.T) @ down.T): (T, D) -> (T, D).

        Shapes: expert_TA (T, A) integers, different ones in each row; weight_TA (T, A) float32; gate_up_XFD
        (X, 2F, D), gate then up; down_XDF (X, D, F). A token's result does not depend on the other tokens.
        Device: no host sync. Writes to none of its inputs.
        """
        ...


class FusedKernels(Protocol):
    """Operations that a Kernels class may offer besides, to save launches; each one by itself.

    Core calls the operations they are made of where they are not there.
    """

    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """add_rms_norm of `linear` and the residual: (rms_norm(x @ W.T + b + residual), x @ W.T + b + residual).

        Shapes: x_TD (T, D); both results (T, O). Need not round the product in between. May overwrite the residual.
        """
        ...

    def add_parts_rms_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor
    ) -> None:
        """add_rms_norm of the sum of P parts and the residual, which the sum with it is written over.

        Shapes: parts_PTD (P, T, D), each part contiguous, in the dtype of the others; residual_TD and out_TD (T, D),
        contiguous. out_TD receives the norm; it shares no memory with the others. The current stream need not be that
        of the rest of the step.
        """
        ...

    def qkv_attend(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """`qk_norm_rope_write`, then `attend` with the queries it returns: (T, C) -> (T, H, E)."""


class Exchange(Protocol):
    """Collectives of a few rows between GPUs that read each other's memory, by the kernels of a rank.

    A Kernels class offers them by a method `exchange(peers: core.peer_memory.PeerMemory) -> Exchange`. Core calls
    each on all ranks alike, in the same order. Device: no host sync, graph-safe. All ranks must get the same bits.
    """

    def fits(self, x_TD: Tensor) -> bool:
        """Whether sums of such a tensor are for this exchange; the others go through torch.distributed."""
        ...

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks. May overwrite both inputs."""
        ...

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """The token (int64) of the rank with the highest score (float32) for each row; of equal ones the lowest rank's.

        N is at most the rows that the exchange was made for.
        """
        ...


class FusedExchange(Protocol):
    """What an Exchange may offer besides, to save launches, trips and work that ranks need not all do."""

    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Kernels.add_rms_norm of the sum over ranks of `linear`; None, with nothing done, where it would not pay.

        Shapes: x_TD (T, D); both results (T, O). May overwrite the residual. Only rank 0 has the layer's bias, if there
        is one, and whether the answer is None must not depend on it: all ranks must give the same.
        """
        ...

    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        """Whether `add_rms_norm_own` is faster; the same for all sums of a forward of as many rows of a kind."""
        ...

    def add_rms_norm_own(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """add_rms_norm's first result, on every rank; row t of the second is written over the residual of rank t % R.

        x fits, and all three have one dtype and no gaps. What the residual's other rows hold says nothing, before and
        after. May overwrite x.
        """
        ...


# -------------------------------------------------------------------------------------------------------------- sampler


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the N rows of a step, on the device, plus what the host knows without asking it.

    Shapes: temperature_N float32 (0 means greedy), seed_N int64, position_N int64 (of the token being drawn).
    """

    temperature_N: Tensor
    seed_N: Tensor
    position_N: Tensor
    all_greedy: bool = False


class Sampler(Protocol):
    """Draws one token per row. Constructed as `Sampler(config)`. Stateless: the same inputs give the same tokens.

    It may have an attribute `score`, a function that does what `core.drawing.scored` does, faster: core calls it with
    logits on a GPU, inside of graphs too if the entry is graph_safe.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        """Draw one token per row from the whole vocabulary.

        Shapes: logits_NV (N, V) float32 or bfloat16; returns tokens_N (N,) int64. Writes to none of its inputs.
        Device: no host sync.
        """
        ...

    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        """The best (score, token) of one rank's shard, whose first column is token id `first_token`.

        Shapes: returns scores_N float32 and tokens_N int64 (global ids). The largest score over all ranks wins.
        Called only if the entry's needs state `vocabulary_shards`.
        """
        ...


@dataclass(frozen=True)
class ProcessorSpec:
    """The sizes a logits processor is built for.

    num_rows: rows of the request table, the padding row included: whatever a processor keeps per request it keeps in
    tensors of that many rows. max_model_len: longest request, in tokens of prompt and output.
    """

    num_rows: int
    vocab_size: int
    max_model_len: int
    device: device


@dataclass
class FromSamplingParams:
    """Base of the arguments of a processor whose fields are SamplingParams' own, of the same names.

    Other processors get theirs through `SamplingParams.extra_args[name]`.
    """


@dataclass(frozen=True)
class RequestFacts:
    """What `encode` and `num_draws` may know of a request beside their own arguments."""

    num_prompt_tokens: int
    temperature: float
    """0 means greedy."""
    stop_ids: frozenset[int]
    """End-of-sequence and stop tokens that end it."""
    vocab_size: int


@dataclass(frozen=True)
class LogitsRows:
    """The N rows of one call of `process`: which requests they are and what those asked for. All on the device.

    rows_N: int64, rows of the request table, as in `load`; padding names the last row. columns: each int, float or bool
    field of the arguments, (N,) int64 or float32 (bool as int64); a row whose request does not use the processor holds
    the fields' defaults. sampling: temperature, seed and position (the number of tokens before the draw) of each row.
    tokens_RL, num_prompt_tokens_N: only for processors that set `reads_tokens`, and only right for rows that use one:
    row r of tokens_RL (R, L) int32 holds the request's tokens, the prompt first; those before position_N are there,
    what lies beyond is of other times. max_num_tokens: a number no position exceeds.
    """

    rows_N: Tensor
    columns: Mapping[str, Tensor]
    sampling: SamplingBatch
    tokens_RL: Tensor | None
    num_prompt_tokens_N: Tensor | None
    max_num_tokens: int


class LogitsProcessor(Protocol):
    """Changes logits in front of the sampler, for the requests that ask for it. Constructed as `Processor(spec)`.

    It is registered with a dataclass, `config=`, whose fields are a request's arguments and whose defaults mean "leave
    the logits alone". Processors run in descending priority, ties in order of registration, on every rank alike and
    over the whole vocabulary. A step runs only those that one of its requests uses.

    Beside `process`, a class may have (core asks with getattr; what is missing does nothing):

    reads_tokens = True
        Rows come with their tokens.
    num_draws(arguments, request: RequestFacts) -> int | None      (a classmethod or staticmethod, on the host)
        How many of the request's first draws it changes: 0 for none, None for all. Without it: all, unless the
        arguments equal their defaults.
    encode(arguments, request: RequestFacts) -> Sequence[int]      (the same)
        Further int64 values for `load`: what columns cannot hold, such as lists. Raises RequestError for arguments
        that the request cannot have. A dataclass with a field that is no int, float or bool must have it.
    load(row: int, values_X: Tensor) -> None
        Keep those values, on the device, for the request that now owns a row; empty for one that does not use the
        processor and follows one that did. Called outside of graphs, before the first draw.
    """

    def __init__(self, spec: ProcessorSpec) -> None:
        """Allocate what is kept per row, and nothing later: a captured graph would not see it."""
        ...

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """The logits of N draws, changed: in place or in a new tensor of the same form.

        Shapes: logits_NV (N, V) float32 over the whole vocabulary, not yet divided by the temperature. -inf forbids a
        token. A row's result depends on that row alone; rows whose columns hold the defaults stay as they are.
        Device: no host sync. With Needs(graph_safe=True) it is captured in the decode step's graph.
        """
        ...


# ------------------------------------------------------------------------------------------------------------- observer


class Observer(Protocol):
    """Watches one engine. Constructed as `Observer(config)`, before anything is loaded, if the configuration names it.

    Any of these methods may be missing; when they are called and what an exception does is said with the hooks of the
    same names in `core.hookspecs`. Callers find the object again as `LLM.observers[name]`.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def on_engine_start(self, engine: Engine) -> None:
        """See the hook."""
        ...

    def on_step_end(self, stats: StepStats) -> None:
        """See the hook."""
        ...

    def on_request_end(self, output: RequestOutput) -> None:
        """See the hook."""
        ...

    def on_engine_stop(self, engine: Engine) -> None:
        """See the hook."""
        ...


# ------------------------------------------------------------------------------------------------------------ scheduler


class RequestView(Protocol):
    """A request as a scheduler sees it: read-only and live. Counts are tokens."""

    @property
    def id(self) -> int:
        """Unique in the engine."""
        ...

    @property
    def arrival_s(self) -> float:
        """Arrival on the engine's monotonic clock, in seconds."""
        ...

    @property
    def priority(self) -> int:
        """Lower is more urgent; 0 unless the caller set it."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens this request may generate."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache; 0 while waiting."""
        ...

    @property
    def is_prefilling(self) -> bool:
        """True for a running request that must compute more known tokens before it can decode."""
        ...


@dataclass(frozen=True)
class Limits:
    """The bounds every plan must keep."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int


class BlockBudget(Protocol):
    """A ledger of KV-cache blocks for one plan. Counting against it changes nothing but the ledger."""

    @property
    def num_free(self) -> int:
        """Blocks that this plan can still hand out."""
        ...

    def num_cached_tokens(self, request: RequestView) -> int:
        """Leading tokens a waiting request finds in the prefix cache: computed already, or by this very plan."""
        ...

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Tokens still to be computed before the request can generate: free of what the cache holds."""
        ...

    def cost(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that computing `num_tokens` more tokens of the request takes."""
        ...

    def take(self, request: RequestView, num_tokens: int) -> bool:
        """Reserve that cost; False, and nothing reserved, if it exceeds `num_free`."""
        ...

    def take_decodes(self) -> bool:
        """`take` one more token for every running request that can decode; False, and nothing reserved, if not all fit.

        As good as `take` for each of them and much faster; for plans that preempt none of them.
        """
        ...

    def give_back(self, request: RequestView) -> None:
        """Note that the plan preempts this request: what only it holds becomes free."""
        ...


@dataclass(frozen=True)
class SchedulerView:
    """Everything a scheduler may look at.

    waiting: in queue order, preempted requests at the head. running: in order of admission, oldest first; those that
    are prefilling go on through Plan.prefill, the others decode one token a step. prefilling: just those, in the same
    order; a policy that looks there, at `len(running)` and at `budget.take_decodes` need not go through the running
    ones at all. num_steps_without_decode: steps in a row, the last one included, in which nobody decoded although
    somebody could; a policy that puts prompts first bounds it, or arrivals that never end starve the running requests.
    """

    waiting: Sequence[RequestView]
    running: Sequence[RequestView]
    prefilling: Sequence[RequestView]
    limits: Limits
    budget: BlockBudget
    now_s: float
    num_steps_without_decode: int = 0


class Everyone(Enum):
    """Stands for every running request that can decode."""

    ALL = "all"


ALL = Everyone.ALL


@dataclass(frozen=True)
class Plan:
    """What the next step computes. Ids are `RequestView.id`.

    prefill: (id, number of tokens to compute), for waiting requests (admits them) and running ones that are
    prefilling; cached tokens are not counted. decode: ALL, or the ids of requests that are not prefilling. preempt:
    running requests to send back to the head of the queue; they recompute later. idle_s: with nothing else in the plan,
    wait this long (at most a second) before asking again.
    """

    prefill: Sequence[tuple[int, int]] = ()
    decode: Sequence[int] | Everyone = ()
    preempt: Sequence[int] = ()
    idle_s: float = 0.0


class Scheduler(Protocol):
    """A policy: which requests compute how many tokens next. Constructed as `Scheduler(config)`.

    Pure decisions over a read-only view. Core checks every plan (known ids, limits, budget, progress), raises PlanError
    naming the policy if it breaks a rule, and owns blocks, aborts and overlap.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def plan(self, view: SchedulerView) -> Plan:
        """Decide the next step. Called once a step while any request is waiting or running."""
        ...
