"""Layers that replace a transformers model's linears, embedding, head and norms, for one rank of any group.

Sharded by the model's own tensor-parallel plan, with transformers' styles; an unsupported style is refused by name.
Legend: T tokens, D input features, O output features of this rank, V rows of this rank.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hookline.core.contracts import MatrixPiece, Part, Runtime, Weight, WeightTarget
from hookline.core.errors import ConfigError
from hookline.core.layers import PLAIN, empty_parameter, head_weight, vocab_part

COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_SPLIT = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
REPLICATED = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of modules that every rank computes whole."""
LINEAR_STYLES = (COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_SPLIT, *REPLICATED)
LONGROPE = "longrope"
"""The rope_type with short and with long factors, which transformers takes by the length of the sequence."""
KV_PROJECTIONS = ("k_proj", "v_proj")
"""Linears whose rows are kv heads: replicated if the ranks exceed these."""


@dataclass(frozen=True)
class Plan:
    """A model's tensor-parallel plan: patterns of names, with * for numbers, and their styles."""

    styles: Mapping[str, str]
    num_kv_heads: int

    def style(self, name: str) -> str | None:
        """The style of a module or parameter; None if the plan does not name it."""
        return self.styles.get(re.sub(r"\d+", "*", name))


class ServedLinear(nn.Module):
    """x @ W.T + b by the kernels: whole, or this rank's part of it.

    weight: for code of transformers that looks at a linear's dtype or device; products are made by `matrix`.
    Shapes: (1, T, D) -> (1, T, O). Raises: ConfigError if the ranks do not divide the features.
    """

    def __init__(self, name: str, linear: nn.Linear, style: str | None, plan: Plan, runtime: Runtime) -> None:
        super().__init__()
        self.name, self.ranks = name, runtime.ranks
        outs, ins, size = linear.out_features, linear.in_features, runtime.ranks.size
        style = style if size > 1 else None
        self.gathers, self.splits, self.sums = (
            style == COLUMNS_GATHERED,
            style == ROWS_SPLIT,
            style in (ROWS, ROWS_SPLIT),
        )
        self.rows, self.columns = Part(outs, 0, outs), Part(ins, 0, ins)
        if style in (COLUMNS, COLUMNS_GATHERED):
            is_kv = style == COLUMNS and name.endswith(KV_PROJECTIONS)
            units = plan.num_kv_heads if is_kv else outs
            self.rows = rank_part(units, runtime, f"the output features of {name}", at_least_one=is_kv).times(
                outs // units
            )
        if self.sums:
            self.columns = rank_part(ins, runtime, f"the input features of {name}")
        self.matrix = (runtime.weights or PLAIN).matrix(runtime, self.rows.size, self.columns.size)
        self.weight_targets = self.matrix.targets([MatrixPiece(name, 0, self.rows, self.columns)])
        self.weight = marked(empty_parameter(runtime, 0))
        self.bias = marked(empty_parameter(runtime, self.rows.size)) if _has_bias(linear) else None
        self._added = None if self.sums and runtime.ranks.rank else self.bias

    def forward(self, x_1TD: Tensor) -> Tensor:
        """The product; summed or gathered over the ranks where the plan says so."""
        if self.splits:
            x_1TD = x_1TD.narrow(-1, self.columns.start, self.columns.size)
        out_TO = self.matrix.linear(x_1TD.reshape(-1, self.columns.size), self._added)
        if self.sums:
            out_TO = self.ranks.all_reduce(out_TO)
        if self.gathers:
            out_TO = self.ranks.all_gather_last(out_TO)
        return out_TO.view(*x_1TD.shape[:-1], out_TO.shape[-1])

    def targets(self) -> dict[str, WeightTarget]:
        """This rank's part of the weight, and of the bias."""
        if self.bias is None:
            return self.weight_targets
        return {**self.weight_targets, f"{self.name}.bias": WeightTarget.shard(self.bias, 0, self.rows, init="zeros")}


