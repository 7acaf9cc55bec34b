"""The part of the kernels' conformance suite (suite.py) that is about the memory of results.

Later calls do not change the result of a call, which a model may still need.
Legend: T tokens, D hidden, O output features, X experts, A experts of a token, H heads, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, DeltaNet, is_offered
from hookline.core.testing.batches import make_batch, random_cache
from hookline.core.testing.checks import check_unchanged
from hookline.core.testing.kernels_suite.cases import AttentionCases, cache_blocks, describe, num_decodes_of
from hookline.core.testing.kernels_suite.recurrent import RecurrentStep

EPS = 1e-5
NUM_ROWS = (2, 33)
WIDTH, NUM_OUT = 32, 24
KEY_HEADS, KEY_DIM = 2, 16
Calls = Mapping[str, Callable[[], Any]]


class LifetimeCases(AttentionCases):
    """Tests that results are left alone by later calls, of the same operation and of the others."""

    def test_later_calls_overwrite_no_result_of_norms_and_products(self) -> None:
        """Each operation twice on other numbers, for a few rows and many."""
        for spec in filter(self.most_tokens, self.specs(self.groups[:1])):
            for num_rows in NUM_ROWS:
                kernels: Any = self.make(spec)
                calls = [self._row_calls(spec, kernels, num_rows, factor) for factor in (1.0, 0.5)]
                _call_in_turn(f"of {num_rows} rows ({describe(spec)})", *calls)

    def test_later_calls_overwrite_no_result_of_attention_experts_and_states(self) -> None:
        """Each operation twice on other numbers, for decodes and beside chunks."""
        for spec in self.specs(self.groups[:1]):
            decodes = [(spec.block_size + 1, 1), (3, 1), (5, 1)]
            for lengths in (decodes, [*decodes[:2], (spec.block_size + 4, 4)]):
                kernels: Any = self.make(spec)
                calls = [self._token_calls(spec, kernels, lengths, factor) for factor in (1.0, 0.5)]
                _call_in_turn(f"of a step of {len(lengths)} rows ({describe(spec)})", *calls)

    def _row_calls(self, spec: AttentionSpec, kernels: Any, num_rows: int, factor: float) -> Calls:
        x_TD, weight_D = self.random(spec, num_rows, WIDTH) * factor, self.random(spec, WIDTH)
        weight_OD, residual_TO = self.random(spec, NUM_OUT, WIDTH), self.random(spec, num_rows, NUM_OUT) * factor
        x_TDE, weight_E = x_TD.view(num_rows, 2, WIDTH // 2), weight_D[: WIDTH // 2].clone()
        rates_D, places_D = weight_D.float(), torch.arange(WIDTH, dtype=torch.int32, device=spec.device)
        masks_RW, index_N = torch.full((1, 1), 3, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int64)
        masks_RW, index_N = masks_RW.to(spec.device), index_N.to(spec.device)
        calls: dict[str, Callable[[], Any]] = {
            "rms_norm": lambda: kernels.rms_norm(x_TD.clone(), weight_D, EPS),
            "add_rms_norm": lambda: kernels.add_rms_norm(x_TD.clone(), x_TD.clone(), weight_D, EPS),
            "norm_add_rms_norm": lambda: kernels.norm_add_rms_norm(x_TD.clone(), weight_D, x_TD.clone(), weight_D, EPS),
            "norm_heads": lambda: kernels.norm_heads(x_TD.clone(), WIDTH, EPS, places_D, weight_D, WIDTH),
            "take_columns": lambda: kernels.take_columns(x_TD.clone(), places_D),
            "silu_mul": lambda: kernels.silu_mul(x_TD.clone()),
            "rms_norm_silu_mul": lambda: kernels.rms_norm_silu_mul(x_TDE.clone(), weight_E, EPS, x_TDE.clone()),
            "sigmoid_mul": lambda: kernels.sigmoid_mul(x_TD.clone(), x_TD.clone(), x_TD.clone()),
            "delta_gates": lambda: kernels.delta_gates(x_TD.clone(), x_TD.clone(), rates_D, rates_D),
            "mask_logits": lambda: kernels.mask_logits(x_TD.clone(), masks_RW, index_N),
            "linear": lambda: kernels.linear(x_TD.clone(), weight_OD, None),
            "linear_silu_mul": lambda: kernels.linear_silu_mul(x_TD.clone(), weight_OD),
            "linear_add_rms_norm": lambda: kernels.linear_add_rms_norm(
                x_TD.clone(), weight_OD, None, residual_TO.clone(), weight_D[:NUM_OUT], EPS
            ),
        }
        if is_offered(kernels.gelu_tanh_mul):
            calls["gelu_tanh_mul"] = lambda: kernels.gelu_tanh_mul(x_TD.clone())
        if is_offered(kernels.linear_gelu_tanh_mul):
            calls["linear_gelu_tanh_mul"] = lambda: kernels.linear_gelu_tanh_mul(x_TD.clone(), weight_OD)
        return calls

    def _token_calls(self, spec: AttentionSpec, kernels: Any, lengths: list[tuple[int, int]], factor: float) -> Calls:
        rows = self.scattered(spec, lengths)
        batch = make_batch(rows, spec, num_decodes=num_decodes_of(lengths))
        kv_2NSKE = random_cache(spec, cache_blocks(spec), seed=1, num_layers=2)[:, 1]
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv_THE = self.random(spec, batch.num_tokens, num_heads, spec.head_dim) * factor
        q_THE, k_TKE = qkv_THE[:, : spec.num_heads], qkv_THE[:, -spec.num_kv_heads :]
        kernels.prepare(batch)
        is_decode = batch.num_decodes == batch.num_requests
        calls: dict[str, Callable[[], Any]] = {
            "qk_norm_rope": lambda: kernels.qk_norm_rope(q_THE.clone(), k_TKE.clone(), batch.positions_T, None, None),
            "qk_norm_rope_write": lambda: kernels.qk_norm_rope_write(
                qkv_THE.flatten(1).clone(), kv_2NSKE, batch, None, None
            ),
            "attend": lambda: kernels.attend(q_THE.clone(), kv_2NSKE, batch),
            "qkv_attend": lambda: kernels.qkv_attend(qkv_THE.flatten(1).clone(), kv_2NSKE, batch, None, None),
        }
        others = self._expert_calls(spec, kernels, batch.num_tokens, factor) if is_decode else {}
        return {**calls, **others, **self._state_calls(spec, kernels, lengths, factor)}

    def _expert_calls(self, spec: AttentionSpec, kernels: Any, num_tokens: int, factor: float) -> Calls:
        x_TD, logits_TX = (self.random(spec, num_tokens, size) * factor for size in (16, 4))
        weight_TA, expert_TA = logits_TX.float().softmax(-1).topk(2)
        weights = self.random(spec, 4, 32, 16), self.random(spec, 4, 16, 16)
        bias_XF, norm_weight_D = self.random(spec, 4, 32), self.random(spec, 16)
        calls: dict[str, Callable[[], Any]] = {
            "route_experts": lambda: kernels.route_experts(logits_TX.clone(), 2, True),
            "expert_mlp": lambda: kernels.expert_mlp(x_TD.clone(), expert_TA, weight_TA, *weights),
            "gelu_expert_mlp": lambda: kernels.gelu_expert_mlp(x_TD.clone(), expert_TA, weight_TA, *weights),
            "clamped_expert_mlp": lambda: kernels.clamped_expert_mlp(
                x_TD.clone(), expert_TA, weight_TA, weights[0], bias_XF, weights[1], None, 1.7, 1.5
            ),
        }
        calls = {name: call for name, call in calls.items() if is_offered(getattr(kernels, name))}
        if "expert_mlp" in calls:
            calls["shared_expert_mlp"] = lambda: kernels.shared_expert_mlp(
                x_TD.clone(), expert_TA, weight_TA, *weights, weights[0][0], weights[1][0], logits_TX[:, :1]
            )
            calls["expert_mlp_add_rms_norm"] = lambda: kernels.expert_mlp_add_rms_norm(
                x_TD.clone(), expert_TA, weight_TA, *weights, x_TD.clone(), norm_weight_D, EPS
            )
        return calls

    def _state_calls(self, spec: AttentionSpec, kernels: Any, lengths: list[tuple[int, int]], factor: float) -> Calls:
        counts, num_decodes = tuple(num_queries for _, num_queries in lengths), num_decodes_of(lengths)
        num_tokens, states = sum(counts), RecurrentStep("a step", counts, num_decodes).rows(spec.device)
        x_TC, weight_CW = self.random(spec, num_tokens, WIDTH) * factor, self.random(spec, WIDTH, 4)
        state_RCP = self.random(spec, 9, WIDTH, 3)
        q_TKE = self.random(spec, num_tokens, KEY_HEADS, KEY_DIM) * factor
        gate_TH, state_RKEE = q_TKE[..., 0].float(), self.random(spec, 9, KEY_HEADS, KEY_DIM, KEY_DIM).float()
        calls: dict[str, Callable[[], Any]] = {
            "short_convolution": lambda: kernels.short_convolution(x_TC.clone(), weight_CW, state_RCP, states),
            "gated_delta_rule": lambda: kernels.gated_delta_rule(
                q_TKE.clone(), q_TKE.clone(), q_TKE.clone(), -gate_TH.abs(), gate_TH.sigmoid(), state_RKEE, states
            ),
        }
        keys, gate_TKE = KEY_HEADS * KEY_DIM, q_TKE.clone()
        mixed_TC, conv_RCP = q_TKE.flatten(1).repeat(1, 3), self.random(spec, 9, 3 * keys, 3)
        net = DeltaNet(self.random(spec, 3 * keys, 4), gate_TH[0], gate_TH[0], self.random(spec, KEY_DIM), EPS)
        calls["gated_delta_net"] = lambda: kernels.gated_delta_net(
            mixed_TC.clone(), gate_TH, gate_TH, gate_TKE, net, conv_RCP, state_RKEE, states
        )
        return {name: call for name, call in calls.items() if is_offered(getattr(kernels, name))}


def _call_in_turn(what: str, first: Calls, later: Calls) -> None:
    """Make the first calls, then the later ones, and check that the results of the first have not changed."""
    results: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, call in first.items():
        found = call()
        parts = (found,) if isinstance(found, Tensor) else tuple(found)
        results[name] = [(part.clone(), part) for part in parts]
    for call in later.values():
        call()
    for name, pairs in results.items():
        for before, after in pairs:
            check_unchanged(f"what {name} {what} returned, which is the caller's, by a later call,", before, after)
