"""Mamba-2, arXiv:2405.21060: in each layer norm, mixer, add. A mixer is a short convolution and a linear recurrence.

The heads are split over the ranks; so are the groups, which give the heads their B and C, where the ranks divide them.
Otherwise every rank computes all groups, and the ranks add up the squares of the norm that goes by groups.
Legend: T tokens, N rows whose logits are wanted, D hidden, V vocabulary, H heads, P head dim, G groups, S state size,
I = H * P inner features, C channels of the convolution. Sizes are of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import (
    Attend,
    ModelSpec,
    Part,
    RecurrentState,
    Runtime,
    StateRows,
    StateTensor,
    WeightTarget,
    wanted_rows,
)
from hookline.core.layers import (
    FinalNorm,
    ParallelHead,
    Residual,
    RowParallelLinear,
    StageLayers,
    VocabParallelEmbedding,
    empty_parameter,
    even_part,
    stage_input,
    tapped,
)
from hookline_mamba2.config import Sizes, read_config
from hookline_mamba2.recurrence import recurrence, short_convolution

MAX_POSITION = 1 << 20
"""A state has no longest sequence, and config.json names none; engine.max_model_len says how far to go."""


class Mamba2:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        sizes = read_config(hf_config)
        self.runtime, self.eps = runtime, sizes.eps
        self.embed = VocabParallelEmbedding(sizes.vocab, sizes.hidden, runtime, is_tied=sizes.is_tied)
        self.layers = StageLayers(lambda index: Layer(index, sizes, runtime), sizes.num_layers, runtime)
        self.norm = FinalNorm(sizes.hidden, sizes.eps, runtime)
        self.head = ParallelHead(sizes.vocab, sizes.hidden, runtime, tied_to=self.embed if sizes.is_tied else None)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model. Every rank has room for past B and C of all groups, since it is not known here who splits them."""
        sizes = read_config(hf_config)
        keeps = RecurrentState(
            (
                ("x", StateTensor((sizes.inner, sizes.width - 1), split_dim=0)),
                ("bc", StateTensor((2 * sizes.num_groups * sizes.state, sizes.width - 1))),
                ("state", StateTensor((sizes.num_heads, sizes.head_dim, sizes.state), "float32", split_dim=0)),
            )
        )
        return ModelSpec(
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            hidden_size=sizes.hidden,
            vocab_size=sizes.vocab,
            max_position=MAX_POSITION,
            layers=(keeps,) * sizes.num_layers,
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        residual = Residual(stage_input(self.embed, token_ids_T, attend), self.eps, self.runtime)
        for layer in tapped(self.layers, residual, attend):
            layer(residual, attend)
        return self.norm(residual)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        return {
            **self.embed.targets("backbone.embeddings"),
            **self.layers.targets("backbone.layers"),
            **self.norm.targets("backbone.norm_f"),
            **self.head.targets("lm_head"),
        }


class Layer:
    """x + mixer(norm(x)). The mixer's last product is added to the stream by the residual itself."""

    def __init__(self, index: int, sizes: Sizes, runtime: Runtime) -> None:
        self.index, self.is_last = index, index == sizes.num_layers - 1
        self.norm_D = empty_parameter(runtime, sizes.hidden)
        self.mixer = Mixer(sizes, runtime)
        self.output = RowParallelLinear(
            sizes.inner, sizes.hidden, runtime, what="num_heads * head_dim", bias=sizes.has_bias
        )

    def __call__(self, residual: Residual, attend: Attend) -> None:
        """Norm, mixer, add."""
        mixed_TI = self.mixer(residual.norm(self.norm_D), attend.states(self.index))
        rows_N = wanted_rows(attend) if self.is_last else None
        residual.keep(rows_N)
        residual.add(mixed_TI if rows_N is None else mixed_TI[rows_N], through=self.output)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        layer = f"backbone.layers.{self.index}"
        return {
            f"{layer}.norm.weight": WeightTarget.whole(self.norm_D, init="ones"),
            **self.mixer.targets(f"{layer}.mixer"),
            **self.output.targets(f"{layer}.mixer.out_proj"),
        }


class Mixer:
    """One product to gate, x, B, C and time steps; convolution, recurrence, and a norm of each group, gated."""

    def __init__(self, sizes: Sizes, runtime: Runtime) -> None:
        ranks, num_groups = runtime.ranks, sizes.num_groups
        self.sizes, self.runtime = sizes, runtime
        heads = even_part(sizes.num_heads, ranks, "num_heads")
        self.splits_groups = num_groups % ranks.size == 0
        groups = even_part(num_groups, ranks, "n_groups") if self.splits_groups else Part(num_groups, 0, num_groups)
        inner, shared = heads.times(sizes.head_dim), groups.times(sizes.state)
        self.parts = {"gate": inner, "x": inner, "b": shared, "c": shared, "dt": heads}
        self.num_inner, self.num_shared, self.num_heads = inner.size, 2 * shared.size, heads.size
        every_head_H = torch.arange(heads.start, heads.stop, device=runtime.device)
        self.group_of_H = every_head_H // (sizes.num_heads // num_groups) - groups.start
        self.num_groups = groups.size
        num_channels = self.num_inner + self.num_shared
        self.in_weight_OD = empty_parameter(runtime, self.num_inner + num_channels + self.num_heads, sizes.hidden)
        self.in_bias_O = empty_parameter(runtime, len(self.in_weight_OD)) if sizes.has_bias else None
        self.weight_C1W = empty_parameter(runtime, num_channels, 1, sizes.width)
        self.bias_C = empty_parameter(runtime, num_channels) if sizes.has_convolution_bias else None
        self.log_rate_H, self.skip_H, self.dt_bias_H = (empty_parameter(runtime, self.num_heads) for _ in range(3))
        self.norm_I = empty_parameter(runtime, self.num_inner)

    def __call__(self, x_TD: Tensor, states: StateRows) -> Tensor:
        """All of a mixer but its last product: (T, D) -> (T, I)."""
        projected_TO = self.runtime.kernels.linear(x_TD, self.in_weight_OD, self.in_bias_O)
        gate_TI, xbc_TC, dt_TH = projected_TO.split(
            [self.num_inner, self.num_inner + self.num_shared, self.num_heads], dim=-1
        )
        past = states.tensors["x"], states.tensors["bc"][:, : self.num_shared]  # the groups of this rank come first
        xbc_TC = short_convolution(xbc_TC, self.weight_C1W, self.bias_C, past, states).float()
        x_TI, b_TX, c_TX = xbc_TC.split([self.num_inner, self.num_shared // 2, self.num_shared // 2], dim=-1)
        x_THP = x_TI.unflatten(-1, (self.num_heads, -1))
        b_THS, c_THS = (x_TX.unflatten(-1, (self.num_groups, -1))[:, self.group_of_H] for x_TX in (b_TX, c_TX))
        dt_TH = functional.softplus(dt_TH.float() + self.dt_bias_H.float())
        decay_TH = -self.log_rate_H.float().exp() * dt_TH
        y_THP = recurrence(x_THP * dt_TH.unsqueeze(-1), decay_TH, b_THS, c_THS, states.tensors["state"], states)
        y_THP = y_THP + self.skip_H.float().unsqueeze(-1) * x_THP
        gated_THP = y_THP * functional.silu(gate_TI.float()).unflatten(-1, (self.num_heads, -1))
        return self._normalised(gated_THP).to(x_TD.dtype) * self.norm_I

    def _normalised(self, y_THP: Tensor) -> Tensor:
        """Divide by the root mean square of the group, some of whose features other ranks may have."""
        is_of_HG = functional.one_hot(self.group_of_H, self.num_groups).to(y_THP.dtype)
        squares_TG = y_THP.square().sum(-1) @ is_of_HG
        if not self.splits_groups:
            squares_TG = self.runtime.ranks.all_reduce(squares_TG)
        scale_TG = torch.rsqrt(squares_TG * (self.sizes.num_groups / self.sizes.inner) + self.sizes.eps)
        return (y_THP * scale_TG[:, self.group_of_H].unsqueeze(-1)).flatten(1)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """The mixer's checkpoint tensors but those of its last product."""
        heads, every, convolved = self.parts["dt"], list(self.parts), ["x", "b", "c"]
        targets = {
            f"{name}.in_proj.weight": self._joined(self.in_weight_OD, every),
            f"{name}.conv1d.weight": self._joined(self.weight_C1W, convolved),
            f"{name}.A_log": WeightTarget.shard(self.log_rate_H, 0, heads),
            f"{name}.D": WeightTarget.shard(self.skip_H, 0, heads, init="ones"),
            f"{name}.dt_bias": WeightTarget.shard(self.dt_bias_H, 0, heads),
            f"{name}.norm.weight": WeightTarget.shard(self.norm_I, 0, self.parts["x"], init="ones"),
        }
        if self.in_bias_O is not None:
            targets[f"{name}.in_proj.bias"] = self._joined(self.in_bias_O, every)
        if self.bias_C is not None:
            targets[f"{name}.conv1d.bias"] = self._joined(self.bias_C, convolved)
        return targets

    def _joined(self, parameter: Tensor, names: Sequence[str]) -> WeightTarget:
        """One checkpoint tensor that holds these parts one after the other."""
        parts = [self.parts[name] for name in names]
        views = parameter.split([part.size for part in parts])
        return WeightTarget.joined([WeightTarget.shard(view, 0, part) for view, part in zip(views, parts, strict=True)])
