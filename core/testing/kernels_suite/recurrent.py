"""The part of the kernels' conformance suite (suite.py) that is about recurrent states.

The reference takes one token after the other, in float64. Legend: T tokens, C channels, W width of a convolution,
P = W - 1 past inputs, R rows of states, K key heads, H value heads, E key head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import AttentionSpec, DeltaNet, StateRows, is_offered
from hookline.core.testing.checks import PoisonedMemory, check_close, check_form, check_unchanged
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.kernels_suite.cases import AttentionCases, describe

NUM_ROWS = 9
WIDTH = 4
NUM_CHANNELS = 70
KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 16, 24
EPS = 1e-6


@dataclass(frozen=True)
class RecurrentStep:
    """Requests with these numbers of tokens, decodes first."""

    name: str
    counts: tuple[int, ...]
    num_decodes: int

    def rows(self, device: torch.device) -> StateRows:
        """Requests in rows that do not follow one another."""
        starts = np.array([0, *accumulate(self.counts)], dtype=np.int32)
        rows_B = torch.tensor([(5 * request + 3) % NUM_ROWS for request in range(len(self.counts))], device=device)
        starts_B1, is_new_B = torch.from_numpy(starts.copy()).to(device), torch.zeros_like(rows_B, dtype=torch.bool)
        return StateRows({}, rows_B, starts_B1, is_new_B, self.num_decodes, max(self.counts), starts)


STEPS = (
    RecurrentStep("decodes", (1, 1, 1), 3),
    RecurrentStep("prompts", (36, 1, 3), 0),
    RecurrentStep("a mixed step", (1, 1, 2, 17), 2),
)


LARGE_STEP = (1, 1, 16)
"""Tokens of all requests but the last of a step of as many tokens as there may be."""


class RecurrentCases(AttentionCases):
    """Tests of short_convolution and gated_delta_rule; kernels without them pass."""

    def test_short_convolution(self) -> None:
        """From each request's own past inputs, and the last ones kept; other states stay as they are."""
        for spec, kernels in self._offering_state("short_convolution"):
            kept: list[Tensor] = []
            for step in (*STEPS, *self._largest(spec)):
                self._check_convolution(spec, kernels, step, kept)
                self._check_convolution(spec, kernels, step, kept, has_bias=True)

    def test_gated_delta_rule(self) -> None:
        """From each request's own state, which is left as the last token leaves it; other states stay as they are."""
        for spec, kernels in self._offering_state("gated_delta_rule"):
            for step in (*STEPS, *self._largest(spec)):
                self._check_delta_rule(spec, kernels, step)

    def test_gated_delta_net(self) -> None:
        """As the convolution, the rule and the gates that it consists of, for one request and for several."""
        kept: list[DeltaNet] = []
        for spec, kernels in self._offering_state("gated_delta_net"):
            for step in (RecurrentStep("a decode", (1,), 1), *STEPS):
                self._check_delta_net(spec, kernels, step, kept)

    def _check_delta_net(self, spec: AttentionSpec, kernels: Any, step: RecurrentStep, kept: list[DeltaNet]) -> None:
        num_heads, keys = KEY_HEADS * 2, KEY_HEADS * KEY_DIM
        sizes = [2 * keys + num_heads * VALUE_DIM, num_heads * VALUE_DIM, num_heads, num_heads]
        products_TO = self.random(spec, sum(step.counts), sum(sizes))
        mixed_TC, gate_TV, beta_TH, decay_TH = products_TO.split_with_sizes(sizes, 1)
        gate_THF, rate_H = gate_TV.view(-1, num_heads, VALUE_DIM), self.random(spec, num_heads).float()
        norm_F = 1 + 0.2 * self.random(spec, VALUE_DIM)
        conv_CW = self.random(spec, sizes[0], WIDTH).roll(len(kept), 0)
        kept.append(net := DeltaNet(conv_CW, rate_H, rate_H.flip(0), norm_F, EPS))
        conv_RCP = self.random(spec, NUM_ROWS, sizes[0], WIDTH - 1).flip(0)
        memory_RHEF = self.random(spec, NUM_ROWS, num_heads, KEY_DIM, VALUE_DIM).float()
        states, before = step.rows(spec.device), (conv_RCP.clone(), memory_RHEF.clone())
        exact_states = conv_RCP.double(), memory_RHEF.double()
        expected_THF = _delta_net(mixed_TC, beta_TH, decay_TH, gate_THF, net, *exact_states, states)
        what = f"gated_delta_net of {step.name} ({describe(spec)})"
        with PoisonedMemory():
            out = kernels.gated_delta_net(mixed_TC, beta_TH, decay_TH, gate_THF, net, conv_RCP, memory_RHEF, states)
        allowed = 3 * self.tolerance(spec, "gated_delta_net")  # each of its operations may round
        check_form(f"what {what} returns", out, expected_THF.shape, spec.dtype)
        check_close(f"what {what} returns", out, expected_THF, allowed)
        others = [row for row in range(NUM_ROWS) if row not in states.rows_B.tolist()]
        for name, found, exactly, old in zip(
            ("inputs", "memory"), (conv_RCP, memory_RHEF), exact_states, before, strict=True
        ):
            check_close(f"the {name} that {what} leaves", found, exactly, allowed)
            check_unchanged(f"another request's {name}, by {what},", old[others], found[others])

    def test_recurrent_layers_of_captured_steps_never_wait_for_the_host(self) -> None:
        """Requests without tokens leave their states alone, and prompts' lengths are known to the device alone."""
        captured = STEPS[:1] if not self.graph_prefill else (STEPS[0], RecurrentStep("prompts", (1, 0, 17, 0), 1))
        for spec, kernels in self._offering_state("short_convolution") if self.graph_safe else ():
            kept: list[Tensor] = []
            for step in captured:
                self._check_convolution(spec, kernels, step, kept, is_captured=True)
        for spec, kernels in self._offering_state("gated_delta_rule") if self.graph_safe else ():
            for step in captured:
                self._check_delta_rule(spec, kernels, step, is_captured=True)

    def _check_convolution(
        self,
        spec: AttentionSpec,
        kernels: Any,
        step: RecurrentStep,
        kept: list[Tensor],
        *,
        is_captured: bool = False,
        has_bias: bool = False,
    ) -> None:
        """With another weight for each step; `kept` holds them, since kernels may know them by address."""
        # Columns of a wider product, as a model splits it.
        x_TC = self.random(spec, sum(step.counts), NUM_CHANNELS + 5)[:, :NUM_CHANNELS]
        kept.append(weight_CW := self.random(spec, NUM_CHANNELS, WIDTH).roll(len(kept), 0))
        state_RCP = self.random(spec, NUM_ROWS, NUM_CHANNELS, WIDTH - 1).flip(0)
        expected_state = state_RCP.double()
        bias = {"bias_C": self.random(spec, NUM_CHANNELS)} if has_bias else {}
        expected_TC = _convolved(x_TC, weight_CW, expected_state, step.rows(spec.device), **bias)
        call = partial(kernels.short_convolution, x_TC, weight_CW, **bias)
        self._check_states(spec, "short_convolution", step, call, state_RCP, expected_TC, expected_state, is_captured)

    def _check_delta_rule(
        self, spec: AttentionSpec, kernels: Any, step: RecurrentStep, *, is_captured: bool = False
    ) -> None:
        num_tokens, num_heads = sum(step.counts), KEY_HEADS * 2
        q_TKE = self.random(spec, num_tokens, KEY_HEADS, KEY_DIM)
        v_THF = self.random(spec, num_tokens, num_heads, VALUE_DIM)
        log_decay_TH = -self.random(spec, num_tokens, num_heads).float().abs()
        beta_TH = self.random(spec, num_tokens, num_heads).float().flip(0).sigmoid()
        given = q_TKE, q_TKE.flip(0) + 0.5, v_THF, log_decay_TH, beta_TH
        state_RHEF = self.random(spec, NUM_ROWS, num_heads, KEY_DIM, VALUE_DIM).float()
        expected_state = state_RHEF.double()
        q, k, v, log_decay, beta = (x.double() for x in given)
        expected_THF = _corrected(q, k, v, log_decay, beta, expected_state, step.rows(spec.device))
        call = partial(kernels.gated_delta_rule, *given)
        self._check_states(spec, "gated_delta_rule", step, call, state_RHEF, expected_THF, expected_state, is_captured)

    def _check_states(
        self,
        spec: AttentionSpec,
        operation: str,
        step: RecurrentStep,
        call: Any,
        state: Tensor,
        expected: Tensor,
        expected_state: Tensor,
        is_captured: bool,
    ) -> None:
        states, before = step.rows(spec.device), state.clone()
        what = f"{operation} of {step.name}{' in a graph' if is_captured else ''} ({describe(spec)})"
        if is_captured and step.num_decodes < len(step.counts):
            states = replace(states, query_starts_host=None)
        if is_captured:
            call(state.clone(), states)  # the first call may compile
            with torch.no_grad(), no_host_sync(what):
                out = call(state, states)
        else:
            with PoisonedMemory():
                out = call(state, states)
        check_form(f"what {what} returns", out, expected.shape, spec.dtype)
        check_close(f"what {what} returns", out, expected, self.tolerance(spec, operation))
        check_close(f"the states that {what} leaves", state, expected_state, self.tolerance(spec, operation))
        written = set(states.rows_B[states.query_starts_B1.diff() > 0].tolist())
        others = [row for row in range(NUM_ROWS) if row not in written]
        check_unchanged(f"another request's state, by {what},", before[others], state[others])

    def _largest(self, spec: AttentionSpec) -> Iterator[RecurrentStep]:
        for most in self.most_tokens(spec):
            yield RecurrentStep(f"a step of {most} tokens", (*LARGE_STEP, most - sum(LARGE_STEP)), 2)

    def _offering_state(self, operation: str) -> Iterator[tuple[AttentionSpec, Any]]:
        for spec in self.specs(self.groups[:1]):
            kernels: Any = self.make(spec)
            if is_offered(getattr(kernels, operation)):
                yield spec, kernels


