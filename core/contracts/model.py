"""The contract of models, and the objects that core passes to them.

Legend: T tokens of a step, N rows whose logits are wanted, D hidden, H heads, K kv heads, E head dim, V vocabulary,
C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hookline.core.contracts.cache import FullAttention, LayerCache, SlidingWindow, StateRows
from hookline.core.contracts.kernels import PLAIN_ATTENTION, AttentionForm

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

    from hookline.core.contracts.kernels import Kernels, QKNorm, Rope
    from hookline.core.contracts.ranks import Ranks
    from hookline.core.contracts.weights import ExpertWeights, Weight, WeightTarget

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate in a gated feed-forward; gelu_tanh is GELU in its tanh form."""


@dataclass
class ModelConfig:
    """Base of the config dataclass of every model option: where the weights come from."""

    checkpoint: str = ""
    """A local folder, a hub id (owner/name), or package:MODULE/FOLDER for one shipped inside a Python package."""
    weights: str = "checkpoint"
    """"checkpoint", or "random": drawn from the seed and each parameter's name; only the config is read."""
    tokenizer: str = ""
    """Where the tokenizer comes from, if not from the checkpoint; same forms."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Values laid over the checkpoint's config.json."""
    random_shape: dict[str, Any] = field(default_factory=dict)
    """The config.json to use with weights=random when no checkpoint folder is at hand."""
    chat: bool = False
    """Whether a prompt given as text is a user's message, which the tokenizer's chat template renders. If false, the
    model continues the text as it is."""


@dataclass(frozen=True)
class ModelSpec:
    """The sizes core needs of a model, before any weight exists. Counts are of the whole model, not of one rank.

    num_layers: all layers, also those without a cache. num_heads, num_kv_heads: heads of queries, and of keys and
    values, in each layer with attention; num_kv_heads divides num_heads, and tp must split both even if no layer has
    attention. head_dim: E, which need not be hidden_size / num_heads. hidden_size: D. vocab_size: V, without the
    padding of `ParallelHead`.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    """Longest sequence the model was made for, in tokens (after RoPE scaling)."""
    layers: tuple[LayerCache, ...] = ()
    """The cache of each layer, in order; empty means FullAttention in every layer."""
    attention: frozenset[str] = frozenset()
    """Which of ATTENTION_FEATURES the layers need of the kernels, except "window" and "latent", which follow from
    `layers` and `value_dim`."""
    value_dim: int | None = None
    """None: keys and values of head_dim numbers are cached. F: a value is the last F numbers of its key, and keys alone
    are cached, as in the absorbed form of multi-head latent attention; see Attend."""

    @property
    def cache_layers(self) -> tuple[LayerCache, ...]:
        """The cache of each of the num_layers layers."""
        return self.layers or (FullAttention(),) * self.num_layers

    @property
    def attention_features(self) -> frozenset[str]:
        """Which of ATTENTION_FEATURES the kernels must compute."""
        has_windows = any(isinstance(layer, SlidingWindow) for layer in self.layers)
        others = {"window": has_windows, "latent": self.value_dim is not None}
        return self.attention | {name for name, is_asked in others.items() if is_asked}


class Attend(Protocol):
    """The attention of a step, which core passes to a model's forward: rotate, write the KV cache, attend, for a layer.

    The object that core passes also has the attribute `rows_N`, which `wanted_rows` reads: the indices of the tokens
    whose hidden states forward must return, (N,) int64 on the device, in any order, possibly with repeats; all tokens
    if it is None or the attribute is missing.
    """

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """Attend with this rank's heads over the paged cache, within the window that ModelSpec.layers states.

        Call it once for each layer with keys and values of its own, and for each layer with a SharedCache.
        rope: None leaves queries and keys as they are. form: the model's scale, softcap or sinks.
        Shapes: qkv_TC (T, (H + 2K) * E), heads of q, then of k, then of v; for a layer with a SharedCache (T, H * E),
        heads of q alone. Returns (T, H * E). With ModelSpec.value_dim F there are no heads of v, and it returns
        (T, H * F).
        Device: no host sync. May overwrite qkv_TC.
        """
        ...

    def states(self, layer: int) -> StateRows:
        """The state of a layer that has a RecurrentState, to be read and written in place.

        Device: no host sync.
        """
        ...


@dataclass(frozen=True)
class Stage:
    """The part of a model that a rank holds when its layers are cut into stages: `size` of them, this one is `index`.

    It has the layers first_layer to end_layer - 1; end_layer None means up to the last layer.
    """

    index: int = 0
    size: int = 1
    first_layer: int = 0
    end_layer: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the final norm and the head."""
        return self.index == self.size - 1

    def layers(self, num_layers: int) -> range:
        """Indices of its layers, in a model of `num_layers` layers."""
        return range(self.first_layer, num_layers if self.end_layer is None else self.end_layer)