class ServedHead(nn.Module):
    """The output head: this rank's shard of the vocabulary, whose last columns may be padding.

    Shapes: (1, N, D) -> (1, N, V). tied_to: the whole, padded weight of an embedding whose rows it shares.
    """

    def __init__(self, name: str, linear: nn.Linear, runtime: Runtime, tied_to: Tensor | None) -> None:
        super().__init__()
        self.name = name
        self.part, num_rows = vocab_part(linear.out_features, runtime.ranks)
        self.matrix: Weight
        if tied_to is not None:
            self.matrix = head_weight(tied_to.narrow(0, runtime.ranks.rank * num_rows, num_rows), runtime)
            self.weight_targets = {f"{name}.weight": WeightTarget.tied(tied_to)}
        else:
            columns = Part(linear.in_features, 0, linear.in_features)
            self.matrix = (runtime.weights or PLAIN).head(runtime, num_rows, linear.in_features)
            self.weight_targets = self.matrix.targets([MatrixPiece(name, 0, self.part, columns)])
        self.weight = marked(empty_parameter(runtime, 0))
        self.bias = marked(empty_parameter(runtime, num_rows).zero_()) if _has_bias(linear) else None

    def forward(self, hidden_1ND: Tensor) -> Tensor:
        """Logits of this rank's tokens; logits of padding have no meaning."""
        return self.matrix.linear(hidden_1ND[0], self.bias).unsqueeze(0)

    def targets(self) -> dict[str, WeightTarget]:
        """This rank's rows, or the embedding whose weight it has."""
        if self.bias is None:
            return self.weight_targets
        bias_V = self.bias[: self.part.size]
        return {**self.weight_targets, f"{self.name}.bias": WeightTarget.shard(bias_V, 0, self.part, init="zeros")}


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x @ W.T + b and nothing else: torch's linear, or Falcon's of two operations."""
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"


def padded_embedding(embedding: nn.Embedding, runtime: Runtime) -> Tensor:
    """Give an embedding its weight: whole on every rank, with rows of zeros up to a multiple of the ranks.

    Whole, since models scale embeddings in different ways. Returns the weight without its padding.
    """
    num_tokens = embedding.num_embeddings
    _, num_rows = vocab_part(num_tokens, runtime.ranks)
    weight = empty_parameter(runtime, num_rows * runtime.ranks.size, embedding.embedding_dim)
    weight[num_tokens:].zero_()
    embedding.weight = nn.Parameter(marked(weight), requires_grad=False)
    return embedding.weight[:num_tokens]


def rank_part(total: int, runtime: Runtime, what: str, *, at_least_one: bool = False) -> Part:
    """This rank's equal share; at_least_one: if there are fewer than ranks, several ranks hold the same one.

    Raises: ConfigError naming `what` if the ranks do not divide the total.
    """
    rank, size = runtime.ranks.rank, runtime.ranks.size
    if at_least_one and size % total == 0:
        first = rank * total // size
        return Part(total, first, first + 1)
    if total % size:
        raise ConfigError(f"tp={size} does not divide {what}, {total}; take a tp that does")
    return Part(total, rank * total // size, (rank + 1) * total // size)


def without_shared(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The modules in `names` that share no weights with another layer, unlike Zamba2's blocks.

    A layer may call a shared module that the layer under whose name a checkpoint stores the weights does not call.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    shared = [*ties, *ties.values()]
    return [name for name in names if not any(one.startswith(f"{name}.") for one in shared)]


def share_modules(model: nn.Module) -> None:
    """Let layers that share weights, as some of Zamba's, be the same modules. Embedding and head are not touched."""
    untyped: Any = model
    own = (untyped.get_input_embeddings(), untyped.get_output_embeddings())
    for name, source in (getattr(untyped, "all_tied_weights_keys", None) or {}).items():
        holder, first = name.rpartition(".")[0], source.rpartition(".")[0]
        if model.get_submodule(holder) not in own:
            model.set_submodule(holder, model.get_submodule(first))