def _requests(states: StateRows) -> Iterator[tuple[int, range]]:
    """Row of the state and tokens of each request."""
    starts = states.query_starts_B1.tolist()
    for request, row in enumerate(states.rows_B.tolist()):
        yield row, range(starts[request], starts[request + 1])


def _convolved(
    x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, states: StateRows, bias_C: Tensor | None = None
) -> Tensor:
    out_TC, x_TC, bias = torch.empty_like(x_TC, dtype=torch.float64), x_TC.double(), 0.0 if bias_C is None else bias_C
    for row, tokens in _requests(states):
        for token in tokens:
            window_CW = torch.cat((state_RCP[row], x_TC[token, :, None]), 1)
            total_C = (window_CW * weight_CW.double()).sum(1) + bias
            out_TC[token] = total_C * total_C.sigmoid()
            state_RCP[row] = window_CW[:, 1:]
    return out_TC


def _delta_net(
    mixed_TC: Tensor, beta_TH: Tensor, decay_TH: Tensor, gate_THF: Tensor, net: DeltaNet,
    conv_RCP: Tensor, memory_RHEF: Tensor, states: StateRows,
) -> Tensor:  # fmt: skip
    mixed_TC = _convolved(mixed_TC, net.conv_CW, conv_RCP, states)
    keys, dims = KEY_HEADS * KEY_DIM, (KEY_DIM, KEY_DIM, VALUE_DIM)
    parts = mixed_TC.split_with_sizes([keys, keys, gate_THF[0].numel()], 1)
    q_TKE, k_TKE, v_THF = (part.reshape(len(part), -1, dim) for part, dim in zip(parts, dims, strict=True))
    log_decay_TH = -net.log_rate_H.double().exp() * functional.softplus(decay_TH.double() + net.decay_bias_H.double())
    out_THF = _corrected(q_TKE, k_TKE, v_THF, log_decay_TH, beta_TH.double().sigmoid(), memory_RHEF, states)
    scale_TH1 = (out_THF.square().mean(-1, keepdim=True) + net.eps).rsqrt()
    return out_THF * scale_TH1 * net.norm_F.double() * functional.silu(gate_THF.double())


def _corrected(
    q_TKE: Tensor,
    k_TKE: Tensor,
    v_THF: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    state_RHEF: Tensor,
    states: StateRows,
) -> Tensor:
    group, out_THF = v_THF.shape[1] // q_TKE.shape[1], torch.empty_like(v_THF)
    q_THE, k_THE = (
        (x_TKE / (x_TKE.square().sum(-1, keepdim=True) + EPS).sqrt()).repeat_interleave(group, 1)
        for x_TKE in (q_TKE, k_TKE)
    )
    for row, tokens in _requests(states):
        for token in tokens:
            state_HEF = state_RHEF[row] * log_decay_TH[token].exp()[:, None, None]
            recalled_HF = (state_HEF * k_THE[token][..., None]).sum(1)
            update_HF = beta_TH[token][:, None] * (v_THF[token] - recalled_HF)
            state_RHEF[row] = state_HEF + k_THE[token][..., None] * update_HF[:, None]
            out_THF[token] = (state_RHEF[row] * q_THE[token][..., None]).sum(1) * q_TKE.shape[-1] ** -0.5
    return out_THF
