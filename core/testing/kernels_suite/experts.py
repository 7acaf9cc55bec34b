"""The part of the kernels' conformance suite (suite.py) that is about experts.

Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import FP8, INT4, INT8, AttentionSpec, ScaledMatrix, Scheme, is_offered
from hookline.core.testing.checks import PoisonedMemory, check, check_close, check_form, check_unchanged
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.kernels_suite.cases import AttentionCases, describe, exact
from hookline.core.testing.plain_kernels import PlainKernels

EPS = 1e-5
SHAPES = ((1, 4, 1, 16, 16), (17, 5, 3, 48, 40))
"""T, X, A, D, F."""
SCHEMES = (
    Scheme(FP8, 128, 128, activations="dynamic"),
    Scheme(FP8, 1, 0),
    Scheme(INT8, 1, 0),
    Scheme(INT4, 1, 32),
    Scheme(INT4, 1, 128, has_zeros=True),
)
"""Forms in which experts of published checkpoints are stored."""


class ExpertCases(AttentionCases):
    """Tests of route_experts, expert_mlp, its fused forms, and clamped_expert_mlp; kernels without them pass."""

    def test_router_logits(self) -> None:
        """In float32, of rows that lie apart, where a rounded weight would give others."""
        for spec in self.specs(self.groups[:1]):
            kernels, kept = self.make_poisoned(spec), list[Tensor]()
            most = ((num_tokens, 5, 48) for num_tokens in self.most_tokens(spec))
            for num_tokens, num_experts, width in ((1, 5, 48), (2, 64, 200), (17, 20, 136), *most):
                x_TD = self.random(spec, num_tokens, width + 8)[:, :width]
                drawn_XD = torch.randn(num_experts, width, generator=torch.Generator().manual_seed(width))
                kept.append(weight_XD := drawn_XD.to(spec.device))
                with PoisonedMemory():
                    actual_TX = kernels.router_logits(x_TD, weight_XD)
                what = f"router_logits of {num_tokens} x {width} to {num_experts} ({describe(spec)})"
                check_form(what, actual_TX, (num_tokens, num_experts), torch.float32)
                check_close(what, actual_TX, x_TD.double() @ weight_XD.double().T, self.tolerances[torch.float32])

    def test_route_experts(self) -> None:
        """The most probable experts, best first, and their probabilities, with and without scales and shared ones."""
        kept: list[Tensor] = []
        for spec, kernels in self._offering("route_experts"):
            most = ((num_tokens, 4, 1) for num_tokens in self.most_tokens(spec))
            for rows, num_experts, top_k in ((7, 4, 1), (7, 9, 3), (7, 64, 8), *most):
                order_TX = torch.rand(rows, num_experts, generator=torch.Generator().manual_seed(top_k)).argsort(-1)
                logits_TX = (order_TX * 0.25 - 3).to(spec.device, spec.dtype)  # no two of a row are equal
                kept.append(scale_X := 1 + 0.3 * self.random(spec, num_experts).roll(rows))
                forms: tuple[tuple[str, Tensor | None, int], ...] = (
                    ("", None, 0), (", scaled", scale_X, 0), (", 2 shared", None, 2),
                )  # fmt: skip
                for normalise, (told, scales, num_shared) in product((False, True), forms):
                    what = f"of route_experts, {top_k} of {num_experts} for {rows} tokens"
                    what += f", normalise={normalise}{told} ({describe(spec)})"
                    options: Any = () if not told else (scales,) if scales is not None else (None, num_shared)
                    expected = PlainKernels(None, exact(spec)).route_experts(logits_TX, top_k, normalise, *options)
                    with PoisonedMemory():
                        expert_TA, weight_TA = kernels.route_experts(logits_TX.clone(), top_k, normalise, *options)
                    check_form(f"the experts {what}", expert_TA, (rows, top_k + num_shared), torch.int64)
                    check_form(f"the weights {what}", weight_TA, (rows, top_k + num_shared), torch.float32)
                    check(torch.equal(expert_TA, expected[0]), f"the experts {what} are not the most probable ones")
                    check_close(f"the weights {what}", weight_TA, expected[1], 1e-5)

    def test_expert_mlp(self) -> None:
        """For one token and for many, routed evenly and all to the same experts; with gelu_expert_mlp, that too."""
        self._check_expert_mlp("expert_mlp")
        self._check_expert_mlp("gelu_expert_mlp")

    def _check_expert_mlp(self, operation: str) -> None:
        for spec, kernels in self._offering(operation):
            for case, given in self._inputs(spec):
                what, plain = case.replace("expert_mlp", operation), PlainKernels(None, exact(spec))
                expected_TD = getattr(plain, operation)(given[0].double(), *given[1:])
                before = [tensor.clone() for tensor in given]
                with PoisonedMemory():
                    out_TD = getattr(kernels, operation)(*given)
                check_form(what, out_TD, given[0].shape, spec.dtype)
                allowed = 2 * self.tolerance(spec, operation)  # Two products, both rounded.
                check_close(what, out_TD, expected_TD, allowed)
                for name, old, new in zip(("x", "expert", "weight", "gate_up", "down"), before, given, strict=True):
                    check_unchanged(f"{name}, which {operation} was given,", old, new)

    def test_expert_mlp_add_rms_norm(self) -> None:
        """Returns (normalised sum, sum), in this order; kernels with expert_mlp have it, if only by inheritance."""
        kept: list[Tensor] = []
        for spec, kernels in self._offering("expert_mlp"):
            for what, given in self._inputs(spec):
                residual_TD, plain = self.random(spec, *given[0].shape) * 2, PlainKernels(None, exact(spec))
                kept.append(weight_D := 1.5 - self.random(spec, given[0].shape[1]).roll(len(kept)) * 0.2)
                summed_TD = plain.expert_mlp(given[0].double(), *given[1:])
                expected = plain.add_rms_norm(summed_TD, residual_TD.double(), weight_D, EPS)
                before = [tensor.clone() for tensor in given]
                with PoisonedMemory():
                    actual = kernels.expert_mlp_add_rms_norm(*given, residual_TD, weight_D, EPS)
                check(len(actual) == 2, "expert_mlp_add_rms_norm must return (normalised, residual)")
                for part, found, wanted in zip(("norm", "sum"), actual, expected, strict=True):
                    name = f"the {part} that {what.replace('expert_mlp', 'expert_mlp_add_rms_norm')} returns"
                    check_form(name, found, given[0].shape, spec.dtype)
                    allowed = 2 * self.tolerance(spec, "expert_mlp_add_rms_norm")  # Two products, both rounded.
                    check_close(name, found, wanted, allowed)
                for name, old, new in zip(("x", "expert", "weight", "gate_up", "down"), before, given, strict=True):
                    check_unchanged(f"{name}, which expert_mlp_add_rms_norm was given,", old, new)

    def test_shared_expert_mlp(self) -> None:
        """With an expert for every token, as large as the others and larger; its gates are columns of a product."""
        kept: list[Tensor] = []
        for spec, kernels in self._offering("expert_mlp"):
            for what, given in self._inputs(spec):
                hidden, inner = given[4].shape[1:]
                gate_T1 = self.random(spec, len(given[0]), 3).roll(1, 1)[:, 1:2] * 2
                for size in (inner, inner + 8):
                    kept.append(gate_up_FD := self.random(spec, 2 * size, hidden).roll(len(kept), 0) * hidden**-0.5)
                    kept.append(down_DF := self.random(spec, hidden, size).roll(len(kept), 0) * size**-0.5)
                    plain, weights = PlainKernels(None, exact(spec)), (gate_up_FD, down_DF)
                    exactly = (*(one.double() for one in weights), gate_T1.double())
                    expected_TD = plain.shared_expert_mlp(given[0].double(), *given[1:], *exactly)
                    before = [tensor.clone() for tensor in given]
                    with PoisonedMemory():
                        out_TD = kernels.shared_expert_mlp(*given, *weights, gate_T1)
                    name = f"{what.replace('expert_mlp', 'shared_expert_mlp')}, and one of {size} shared"
                    check_form(name, out_TD, given[0].shape, spec.dtype)
                    check_close(
                        name, out_TD, expected_TD, 3 * self.tolerance(spec, "shared_expert_mlp")
                    )  # rounded thrice
                    for part, old, new in zip(("x", "expert", "weight", "gate_up", "down"), before, given, strict=True):
                        check_unchanged(f"{part}, which shared_expert_mlp was given,", old, new)

    def test_clamped_expert_mlp(self) -> None:
        """With both biases, and without that of the second product; values on both sides of the limit."""
        kept: list[Tensor | None] = []
        for spec, kernels in self._offering("clamped_expert_mlp"):
            for what, (x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF) in self._inputs(spec):
                bias_XF = self.random(spec, *gate_up_XFD.shape[:2]).roll(len(kept), 1)
                for bias_XD in (self.random(spec, *down_XDF.shape[:2]).roll(len(kept), 1), None):
                    weights = gate_up_XFD * 2, bias_XF, down_XDF, bias_XD
                    kept += weights
                    given = expert_TA, weight_TA, *weights, 1.7, 1.5
                    expected_TD = PlainKernels(None, exact(spec)).clamped_expert_mlp(x_TD.double(), *given)
                    with PoisonedMemory():
                        out_TD = kernels.clamped_expert_mlp(x_TD, *given)
                    what = f"clamped {what}, {'without' if bias_XD is None else 'with'} the second bias"
                    allowed = 2 * self.tolerance(spec, "clamped_expert_mlp")  # Two products, both rounded.
                    check_close(what, out_TD, expected_TD, allowed)

    def test_quantized_expert_mlp(self) -> None:
        """Of each scheme that the kernels compute, with and without the norm that may follow."""
        kept: list[Any] = []
        for spec, kernels in self._offering("quantized_expert_mlp"):
            for scheme, (what, given) in product(SCHEMES, list(self._inputs(spec))[: len(SHAPES)]):
                x_TD, *routed, gate_up_XFD, down_XDF = given
                both = [scaled_matrix(scheme, one) for one in (gate_up_XFD, down_XDF)]
                if not all(kernels.computes(scheme, one.num_rows, one.num_columns) for one in both):
                    continue
                plain, weights = PlainKernels(None, exact(spec)), [kernels.prepare_weight(one) for one in both]
                kept += [*both, *weights]
                expected_TD = plain.expert_mlp(
                    x_TD.double(), *routed, *(one.dequantised(torch.float64) for one in both)
                )
                with PoisonedMemory():
                    out_TD = kernels.quantized_expert_mlp(x_TD, *routed, *weights)
                what = f"quantised {what}, {scheme}"
                check_form(what, out_TD, x_TD.shape, spec.dtype)
                # As of plain experts; kernels that round activations to e4m3 do so by up to 2^-4 each.
                allowed = 2 * self.tolerance(spec, "expert_mlp") + 0.04 * bool(scheme.activations)
                check_close(what, out_TD, expected_TD, allowed)
                residual_TD, weight_D = self.random(spec, *x_TD.shape) * 2, 1.5 - self.random(spec, x_TD.shape[1]) * 0.2
                expected = plain.add_rms_norm(expected_TD, residual_TD.double(), weight_D, EPS)
                with PoisonedMemory():
                    actual = kernels.quantized_expert_mlp_add_rms_norm(
                        x_TD, *routed, *weights, residual_TD, weight_D, EPS
                    )
                for part, found, wanted in zip(("norm", "sum"), actual, expected, strict=True):
                    check_close(f"the {part} after {what}", found, wanted, allowed)

    def test_a_token_gets_from_its_experts_what_it_gets_alone(self) -> None:
        """Routing of the other tokens changes nothing."""
        for spec, kernels in self._offering("expert_mlp"):
            x_TD, expert_TA, weight_TA, *weights = list(self._inputs(spec))[2 * len(SHAPES) - 1][1]
            crowd_TD = kernels.expert_mlp(x_TD, expert_TA, weight_TA, *weights)
            for token in (0, len(x_TD) - 1):
                mine = slice(token, token + 1)
                alone_TD = kernels.expert_mlp(x_TD[mine], expert_TA[mine], weight_TA[mine], *weights)
                what = f"expert_mlp of token {token} alone, compared with the same in a batch ({describe(spec)})"
                check_close(what, alone_TD, crowd_TD[mine], self.tolerance(spec, "expert_mlp"))

    def test_experts_never_wait_for_the_host(self) -> None:
        """No shape depends on the routing."""
        for spec, kernels in self._offering("expert_mlp") if self.graph_safe else ():
            given, logits_TX = next(self._inputs(spec))[1], self.random(spec, 3, 8)
            calls: dict[str, Callable[[], object]] = {"expert_mlp": partial(kernels.expert_mlp, *given)}
            if is_offered(kernels.route_experts):
                calls["route_experts"] = partial(kernels.route_experts, logits_TX, 2, True)
            for name, call in calls.items():
                call()  # the first call may compile
                with torch.no_grad(), no_host_sync(f"{name} ({describe(spec)})"):
                    call()

    def _offering(self, operation: str) -> Iterator[tuple[AttentionSpec, Any]]:
        for spec in self.specs(self.groups[:1]):
            kernels: Any = self.make(spec)
            if is_offered(getattr(kernels, operation)):
                yield spec, kernels

    def _inputs(self, spec: AttentionSpec) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Tokens, routing and weights; all weights are different, and stay, since kernels may know them by address."""
        kept: list[Tensor] = []
        most = (("any experts", (num_tokens, *SHAPES[0][1:])) for num_tokens in self.most_tokens(spec))
        cases = (*product(("any experts", "the same experts"), SHAPES), *most)
        for routing, (num_tokens, num_experts, num_chosen, hidden, inner) in cases:
            logits_TX = self.random(spec, num_tokens, num_experts).float()
            routed = logits_TX if routing == "any experts" else logits_TX[:1].expand_as(logits_TX)
            weight_TA, expert_TA = routed.softmax(-1).topk(num_chosen)
            gate_up_XFD = self.random(spec, num_experts, 2 * inner, hidden).roll(len(kept), 1) * hidden**-0.5
            down_XDF = self.random(spec, num_experts, hidden, inner).roll(len(kept), 1) * inner**-0.5
            kept += [gate_up_XFD, down_XDF]
            what = f"expert_mlp of {num_tokens} tokens by {routing}, {num_chosen} of {num_experts}"
            given = self.random(spec, num_tokens, hidden), expert_TA, weight_TA, gate_up_XFD, down_XDF
            yield f"{what} ({describe(spec)})", given


