"""Kernels with one planted fault each in what they do with recurrent states, and what the suite must say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import DeltaNet
from hookline.core.layers import plain_gated_delta_rule, plain_short_convolution
from hookline.core.testing.plain_kernels import PlainKernels


class PlainRecurrence(PlainKernels):
    """No fault."""

    def short_convolution(self, *given: Any, **bias: Any) -> Tensor:
        return plain_short_convolution(*given, **bias)

    def gated_delta_rule(self, *given: Any) -> Tensor:
        return plain_gated_delta_rule(*given)


class ReversesTheConvolution(PlainRecurrence):
    def short_convolution(self, x_TC: Tensor, weight_CW: Tensor, *rest: Any, **bias: Any) -> Tensor:
        return super().short_convolution(x_TC, weight_CW.flip(1), *rest, **bias)


class LeavesOutTheBias(PlainRecurrence):
    def short_convolution(self, *given: Any, **bias: Any) -> Tensor:
        return super().short_convolution(*given)


class ForgetsPastInputs(PlainRecurrence):
    def short_convolution(self, *given: Any, **bias: Any) -> Tensor:
        state_RCP, states = given[2:]
        state_RCP[states.rows_B] = 0
        return super().short_convolution(*given, **bias)


class KeepsNoInputs(PlainRecurrence):
    def short_convolution(self, x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, *rest: Any, **bias: Any) -> Tensor:
        return super().short_convolution(x_TC, weight_CW, state_RCP.clone(), *rest, **bias)


class NumbersStatesByRequest(PlainRecurrence):
    def gated_delta_rule(self, *given: Any) -> Tensor:
        states = given[-1]
        return super().gated_delta_rule(*given[:-1], replace(states, rows_B=torch.arange(len(states.rows_B))))


class ForgetsTheDecay(PlainRecurrence):
    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Any) -> Tensor:
        return super().gated_delta_rule(q, k, v, torch.zeros_like(log_decay), *rest)


class GivesHeadsKeysRoundRobin(PlainRecurrence):
    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        repeats = v.shape[1] // q.shape[1]
        return super().gated_delta_rule(q.repeat(1, repeats, 1), k.repeat(1, repeats, 1), v, *rest)


class TakesKeysAsTheyAre(PlainRecurrence):
    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *rest: Any) -> Tensor:
        length = k.float().square().sum(-1, keepdim=True).sqrt().repeat_interleave(v.shape[1] // k.shape[1], 1)
        return super().gated_delta_rule(q, k, v / length, log_decay, beta * length[..., 0], *rest)


class StartsEveryChunkAnew(PlainRecurrence):
    def gated_delta_rule(self, *given: Any) -> Tensor:
        state, states = given[-2:]
        state[states.rows_B[states.num_decodes :]] = 0
        return super().gated_delta_rule(*given)


class NormsBehindTheGate(PlainRecurrence):
    def gated_delta_net(
        self, mixed_TC: Tensor, beta_TH: Tensor, decay_TH: Tensor, gate_THF: Tensor, net: DeltaNet, *state: Any
    ) -> Tensor:
        _, memory_RHEF, states = state
        _, num_heads, key_dim, value_dim = memory_RHEF.shape
        keys = (mixed_TC.shape[1] - num_heads * value_dim) // 2
        mixed_TC, sizes = (
            self.short_convolution(mixed_TC, net.conv_CW, *state[::2]),
            [keys, keys, num_heads * value_dim],
        )
        dims = key_dim, key_dim, value_dim
        heads = (part.unflatten(1, (-1, dim)) for part, dim in zip(mixed_TC.split(sizes, 1), dims, strict=True))
        gates = self.delta_gates(beta_TH, decay_TH, net.log_rate_H, net.decay_bias_H)
        gated_THF = self.gated_delta_rule(*heads, *gates, memory_RHEF, states) * functional.silu(gate_THF)
        return self.rms_norm(gated_THF.flatten(0, 1), net.norm_F, net.eps).view(gated_THF.shape)


class ClearsOtherStates(PlainRecurrence):
    def gated_delta_rule(self, *given: Any) -> Tensor:
        out_THF = super().gated_delta_rule(*given)
        given[-2][-1] = 0
        return out_THF


FAULTS = {
    ReversesTheConvolution: "test_short_convolution: what short_convolution of decodes",
    LeavesOutTheBias: "test_short_convolution: what short_convolution of decodes",
    ForgetsPastInputs: "test_short_convolution: what short_convolution of decodes",
    KeepsNoInputs: "test_short_convolution: the states that short_convolution of decodes",
    NumbersStatesByRequest: "test_gated_delta_rule: what gated_delta_rule of decodes",
    ForgetsTheDecay: "test_gated_delta_rule: what gated_delta_rule of decodes",
    GivesHeadsKeysRoundRobin: "test_gated_delta_rule: what gated_delta_rule of decodes",
    TakesKeysAsTheyAre: "test_gated_delta_rule: what gated_delta_rule of decodes",
    StartsEveryChunkAnew: "test_gated_delta_rule: what gated_delta_rule of prompts",
    NormsBehindTheGate: "test_gated_delta_net: what gated_delta_net of a decode",
    ClearsOtherStates: "test_gated_delta_rule: the states that gated_delta_rule of decodes",
}
