"""Drafts by an EAGLE-3 head, as published: a layer that reads the model's hidden states after three of its layers.

Its config.json and tensors have the form of EAGLE-3's authors (`midlayer.*`) or of speculators (`layers.0.*`). It
drafts tokens of a smaller vocabulary: token i of the draft vocabulary is the model's token i + d2t[i].
Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840.
Legend: T entries, N rows, D hidden of the model, H hidden of the head, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.core.contracts import Attend, DrafterSpec, DraftTarget, ModelSpec, Rope, Runtime, WeightTarget
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.layers import (
    ConfigValues,
    FinalNorm,
    GatedMLP,
    ParallelHead,
    QKVParallelLinear,
    ReplicatedLinear,
    Residual,
    RopeSettings,
    RowParallelLinear,
    VocabParallelEmbedding,
    empty_parameter,
    rope_settings,
    rope_table,
)
from hookline.plugins.drafters.heads import HeadDrafter

if TYPE_CHECKING:
    from hookline.plugins.drafters import Eagle3Config

LAYER, OTHER_LAYER = "midlayer", "layers.0"
"""Prefixes of the names of the layer's tensors, in the two forms."""
EMBED, MODEL_EMBED = "embed_tokens", "model.embed_tokens"
UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")
"""Switches of config.json that must be false."""
RANDOM_VOCAB = 32_000
"""Largest draft vocabulary of a random head, as of published heads."""


@dataclass(frozen=True)
class HeadShape:
    """The sizes and switches of a head.

    model_hidden: D. num_drawn: W. norms_residual: whether the layer's residual is the normalised hidden state. layers:
    the model's layers after which the head reads the stream, ascending.
    """

    vocab_size: int
    num_drawn: int
    hidden_size: int
    model_hidden: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    attention_bias: bool
    norms_residual: bool
    layers: tuple[int, ...]
    rope: RopeSettings