def scaled_matrix(scheme: Scheme, values_XOD: Tensor) -> ScaledMatrix:
    """Experts' matrices (X, O, D) near these values, as a scheme stores them; scales and zeros differ by block."""
    num_experts, num_out, width = values_XOD.shape
    blocks = num_experts, -(-num_out // (scheme.rows or num_out)), -(-width // (scheme.columns or width))
    matrix = ScaledMatrix(scheme, num_out, width, values_XOD, values_XOD.new_ones(blocks, dtype=torch.float32))
    index = torch.arange(matrix.scales_RC.numel(), device=values_XOD.device).view(blocks)
    largest = {FP8: 448, INT8: 127, INT4: 7}[scheme.values]
    scales_RC = values_XOD.abs().max().float() / largest * (1 + index % 5 / 8)
    zeros_RC = (6 + index % 4).float() if scheme.has_zeros else None
    stored = values_XOD.float() / matrix.spread(scales_RC)
    if scheme.values == FP8:
        return ScaledMatrix(scheme, num_out, width, stored.to(torch.float8_e4m3fn), scales_RC)
    if scheme.values == INT8:
        return ScaledMatrix(scheme, num_out, width, stored.round().to(torch.int8), scales_RC)
    codes = (stored + (8 if zeros_RC is None else matrix.spread(zeros_RC))).round().clamp(0, 15).to(torch.uint8)
    return ScaledMatrix(scheme, num_out, width, codes[..., ::2] | codes[..., 1::2] << 4, scales_RC, zeros_RC)