WHOLE_MODEL = Stage()
"""The only stage of a model that is not cut."""


@dataclass(frozen=True)
class Runtime:
    """The device, dtype, ranks and kernels that a model is built with.

    device, dtype: of parameters and activations. ranks: this rank's place in the group, and the group's collectives.
    kernels: the kernels that the user chose, built for this rank's heads.
    stage: the layers that this rank holds; only a model with `runs_in_stages` gets another stage than WHOLE_MODEL.
    """

    device: device
    dtype: dtype
    ranks: Ranks
    kernels: Kernels
    config: Any = None
    """The option's config dataclass, with the user's values; None where a model is built without one."""
    batch_invariant: bool = False
    """Whether a row's results must have the same bits in every batch. The model must then compute its matrix products
    by `kernels`, or one row at a time."""
    stage: Stage = WHOLE_MODEL
    weights: WeightFactory | None = None
    """Makes the matrices of layers, experts and heads; None: tensors of `dtype`, multiplied by `kernels`."""
    max_model_len: int = 0
    """Tokens of the longest sequence that is served; 0 where a model is built without an engine."""


class WeightFactory(Protocol):
    """Makes the weights of a rank's layers, plain or quantised. Knows no model: layers name their tensors later."""

    def matrix(self, runtime: Runtime, num_rows: int, num_columns: int) -> Weight:
        """The weight (num_rows, num_columns) of a linear."""
        ...

    def head(self, runtime: Runtime, num_rows: int, num_columns: int) -> Weight:
        """The weight of an output head that is not tied to the embedding. Rows behind the last piece are padding; their
        products have no meaning.
        """
        ...

    def experts(
        self, runtime: Runtime, num_experts: int, hidden: int, inner: int, activation: Activation = "silu"
    ) -> ExpertWeights:
        """The weights of experts with D = hidden and F = inner features on this rank."""
        ...

    def rename(self, tensor_name: Callable[[str], str | None]) -> None:
        """Translate the checkpoint's names of linears to the model's. tensor_name: the method of `RenamesTensors`.

        When: before the first weight is made.
        """
        ...


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

        Shapes: token_ids_T (T,) int64, positions_T (T,) int64; returns hidden_TD (T, D), or (N, D) for the rows that
        `wanted_rows(attend)` names: the model may compute those rows alone after the last layer's attention.
        Device: no host sync; graph-safe if the kernels are.
        """
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits of this rank's vocabulary shard: (N, D) -> (N, V / ranks)."""
        ...


class RunsInStages(Protocol):
    """A model class that can be cut into stages of consecutive layers (pp > 1). It has this attribute besides Model's.

    It builds the layers of `runtime.stage` alone; forward begins with the result of `hookline.core.layers.stage_input`
    and returns the residual stream unless its stage is the last. `hookline.core.layers.StageLayers` and `FinalNorm` do
    both.
    """

    runs_in_stages: bool
    """True if it can. With pp > 1, a model without this attribute is refused with an error that names it."""


class NormsStreams(Protocol):
    """A model without an attribute that is a `hookline.core.layers.FinalNorm`: it gives its last norm as a method.

    ExtensionSpec.logits_of needs one or the other to compute logits from any layer's residual stream.
    """

    def final_norm(self, stream_XD: Tensor) -> Tensor:
        """The last norm of rows of the residual stream: (X, D) -> (X, D); called on the last stage alone.

        Device: no host sync.
        """
        ...