def read_config(hf_config: Mapping[str, Any], num_layers: int) -> HeadShape:
    """Check and read a head's config.json. num_layers: of the model.

    Raises: ConfigError naming the key, its value and what is supported.
    """
    is_other = "transformer_layer_config" in hf_config
    inner: Mapping[str, Any] = hf_config["transformer_layer_config"] if is_other else {}
    eagle: Mapping[str, Any] = hf_config.get("eagle_config") or {}
    stated = {key: value for key, value in hf_config.items() if value is not None}
    values = ConfigValues({**inner, **eagle, **stated}, "drafter=eagle3")
    values.refuse_quantised()
    values.only("num_hidden_layers", 1)
    values.only("hidden_act", "silu")
    values.only("use_aux_hidden_state", True)
    values.only("logit_scale", 1.0)
    for switch in (*UNSUPPORTED, "mlp_bias"):
        values.only(switch, False)
    hidden, num_heads, vocab_size = (
        values.size("hidden_size"),
        values.size("num_attention_heads"),
        values.size("vocab_size"),
    )
    length = values.size("max_position_embeddings", 2048)
    shape = HeadShape(
        vocab_size=vocab_size,
        num_drawn=values.size("draft_vocab_size", vocab_size),
        hidden_size=hidden,
        model_hidden=values.size("target_hidden_size", hidden),
        intermediate_size=values.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", num_heads),
        head_dim=values.size("head_dim", max(1, hidden // num_heads)),
        eps=values.eps(),
        attention_bias=values.flag("attention_bias"),
        norms_residual=values.flag("norm_before_residual", is_other),
        layers=_layers(values, eagle, num_layers),
        rope=rope_settings({**values.values, "max_position_embeddings": length}),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    if shape.num_drawn > vocab_size:
        values.refuse("draft_vocab_size", f"at most vocab_size = {vocab_size}")
    return shape


def _layers(values: ConfigValues, eagle: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers after which the head reads the model's stream.

    A list in eagle_config numbers the layers themselves, as the head's training did. A list beside it, and the default
    without a list, number layers whose input is read: the stream after the layer before.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    listed = values.values.get(key) or [2, num_layers // 2, num_layers - 3]
    after = list(listed) if eagle.get(key) else [one - 1 if isinstance(one, int) else -1 for one in listed]
    if any(type(one) is not int or not 0 <= one < num_layers for one in after) or sorted(set(after)) != after:
        raise ConfigError(
            f"drafter=eagle3 reads the stream after layers {after}, which are not different ones, ascending, of the "
            f"model's 0 to {num_layers - 1}; say which in drafter.layers"
        )
    return tuple(after)


class Eagle3Head:
    """A projection, one layer, a norm and a head. Implements hookline.core.contracts.DraftHead."""

    def __init__(self, shape: HeadShape, runtime: Runtime) -> None:
        self.shape, self.runtime, hidden = shape, runtime, shape.hidden_size
        self.spec = ModelSpec(
            num_layers=1,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hidden_size=hidden,
            vocab_size=shape.vocab_size,
            max_position=shape.rope.max_position,
        )
        num_positions = max(shape.rope.max_position, runtime.max_model_len)
        self.rope = Rope(rope_table(shape.rope, shape.head_dim, num_positions).to(runtime.device))
        self.embed = VocabParallelEmbedding(shape.vocab_size, hidden, runtime)
        self.project = ReplicatedLinear(len(shape.layers) * shape.model_hidden, [hidden], runtime)
        self.token_norm_H, self.hidden_norm_H = empty_parameter(runtime, hidden), empty_parameter(runtime, hidden)
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.qkv = QKVParallelLinear(2 * hidden, *heads, runtime, bias=shape.attention_bias)
        self.output = RowParallelLinear(shape.num_heads * shape.head_dim, hidden, runtime, bias=shape.attention_bias)
        self.mlp_norm_H = empty_parameter(runtime, hidden)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, runtime)
        self.norm = FinalNorm(hidden, shape.eps, runtime)
        self.head = ParallelHead(shape.num_drawn, hidden, runtime)
        self.names_tokens = False
        self.ahead_W = torch.zeros(shape.num_drawn, dtype=torch.int64, device=runtime.device)

    def weight_targets(self, stored: Mapping[str, tuple[int, ...]]) -> Mapping[str, WeightTarget]:
        """See DraftHead; without the embedding, unless it is stored."""
        layer = OTHER_LAYER if any(name.startswith(f"{OTHER_LAYER}.") for name in stored) else LAYER
        if stored and not any(name.startswith(f"{layer}.") for name in stored):
            raise CheckpointError(f"it has neither {LAYER}.* nor {OTHER_LAYER}.*, the layer of an EAGLE-3 head")
        attention = f"{layer}.self_attn"
        ahead = WeightTarget.converted(self.ahead_W, self.ahead_W.shape, self._name_tokens, ("I64", "I32"))
        found = {
            **self.project.targets("fc"),
            f"{layer}.input_layernorm.weight": WeightTarget.whole(self.token_norm_H, init="ones"),
            f"{layer}.hidden_norm.weight": WeightTarget.whole(self.hidden_norm_H, init="ones"),
            **self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.output.targets(f"{attention}.o_proj"),
            f"{layer}.post_attention_layernorm.weight": WeightTarget.whole(self.mlp_norm_H, init="ones"),
            **self.mlp.targets(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj"),
            **self.norm.targets("norm"),
            **self.head.targets("lm_head"),
        }
        self.names_tokens = "d2t" in stored or self.shape.num_drawn < self.shape.vocab_size
        if self.names_tokens:
            found["d2t"] = replace(ahead, init="zeros")
        if f"{EMBED}.weight" in stored:
            found |= self.embed.targets(EMBED)
        surplus = sorted(set(stored) - set(found) - {"t2d"})
        if surplus:
            raise CheckpointError(f"it has {surplus[0]}, which an EAGLE-3 head of its config.json does not have")
        return found

    def combine(self, streams: Sequence[Tensor]) -> Tensor:
        """See DraftHead."""
        return self.project(torch.cat(list(streams), -1))

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attend: Attend) -> Tensor:
        """See DraftHead: the layer's stream, before the final norm."""
        eps, norm = self.shape.eps, self.runtime.kernels.rms_norm
        token_TH = norm(self.embed(token_ids_T), self.token_norm_H, eps)
        normed_TH = norm(hidden_TH, self.hidden_norm_H, eps)
        attended_TC = attend(0, self.qkv(torch.cat([token_TH, normed_TH], -1)), self.rope)
        residual = Residual(normed_TH if self.shape.norms_residual else hidden_TH, eps, self.runtime)
        residual.add(attended_TC, through=self.output)
        residual.add(residual.norm_each(self.mlp_norm_H), through=self.mlp)
        return residual.stream()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """See DraftHead: -inf for tokens outside the draft vocabulary."""
        drawn_NW = self.head(self.norm(hidden_NH))
        if not self.names_tokens:
            return drawn_NW
        logits_NV = drawn_NW.new_full((len(drawn_NW), self.shape.vocab_size), -torch.inf)
        return logits_NV.index_copy_(
            1, self.ahead_W + torch.arange(len(self.ahead_W), device=drawn_NW.device), drawn_NW
        )

    def check_tokens(self) -> None:
        """Raises: CheckpointError if d2t names a token outside the model's vocabulary, or a token twice."""
        tokens = self._tokens().tolist()
        if min(tokens) < 0 or max(tokens) >= self.shape.vocab_size or len(set(tokens)) < len(tokens):
            raise CheckpointError(
                f"d2t names tokens from {min(tokens)} to {max(tokens)}, {len(set(tokens))} of {len(tokens)} different; "
                f"the model's are 0 to {self.shape.vocab_size - 1}"
            )

    def _name_tokens(self, ahead_W: Any) -> None:
        """Keep d2t, or anything indexed like it."""
        self.ahead_W.copy_(ahead_W[:])

    def _tokens(self) -> Tensor:
        """The model's token of each token of the draft vocabulary, (W,)."""
        return self.ahead_W + torch.arange(len(self.ahead_W), device=self.ahead_W.device)


class Eagle3(HeadDrafter):
    """See Eagle3Config."""

    def __init__(self, config: Eagle3Config, spec: DrafterSpec) -> None:
        target = spec.target
        assert target is not None, "drafter=eagle3 runs in an engine"
        head = _head(config, target)
        super().__init__(config, spec, target, head, len(head.shape.layers))

    @classmethod
    def reads_layers(
        cls, config: Eagle3Config, spec: ModelSpec, config_of: Callable[[str], Mapping[str, Any]]
    ) -> Sequence[int]:
        """See Drafter."""
        return _shape(config, spec, config_of).layers


def _shape(config: Eagle3Config, spec: ModelSpec, config_of: Callable[[str], Mapping[str, Any]]) -> HeadShape:
    """The shape of the head, if it fits the model."""
    hf_config = dict(config_of(config.checkpoint)) if config.checkpoint else _random_config(spec)
    if config.layers:
        hf_config["eagle_config"] = {**(hf_config.get("eagle_config") or {}), **_listed(config.layers)}
        hf_config |= _listed(config.layers)
    shape = read_config(hf_config, spec.num_layers)
    for what, own, of_model in (
        ("hidden states", shape.model_hidden, spec.hidden_size),
        ("a vocabulary", shape.vocab_size, spec.vocab_size),
    ):
        if own != of_model:
            raise ConfigError(
                f"drafter=eagle3: the head {config.checkpoint} is for a model with {what} of {own}, and this one has "
                f"{of_model}; take a head that was trained for this model"
            )
    return shape


def _listed(layers: Sequence[int]) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": list(layers)}


def _random_config(spec: ModelSpec) -> dict[str, Any]:
    """A config.json for a random head, with the sizes that published heads of such a model have."""
    heads = {"num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    if spec.value_dim is not None:  # latent attention, which the head does not have
        heads = {"num_attention_heads": max(1, spec.hidden_size // 128), "head_dim": 128}
    return {
        **heads,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": min(spec.vocab_size, RANDOM_VOCAB),
        "hidden_size": spec.hidden_size,
        "intermediate_size": 3 * spec.hidden_size,
        "max_position_embeddings": spec.max_position,
    }


@torch.inference_mode()
def _head(config: Eagle3Config, target: DraftTarget) -> Eagle3Head:
    """The head with its weights, and the model's embedding unless it has its own."""
    if not config.checkpoint and not target.is_random:
        raise ConfigError("drafter=eagle3 needs drafter.checkpoint=FOLDER or HUB_ID, a head trained for the model")
    shape = _shape(config, target.spec, target.config_of)
    head = Eagle3Head(shape, replace(target.runtime, weights=None))
    try:
        stored = target.shapes(config.checkpoint)
        target.fill(head.weight_targets(stored), config.checkpoint)
        head.check_tokens()
    except CheckpointError as error:
        raise CheckpointError(f"drafter=eagle3 cannot read its head {config.checkpoint}: {error}") from error
    if f"{EMBED}.weight" not in stored:
        try:
            target.fill(head.embed.targets(MODEL_EMBED))
        except CheckpointError as error:
            raise CheckpointError(
                f"drafter=eagle3: the head has no embedding, and the model's cannot be read: {error}"
            ) from error
    return head