def use_kernel_norms(model: nn.Module, runtime: Runtime) -> None:
    """Let the kernels compute every RMS norm of the plain form, whatever class of transformers it is.

    Each norm is tried, since norms of one class may differ: some have no weight.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and is_plain_rms_norm(module):
            module.forward = _kernel_norm(module, runtime)


def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether a norm computes x / sqrt(mean(x²) + eps) * weight, found by trying it out."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    if weight is None or weight.ndim != 1 or eps is None or module._buffers or len(module._parameters) != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(2, len(weight), generator=generator) * eps**0.5
    trial_D = torch.randn(len(weight), generator=generator)
    try:
        module._parameters["weight"] = nn.Parameter(trial_D, requires_grad=False)
        found = module(x_TD)
    except Exception:
        return False
    finally:
        module._parameters["weight"] = weight
    expected = x_TD * (x_TD.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * trial_D
    return isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def pin_rope(model: nn.Module, max_len: int = 0) -> None:
    """Keep the rotary frequencies as they are for all sequences: "longrope" ones long if any may be, else short.

    transformers computes "dynamic" and "longrope" ones anew by the longest sequence of a step, which waits for the
    device, and would make a request's result depend on the others. max_len: tokens of the longest sequence that is
    served.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _lengthen(module, kinds, max_len)
            module.rope_type = "default"
            if hasattr(module, "rope_init_fn") and hasattr(module, "inv_freq"):
                _keep_frequencies(module, max_len)
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _lengthen(module, kind, max_len, layer_type)
            module.rope_type = dict.fromkeys(kinds, "default")


def _lengthen(module: Any, kind: str, max_len: int, layer_type: str | None = None) -> None:
    """Give a rotary embedding its long frequencies, if it has any and sequences get longer than the original ones."""
    if kind != LONGROPE:
        return
    settings, of_layers, prefix = module.config.rope_parameters, {}, ""
    if layer_type is not None:
        settings, of_layers, prefix = settings[layer_type], {"layer_type": layer_type}, f"{layer_type}_"
    if max_len > settings["original_max_position_embeddings"]:
        buffer_F = module._buffers[f"{prefix}inv_freq"]
        long_F, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, buffer_F.device, seq_len=max_len, **of_layers)
        buffer_F.copy_(long_F)


def _keep_frequencies(module: Any, max_len: int) -> None:
    """Make Phi-3.5-MoE's rotary embedding use stored frequencies and scale; it would compute them in each step.

    It would choose between two scales by the longest sequence of the step, for which it waits for the device.
    """
    settings, scaling = module.config.rope_parameters, module.attention_scaling
    if "short_mscale" in settings:
        is_long = max_len > settings.get("original_max_position_embeddings", max_len)
        scaling = settings["long_mscale" if is_long else "short_mscale"]
        module.config = copy(module.config)
        module.config.rope_parameters = {**settings, "rope_type": "default"}
    module.rope_init_fn = lambda *_, **__: (module.inv_freq, scaling)


def typed_buffers(module: nn.Module) -> list[str]:
    """Names of a module's own buffers that checkpoints hold, which transformers loads in the model's dtype."""
    kept = {key for key in module._buffers if key not in module._non_persistent_buffers_set}
    return [key for key in kept if (value := module._buffers[key]) is not None and value.is_floating_point()]


class GivenPositions:
    """Positions of a step for the embeddings of a decoder that would count them from its cache.

    Shapes: positions_T (T,).
    """

    def __init__(self) -> None:
        self.positions_T: Tensor | None = None

    def serve(self, decoder: nn.Module) -> bool:
        """Let the position embeddings of a decoder take these; returns whether there are any that count."""
        found = [module for module in decoder.modules() if _counts_positions(module)]
        for module in found:
            module.forward = self._forward(module.forward)
        return bool(found)

    def _forward(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(given: Any, *_: Any, **__: Any) -> Tensor:
            return own(given, position_ids=self.positions_T)

        return forward


def _counts_positions(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters if isinstance(module, nn.Embedding) else ()
    return "cache_length" in names and "position_ids" in names


def _eps(module: nn.Module) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _kernel_norm(module: nn.Module, runtime: Runtime) -> Callable[[Tensor], Tensor]:
    kernels, eps = runtime.kernels, _eps(module)
    assert eps is not None

    def forward(x: Tensor) -> Tensor:
        weight_D: Tensor = module.weight  # type: ignore[assignment]
        return kernels.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight_D, eps).view(x.shape)

    return forward


def _has_bias(linear: nn.Linear) -> bool:
    return linear._parameters["bias"] is not None


def marked(weight: Tensor) -> Tensor:
    """A tensor that transformers takes for loaded, so that it initialises only its buffers."""
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    return weight
