"""Mamba-2, arXiv:2405.21060: layers of a norm, a product, a short convolution, a linear recurrence, a norm, a product.

The heads are split over the ranks. Every rank computes B and C of all groups of heads, and the ranks add up the squares
of the norm that goes by groups. Legend: T tokens, N rows that are wanted, D hidden, H heads of this rank, P head dim,
G groups, S state size, I = H * P inner features, X = 2 * G * S, C = I + X channels of the convolution, W its width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, silu, softplus

from hookline.core import contracts, layers
from hookline.core.contracts import Attend, ModelSpec, Part, Runtime, StateRows, StateTensor, WeightTarget
from hookline_mamba2.recurrence import recurrence

MAX_POSITION = 1 << 20
"""A state has no longest sequence, and config.json names none; engine.max_model_len says how far to go."""
NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # the second as transformers 5 writes it


class Sizes:
    """What a config.json says of the whole model. inner: features of all heads. width: of the convolution, in tokens.

    `residual_in_fp32` is not read: the residual stream has the model's dtype, as in every model here.
    Raises: ConfigError for what the model does not implement.
    """

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        values = layers.ConfigValues(hf_config, "mamba2")
        values.model_type({"mamba2": "Mamba2ForCausalLM"})
        values.refuse_quantised()
        values.only("hidden_act", "silu")
        if list(hf_config.get("time_step_limit") or NO_LIMITS[0]) not in NO_LIMITS:
            values.refuse("time_step_limit", "[0, Infinity]")
        self.num_layers, self.hidden = values.num_layers(), values.size("hidden_size")
        self.vocab, self.is_tied = values.size("vocab_size"), values.flag("tie_word_embeddings")
        self.num_heads, self.head_dim = values.size("num_heads", 128), values.size("head_dim", 64)
        self.num_groups, self.state = values.size("n_groups", 8), values.size("state_size", 128)
        self.width, self.eps = values.size("conv_kernel", 4), values.eps("layer_norm_epsilon", 1e-5)
        self.has_bias, self.has_convolution_bias = values.flag("use_bias"), values.flag("use_conv_bias", True)
        self.inner, self.shared = self.num_heads * self.head_dim, 2 * self.num_groups * self.state
        if self.inner != values.positive("expand", 2) * self.hidden:
            values.refuse("num_heads", f"num_heads * head_dim = {self.inner} equal to expand * hidden_size")
        if self.num_heads % self.num_groups:
            values.refuse("n_groups", f"a divisor of num_heads = {self.num_heads}")
        if self.width < 2:
            values.refuse("conv_kernel", "2 or more")


class Mamba2:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        sizes = Sizes(hf_config)
        self.runtime, self.eps, tied = runtime, sizes.eps, sizes.is_tied
        self.embed = layers.VocabParallelEmbedding(sizes.vocab, sizes.hidden, runtime, is_tied=tied)
        self.layers = layers.StageLayers(lambda index: Layer(index, sizes, runtime), sizes.num_layers, runtime)
        self.norm = layers.FinalNorm(sizes.hidden, sizes.eps, runtime)
        self.head = layers.ParallelHead(sizes.vocab, sizes.hidden, runtime, tied_to=self.embed if tied else None)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        sizes = Sizes(hf_config)
        x = StateTensor((sizes.inner, sizes.width - 1), split_dim=0)
        state = StateTensor((sizes.num_heads, sizes.head_dim, sizes.state), "float32", split_dim=0)
        kept = ("x", x), ("bc", StateTensor((sizes.shared, sizes.width - 1))), ("state", state)
        counts: dict[str, Any] = {
            "num_layers": sizes.num_layers,
            "hidden_size": sizes.hidden,
            "vocab_size": sizes.vocab,
        }
        counts |= {"num_heads": sizes.num_heads, "num_kv_heads": sizes.num_heads, "head_dim": sizes.head_dim}
        kept_by_each = (contracts.RecurrentState(kept),) * sizes.num_layers
        return ModelSpec(**counts, max_position=MAX_POSITION, layers=kept_by_each)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        residual = layers.Residual(layers.stage_input(self.embed, token_ids_T, attend), self.eps, self.runtime)
        for layer in layers.tapped(self.layers, residual, attend):
            layer(residual, attend)
        return self.norm(residual)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        own = self.embed.targets("backbone.embeddings") | self.norm.targets("backbone.norm_f")
        return own | self.layers.targets("backbone.layers") | self.head.targets("lm_head")


class Layer:
    """x + mixer(norm(x)). The mixer's last product is added to the stream by the residual itself."""

    def __init__(self, index: int, sizes: Sizes, runtime: Runtime) -> None:
        self.index, self.sizes, self.runtime, hidden = index, sizes, runtime, sizes.hidden
        self.heads = heads = layers.even_part(sizes.num_heads, runtime.ranks, "num_heads")
        self.inner, heads_of_group = heads.times(sizes.head_dim), sizes.num_heads // sizes.num_groups
        self.convolved = [self.inner, Part(sizes.shared, 0, sizes.shared)]
        self.projected = [self.inner, *self.convolved, heads]
        self.group_of_H = torch.arange(heads.start, heads.stop, device=runtime.device) // heads_of_group
        self.widths, self.channels = ([part.size for part in parts] for parts in (self.projected, self.convolved))
        self.norm_D, self.norm_I, self.in_bias_O, self.bias_C, self.log_rate_H, self.skip_H, self.dt_bias_H = (
            layers.empty_parameter(runtime, size).zero_()
            for size in (hidden, self.inner.size, sum(self.widths), sum(self.channels), *[heads.size] * 3)
        )
        self.in_weight_OD = layers.empty_parameter(runtime, sum(self.widths), hidden)
        self.weight_CW = layers.empty_parameter(runtime, sum(self.channels), sizes.width)
        self.output = layers.RowParallelLinear(sizes.inner, hidden, runtime, what="num_heads", bias=sizes.has_bias)

    def __call__(self, residual: layers.Residual, attend: Attend) -> None:
        """Norm, mixer, add."""
        mixed_TI = self._mixed(residual.norm(self.norm_D), attend.states(self.index))
        rows_N = contracts.wanted_rows(attend) if self.index == self.sizes.num_layers - 1 else None
        residual.keep(rows_N)
        residual.add(mixed_TI if rows_N is None else mixed_TI[rows_N], through=self.output)

    def _mixed(self, x_TD: Tensor, states: StateRows) -> Tensor:
        """All of a mixer but its last product: (T, D) -> (T, I)."""
        bias_O = self.in_bias_O if self.sizes.has_bias else None
        projected_TO = self.runtime.kernels.linear(x_TD, self.in_weight_OD, bias_O)
        gate_TI, x_TI, bc_TX, dt_TH = projected_TO.split(self.widths, -1)
        offered = self.runtime.kernels.short_convolution
        convolve = offered if contracts.is_offered(offered) else layers.plain_short_convolution
        weights, biases = self.weight_CW.split(self.channels), self.bias_C.split(self.channels)
        given = zip((x_TI, bc_TX), weights, ("x", "bc"), biases, strict=True)
        x_TI, bc_TX = (convolve(x, weight, states.tensors[key], states, bias).float() for x, weight, key, bias in given)
        x_THP, group_H = x_TI.unflatten(-1, (self.heads.size, -1)), self.group_of_H
        b_THS, c_THS = (one.unflatten(-1, (self.sizes.num_groups, -1))[:, group_H] for one in bc_TX.chunk(2, -1))
        dt_TH = softplus(dt_TH.float() + self.dt_bias_H.float())
        decay_TH = -self.log_rate_H.float().exp() * dt_TH
        y_THP = recurrence(x_THP * dt_TH.unsqueeze(-1), decay_TH, b_THS, c_THS, states.tensors["state"], states)
        y_THP = y_THP + self.skip_H.float().unsqueeze(-1) * x_THP
        gated_THP = y_THP * silu(gate_TI.float()).unflatten(-1, (self.heads.size, -1))
        return self._normalised(gated_THP).to(x_TD.dtype) * self.norm_I

    def _normalised(self, y_THP: Tensor) -> Tensor:
        """Divide by the root mean square of the group, some of whose features other ranks may have."""
        is_of_HG = one_hot(self.group_of_H, self.sizes.num_groups).to(y_THP.dtype)
        squares_TG = self.runtime.ranks.all_reduce(y_THP.square().sum(-1) @ is_of_HG)
        scale_TG = torch.rsqrt(squares_TG * (self.sizes.num_groups / self.sizes.inner) + self.sizes.eps)
        return (y_THP * scale_TG[:, self.group_of_H].unsqueeze(-1)).flatten(1)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        shard, mixer = WeightTarget.shard, f"backbone.layers.{self.index}.mixer"
        targets = {
            f"backbone.layers.{self.index}.norm.weight": WeightTarget.whole(self.norm_D, init="ones"),
            f"{mixer}.in_proj.weight": _joined(self.in_weight_OD, self.projected),
            f"{mixer}.conv1d.weight": _joined(self.weight_CW.unsqueeze(1), self.convolved),
            f"{mixer}.A_log": shard(self.log_rate_H, 0, self.heads),
            f"{mixer}.D": shard(self.skip_H, 0, self.heads, init="ones"),
            f"{mixer}.dt_bias": shard(self.dt_bias_H, 0, self.heads),
            f"{mixer}.norm.weight": shard(self.norm_I, 0, self.inner, init="ones"),
        }
        biases = {"in_proj": (self.in_bias_O, self.projected)} if self.sizes.has_bias else {}
        biases |= {"conv1d": (self.bias_C, self.convolved)} if self.sizes.has_convolution_bias else {}
        targets |= {f"{mixer}.{key}.bias": _joined(*one) for key, one in biases.items()}
        return targets | self.output.targets(f"{mixer}.out_proj")


def _joined(parameter: Tensor, parts: Sequence[Part]) -> WeightTarget:
    """One checkpoint tensor that holds these parts one after the other."""
    views = parameter.split([part.size for part in parts])
    return WeightTarget.joined([WeightTarget.shard(view, 0, part) for view, part in zip(views, parts, strict=True)])
