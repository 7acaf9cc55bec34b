"""The part of the kernels' conformance suite (suite.py) that is about batch-invariant mode: bit by bit.

Legend: T tokens, N rows picked of them, D hidden, O output features, F half of gate and up, X experts, H heads, K kv
heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import (
    ATTENTION_FEATURES,
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    QKNorm,
    Rope,
    is_offered,
)
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.core.testing.checks import check
from hookline.core.testing.kernels_suite.cases import AttentionCases, cache_blocks, describe, forms, with_window

EPS = 1e-5
NUM_ROWS = 70
LINEAR_SHAPES = ((64, 102), (1024, 66), (96, 10))
"""Input and output features."""
LONG = 1100
"""Tokens of a context that kernels are likely to cut."""
Pick = Callable[[Tensor], Any]
"""A function: indices (N,) of rows of the inputs -> the operation's result for them, a tensor or several."""


class InvarianceCases(AttentionCases):
    """Tests of kernels that declare Needs.batch_invariant; others pass.

    batch_invariant: as in the entry's Needs. `make` is given specs with batch_invariant set.
    """

    batch_invariant: ClassVar[bool] = False

    def test_a_row_has_the_same_bits_in_every_batch(self) -> None:
        """Whatever the other rows are, how many, and in which place it lies."""
        for spec in self._invariant_specs(self.groups[:1]):
            for what, pick in self._row_operations(spec, self.make(spec)):
                whole = _tensors(pick(torch.arange(NUM_ROWS, device=spec.device)))
                for rows_N in _some_rows(spec):
                    for mine, all_rows in zip(_tensors(pick(rows_N)), whole, strict=True):
                        is_same_N = (mine == all_rows[rows_N]).flatten(1).all(1)
                        where = f"{int(rows_N[int(is_same_N.int().argmin())])} among {len(rows_N)}"
                        message = f"{what} gives row {where} rows other bits than among {NUM_ROWS} ({describe(spec)})"
                        check(bool(is_same_N.all()), message)

    def test_a_token_attends_with_the_same_bits_in_every_chunk(self) -> None:
        """In the whole prompt, in chunks cut anywhere, as a decode, in a crowd, and over blocks elsewhere."""
        for spec in self._invariant_specs(self.groups[-1:]):
            length = 2 * spec.block_size + 9
            self._compare_cuts(spec, length, length, (0, 1, 7, spec.block_size, spec.block_size + 3, length))
            if self.attention:
                form, window = self.form(spec, *ATTENTION_FEATURES), self.window(spec.block_size + 3)
                self._compare_cuts(spec, length, length, (0, 20, spec.block_size + 9, length), form, window)

    def test_the_last_tokens_of_a_long_context_attend_with_the_same_bits_in_every_chunk(self) -> None:
        """Kernels that cut contexts cut them at the same places for a prompt and for one or many decodes."""
        for spec in self._invariant_specs(self.groups[-1:]):
            spec = replace(spec, max_model_len=2 * LONG)
            cuts = (LONG - 90, 1020, 1023, 1030, LONG - 1, LONG)
            self._compare_cuts(spec, LONG, 90, cuts, decodes=(1023, 1024, LONG - 1))

    def _invariant_specs(self, groups: Sequence[int]) -> Iterator[AttentionSpec]:
        for spec in self.specs(groups) if self.batch_invariant else ():
            yield replace(spec, batch_invariant=True)

    def _compare_cuts(
        self,
        spec: AttentionSpec,
        length: int,
        num_queries: int,
        cuts: Sequence[int],
        form: AttentionForm = PLAIN_ATTENTION,
        window: int | None = None,
        decodes: Sequence[int] | None = None,
    ) -> None:
        """The last queries of a sequence, all at once, and by themselves, in chunks and beside others."""
        here, *others = scatter_rows(
            [(length, length), (9, 1), (31, 1), (7, 7)], spec.block_size, cache_blocks(spec), 3
        )
        kv_2NSKE = random_cache(spec, cache_blocks(spec), seed=1, num_layers=2)[:, 1]
        q_LHE = self.random(spec, length, spec.num_heads, spec.head_dim)
        kernels, first_query = self.make(spec), length - num_queries

        def _attend(rows: Sequence[Row], num_decodes: int, q_THE: Tensor, cache: Tensor = kv_2NSKE) -> Tensor:
            batch = make_batch(rows, spec, num_decodes=num_decodes)
            if window is not None:
                batch = with_window(batch, rows, spec, window)
            kernels.prepare(batch)
            out_THE: Tensor = kernels.attend(q_THE.clone(), cache, batch, *forms(form))
            return out_THE

        def _compare(what: str, found_THE: Tensor, first: int) -> None:
            same = torch.equal(found_THE, expected_QHE[first - first_query : first - first_query + len(found_THE)])
            named = f"{what} of {length} ({describe(spec)}, {', '.join(sorted(form.features)) or 'plain'})"
            check(same, f"attend gives other bits than in the whole prompt to {named}")

        expected_QHE = _attend([Row(length, num_queries, here.blocks)], 0, q_LHE[first_query:])
        for first, stop in pairwise(cuts):
            chunk = [Row(stop, stop - first, here.blocks)]
            _compare(f"the chunk of tokens {first} to {stop}", _attend(chunk, 0, q_LHE[first:stop]), first)
        other_q_THE = self.random(spec, 9, spec.num_heads, spec.head_dim)
        for token in decodes or (0, spec.block_size - 1, spec.block_size, length - 2, length - 1):
            row, q_1HE = Row(token + 1, 1, here.blocks), q_LHE[token : token + 1]
            _compare(f"token {token} as a decode", _attend([row], 1, q_1HE), token)
            crowd_THE = _attend([*others[:2], row, others[2]], 3, torch.cat((other_q_THE[:2], q_1HE, other_q_THE[2:])))
            _compare(f"token {token} as a decode beside other rows", crowd_THE[2:3], token)
            many_THE = _attend([*[others[1]] * 40, row], 41, torch.cat((other_q_THE[:1].expand(40, -1, -1), q_1HE)))
            _compare(f"token {token} as a decode beside 40 others", many_THE[40:], token)
        moved = Row(length, num_queries, tuple(reversed(here.blocks)))
        moved_2NSKE = kv_2NSKE.clone()
        moved_2NSKE[:, list(moved.blocks)] = kv_2NSKE[:, list(here.blocks)]
        _compare("all its tokens in other blocks", _attend([moved], 0, q_LHE[first_query:], moved_2NSKE), first_query)

    def _row_operations(self, spec: AttentionSpec, kernels: Any) -> Iterator[tuple[str, Pick]]:
        """Operations by name, each as a function of the rows to compute."""
        for width in (64, 100, 1024):
            x_TD, weight_D = self.random(spec, NUM_ROWS, width), 1 + 0.5 * self.random(spec, width)
            yield "rms_norm", _picking(kernels.rms_norm, [x_TD], weight_D, EPS)
            yield "add_rms_norm", _picking(kernels.add_rms_norm, [x_TD, x_TD.flip(0)], weight_D, EPS)
            places_D = torch.arange(width, dtype=torch.int32, device=spec.device).flip(0)
            yield "norm_heads", _picking(kernels.norm_heads, [x_TD], width // 4, EPS, places_D, weight_D, width)
            yield "silu_mul", _picking(kernels.silu_mul, [x_TD * 4])
            if is_offered(kernels.gelu_tanh_mul):
                yield "gelu_tanh_mul", _picking(kernels.gelu_tanh_mul, [x_TD * 2])
        yield from self._products(spec, kernels)
        yield "qk_norm_rope", self._rotation(spec, kernels)
        if is_offered(kernels.expert_mlp):
            yield "expert_mlp", self._experts(spec, kernels.expert_mlp)
            yield "shared_expert_mlp", self._experts(spec, kernels.shared_expert_mlp, with_shared=True)
            yield "expert_mlp_add_rms_norm", self._experts(spec, kernels.expert_mlp_add_rms_norm, with_norm=True)
        if is_offered(kernels.gelu_expert_mlp):
            yield "gelu_expert_mlp", self._experts(spec, kernels.gelu_expert_mlp)
        if is_offered(kernels.clamped_expert_mlp):
            yield "clamped_expert_mlp", self._clamped_experts(spec, kernels)

    def _products(self, spec: AttentionSpec, kernels: Any) -> Iterator[tuple[str, Pick]]:
        for width, num_out in LINEAR_SHAPES:
            x_TD, weight_OD = self.random(spec, NUM_ROWS, width), self.random(spec, num_out, width) * width**-0.5
            bias_O = self.random(spec, num_out)
            transposed_OD = weight_OD.t().contiguous().t()  # as models have them on a CPU
            for what, stored_OD in (("", weight_OD), (" with a transposed weight", transposed_OD)):
                named = f"of {width} to {num_out} features{what}"
                yield f"linear {named}", _picking(kernels.linear, [x_TD], stored_OD, None)
                yield f"linear {named} and bias", _picking(kernels.linear, [x_TD], stored_OD, bias_O)
                yield f"linear_silu_mul {named}", _picking(kernels.linear_silu_mul, [x_TD], stored_OD)
                if is_offered(kernels.linear_gelu_tanh_mul):
                    gated = _picking(kernels.linear_gelu_tanh_mul, [x_TD], stored_OD)
                    yield f"linear_gelu_tanh_mul {named}", gated
            yield (
                f"linear_add_rms_norm of {width} to {num_out} features",
                self._with_norm(spec, kernels, x_TD, weight_OD),
            )

    def _with_norm(self, spec: AttentionSpec, kernels: Any, x_TD: Tensor, weight_OD: Tensor) -> Pick:
        residual_TO, norm_weight_O = self.random(spec, NUM_ROWS, len(weight_OD)), torch.ones_like(weight_OD[:, 0])

        def _pick_rows(rows_N: Tensor) -> Any:
            return kernels.linear_add_rms_norm(x_TD[rows_N], weight_OD, None, residual_TO[rows_N], norm_weight_O, EPS)

        return _pick_rows

    def _rotation(self, spec: AttentionSpec, kernels: Any) -> Pick:
        angle_PF = torch.outer(torch.arange(NUM_ROWS), 100.0 ** -torch.linspace(0, 1, spec.head_dim // 2))
        rope = Rope(torch.cat((angle_PF.cos(), angle_PF.sin()), -1).to(spec.device))
        weight_E = 1 + 0.3 * self.random(spec, spec.head_dim)
        q_THE = self.random(spec, NUM_ROWS, spec.num_heads, spec.head_dim)
        k_TKE = self.random(spec, NUM_ROWS, spec.num_kv_heads, spec.head_dim)
        norm = QKNorm(weight_E, weight_E.flip(0), EPS)
        return lambda rows_N: kernels.qk_norm_rope(q_THE[rows_N], k_TKE[rows_N], rows_N, rope, norm)

    def _experts(
        self, spec: AttentionSpec, operation: Callable[..., Any], *, with_norm: bool = False, with_shared: bool = False
    ) -> Pick:
        num_experts, top_k, width, inner = 5, 3, 64, 48
        x_TD = self.random(spec, NUM_ROWS, width)
        gate_up_XFD = self.random(spec, num_experts, 2 * inner, width) * width**-0.5
        down_XDF = self.random(spec, num_experts, width, inner) * inner**-0.5
        order_TX = torch.rand(NUM_ROWS, num_experts, generator=torch.Generator().manual_seed(5)).argsort(-1)
        expert_TA = order_TX[:, :top_k].to(spec.device)
        weight_TA = self.random(spec, NUM_ROWS, top_k).float().softmax(-1)
        weights, residual_TD, norm_weight_D = (gate_up_XFD, down_XDF), x_TD.flip(0), torch.ones_like(x_TD[0])

        def _pick_rows(rows_N: Tensor) -> Any:
            given = x_TD[rows_N], expert_TA[rows_N], weight_TA[rows_N], *weights
            if with_shared:
                return operation(*given, gate_up_XFD[0], down_XDF[0], given[0][:, :1])
            if with_norm:
                return operation(*given, residual_TD[rows_N], norm_weight_D, EPS)
            return operation(*given)

        return _pick_rows

    def _clamped_experts(self, spec: AttentionSpec, kernels: Any) -> Pick:
        num_experts, top_k, width, inner = 5, 3, 64, 48
        x_TD = self.random(spec, NUM_ROWS, width)
        weights = (
            self.random(spec, num_experts, 2 * inner, width) * width**-0.5,
            self.random(spec, num_experts, 2 * inner),
            self.random(spec, num_experts, width, inner) * inner**-0.5,
            self.random(spec, num_experts, width),
        )
        order_TX = torch.rand(NUM_ROWS, num_experts, generator=torch.Generator().manual_seed(6)).argsort(-1)
        expert_TA = order_TX[:, :top_k].to(spec.device)
        weight_TA = self.random(spec, NUM_ROWS, top_k).float().softmax(-1)
        return lambda rows: kernels.clamped_expert_mlp(
            x_TD[rows], expert_TA[rows], weight_TA[rows], *weights, 1.702, 7.0
        )


def _picking(operation: Callable[..., Any], tensors: Sequence[Tensor], *rest: Any) -> Pick:
    """The operation on some rows of these tensors, with further arguments as they are."""
    return lambda rows_N: operation(*(tensor[rows_N] for tensor in tensors), *rest)


def _tensors(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _some_rows(spec: AttentionSpec) -> Iterator[Tensor]:
    """Indices of one row, of a few and of many rows, in any order."""
    order_T = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2)).to(spec.device)
    for first, count in ((0, 1), (1, 1), (5, 3), (9, 17), (20, 33), (0, NUM_ROWS)):
        yield order_T[first : first + count]
