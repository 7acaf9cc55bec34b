"""The part of the kernels' conformance suite (suite.py) that is about fused norms and gates.

Expected values are computed in float64. Legend: T tokens, D hidden, H heads, E head dim.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec
from hookline.core.testing.checks import PoisonedMemory, check, check_close, check_form, check_unchanged
from hookline.core.testing.kernels_suite.cases import AttentionCases, describe, exact
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.util.arrays import num_mask_words

EPS = 1e-5
SHAPES = ((1, 96), (5, 64), (33, 1040))
"""Tokens and hidden."""
HEADS = ((1, 3, 24), (7, 16, 128))
"""Tokens, heads, head dim."""


class GateCases(AttentionCases):
    """Tests of norms and gates that are fused with their neighbours; inherited plain versions are tested too."""

    def test_norm_add_rms_norm(self) -> None:
        """Returns (normalised sum, sum), in this order; weights may be float32; there may be two terms and norms."""
        for spec in self.specs(self.groups[:1]):
            plain, kernels, kept = PlainKernels(None, exact(spec)), self.make_poisoned(spec), []
            for num_tokens, width in self._shapes(spec):
                x_TD, residual_TD = (
                    self.random(spec, num_tokens, width) * 3,
                    self.random(spec, num_tokens, width).flip(0),
                )
                inner_D = 1 + 0.3 * self.random(spec, width).float().roll(num_tokens)
                weight_D = (1.5 - inner_D.flip(0)).to(spec.dtype)
                weight_2D = torch.stack((inner_D.flip(0), 2 - inner_D))
                y_TD, y_weight_D, outer_D = x_TD.flip(1) * 2, inner_D.roll(1).to(spec.dtype), inner_D.roll(2)
                kept += [inner_D, weight_D, weight_2D, y_weight_D, outer_D]  # kernels may know them by address
                kept.append(scale_1 := self.random(spec, 1) + 0.5)
                normed_TD = plain.rms_norm(x_TD.double(), inner_D, EPS)
                both_TD = plain.rms_norm(normed_TD + plain.rms_norm(y_TD.double(), y_weight_D, EPS), outer_D, EPS)
                for told, options in (
                    ("", ()),
                    (", scaled,", (scale_1,)),
                    (" beside another,", (None, (y_TD, y_weight_D, outer_D))),
                    (" beside another, scaled,", (scale_1, (y_TD, y_weight_D, outer_D))),
                    (", with two norms,", ()),
                    (", scaled, with two norms,", (scale_1,)),
                ):
                    sum_TD = (both_TD if "beside" in told else normed_TD) + residual_TD.double()
                    sum_TD = sum_TD * (scale_1.double() if "scaled" in told else 1.0)
                    if "two" in told:
                        normed_sum = torch.stack([plain.rms_norm(sum_TD, one_D, EPS) for one_D in weight_2D])
                    else:
                        normed_sum = plain.rms_norm(sum_TD, weight_D, EPS)
                    expected = normed_sum, sum_TD
                    own: Any = [(one[0].clone(), *one[1:]) if isinstance(one, tuple) else one for one in options]
                    with PoisonedMemory():
                        weights = weight_2D if "two" in told else weight_D
                        given = x_TD.clone(), inner_D, residual_TD.clone(), weights, EPS
                        actual = kernels.norm_add_rms_norm(*given, *own)
                    check(len(actual) == 2, "norm_add_rms_norm must return (normalised, residual)")
                    for name, one, wanted in zip(("norm", "sum"), actual, expected, strict=True):
                        what = f"the {name} that norm_add_rms_norm of {num_tokens} x {width}{told} returns"
                        self._check_gate("norm_add_rms_norm", spec, what, one, wanted)

    def test_norm_heads(self) -> None:
        """Two heads in a block, number by number in turns; one in each of two blocks beside zeros; scales differ."""
        for spec in self.specs(self.groups[:1]):
            plain, kernels, kept = PlainKernels(None, exact(spec)), self.make_poisoned(spec), []
            for num_tokens, head_dim, wide in ((1, 12, 26), (7, 64, 128), (33, 20, 64)):
                place_2F = torch.arange(2 * head_dim).view(2, head_dim)
                blocks = torch.full((3, wide), -1, dtype=torch.int32)
                blocks[0, : 2 * head_dim] = place_2F.t().flatten()
                blocks[1, :head_dim] = place_2F[1].flip(0)
                blocks[2, wide - head_dim :] = place_2F[0]
                places_C = blocks.flatten().to(spec.device)
                x_TN = self.random(spec, num_tokens, 3 * head_dim)[:, head_dim:] * 3
                kept += [places_C, scale_C := 1 + 0.5 * self.random(spec, len(places_C)).roll(num_tokens)]
                heads = x_TN.double().reshape(num_tokens, 2, head_dim)
                normed_TN = plain.rms_norm(heads, torch.ones(head_dim, device=spec.device), EPS).flatten(1)
                expected_TC = normed_TN[:, places_C.clamp(min=0)] * scale_C.double() * (places_C >= 0)
                with PoisonedMemory():
                    actual_TC = kernels.norm_heads(x_TN, head_dim, EPS, places_C, scale_C, wide)
                what = f"norm_heads of {num_tokens} tokens, 2 heads of {head_dim} in blocks of {wide}"
                self._check_gate("norm_heads", spec, what, actual_TC, expected_TC)

    def test_take_columns(self) -> None:
        """Of rows that lie apart, some columns more than once and some not at all; the rows stay as they are."""
        for spec in self.specs(self.groups[:1]):
            kernels, kept = self.make_poisoned(spec), []
            for num_tokens, width in self._shapes(spec):
                x_TD = self.random(spec, num_tokens, 2 * width)[:, :width]
                kept.append(
                    places_N := (torch.arange(2 * width - 3, dtype=torch.int32) * 7 % (width - 1)).to(spec.device)
                )
                before_TD = x_TD.clone()
                with PoisonedMemory():
                    actual_TN = kernels.take_columns(x_TD, places_N)
                what = f"take_columns of {num_tokens} x {width}"
                check_form(f"{what} ({describe(spec)})", actual_TN, (num_tokens, len(places_N)), spec.dtype)
                check(torch.equal(actual_TN, before_TD[:, places_N]), f"{what} takes others ({describe(spec)})")
                check_unchanged("x, which take_columns was given,", before_TD, x_TD)

    def test_rms_norm_silu_mul(self) -> None:
        """Head by head, with gates that are columns of a wider matrix."""
        for spec in self.specs(self.groups[:1]):
            kernels, kept = self.make_poisoned(spec), []
            for num_tokens, num_heads, head_dim in (
                *HEADS,
                *product(self.most_tokens(spec), HEADS[0][1:2], HEADS[0][2:]),
            ):
                x_THE = self.random(spec, num_tokens, num_heads, head_dim) * 2
                wide_TC = self.random(spec, num_tokens, num_heads * head_dim + 8).flip(0) * 2
                gate_THE = wide_TC[:, 8:].view(num_tokens, num_heads, head_dim)
                kept.append(weight_E := 1 + 0.3 * self.random(spec, head_dim).roll(num_tokens))
                normed_THE = PlainKernels(None, exact(spec)).rms_norm(x_THE.double(), weight_E, EPS)
                expected_THE = normed_THE * gate_THE.double() * gate_THE.double().sigmoid()
                with PoisonedMemory():
                    actual_THE = kernels.rms_norm_silu_mul(x_THE.clone(), weight_E, EPS, gate_THE)
                what = f"rms_norm_silu_mul of {tuple(x_THE.shape)}"
                self._check_gate("rms_norm_silu_mul", spec, what, actual_THE, expected_THE)

    def test_sigmoid_mul(self) -> None:
        """With a gate for each feature or one for each token, with and without a sum; inputs stay as they are."""
        for spec in self.specs(self.groups[:1]):
            for num_tokens, width in self._shapes(spec):
                x_TD, wide_TD = (
                    self.random(spec, num_tokens, width),
                    self.random(spec, num_tokens, width + 8).flip(0) * 2,
                )
                for gate_TG in (wide_TD[:, :width], wide_TD[:, :1]):
                    for added_TD in (None, x_TD.flip(0) - 0.5):
                        before = [one.clone() for one in (x_TD, wide_TD)]
                        expected_TD = x_TD.double() * gate_TG.double().sigmoid()
                        expected_TD = expected_TD if added_TD is None else expected_TD + added_TD.double()
                        with PoisonedMemory():
                            actual_TD = self.make(spec).sigmoid_mul(x_TD, gate_TG, added_TD)
                        what = f"sigmoid_mul of {num_tokens} x {width} by {gate_TG.shape[1]} gates"
                        what += "" if added_TD is None else ", and a sum"
                        self._check_gate("sigmoid_mul", spec, what, actual_TD, expected_TD)
                        for name, old, new in zip(("x", "the gate"), before, (x_TD, wide_TD), strict=True):
                            check_unchanged(f"{name}, which sigmoid_mul was given,", old, new)

    def test_delta_gates(self) -> None:
        """In float32, from columns of a wider matrix, also where softplus(x) rounds to x or to 0."""
        for spec in self.specs(self.groups[:1]):
            kernels, kept = self.make_poisoned(spec), []
            for num_tokens, num_heads in ((1, 4), (33, 6), *product(self.most_tokens(spec), (4,))):
                wide_TC = self.random(spec, num_tokens, 2 * num_heads + 5) * 8
                beta_TH, decay_TH = wide_TC[:, :num_heads], wide_TC[:, num_heads : 2 * num_heads]
                log_rate_H, bias_H = (self.random(spec, num_heads).float().roll(num_tokens) + at for at in (0.0, 1.0))
                kept += [log_rate_H, bias_H]  # kernels may know them by address
                softplus_TH = torch.logaddexp(
                    decay_TH.double() + bias_H.double(), torch.zeros((), dtype=torch.float64).to(wide_TC.device)
                )
                expected = -log_rate_H.double().exp() * softplus_TH, beta_TH.double().sigmoid()
                with PoisonedMemory():
                    actual = kernels.delta_gates(beta_TH, decay_TH, log_rate_H, bias_H)
                for name, one, wanted in zip(("decays", "betas"), actual, expected, strict=True):
                    what = f"the {name} that delta_gates of {num_tokens} x {num_heads} returns ({describe(spec)})"
                    check_form(what, one, wanted.shape, torch.float32)
                    check_close(what, one, wanted, 1e-5)

    def test_mask_logits(self) -> None:
        """Masks by index, of logits that are the first columns of wider ones; the logits stay as they are."""
        for spec in self.specs(self.groups[:1]):
            for num_rows, num_tokens in ((1, 33), (5, 4100), (spec.max_num_seqs, 70)):
                num_words = num_mask_words(num_tokens)
                wide_NV = self.random(spec, num_rows, num_tokens + 7)
                bits_RV = self.random(spec, num_rows + 2, 32 * num_words) > 0
                bits_RV[1] = True
                bits_R32 = bits_RV.view(num_rows + 2, num_words, 32).long()
                masks_RW = (bits_R32 << torch.arange(32, device=bits_RV.device)).sum(2).to(torch.int32)
                index_N = torch.arange(num_rows, 0, -1, device=bits_RV.device)
                given_NV, before_NV = wide_NV[:, :num_tokens], wide_NV.clone()
                allowed_NV = bits_RV.index_select(0, index_N)[:, :num_tokens]
                with PoisonedMemory():
                    actual_NV = self.make(spec).mask_logits(given_NV, masks_RW, index_N)
                what = f"mask_logits of {num_rows} x {num_tokens} ({describe(spec)})"
                check_form(what, actual_NV, given_NV.shape, spec.dtype)
                expected_NV = given_NV.masked_fill(~allowed_NV, -torch.inf)
                check(torch.equal(actual_NV, expected_NV), f"{what} forbids others than the masks do, or changes some")
                check_unchanged("the logits, which mask_logits was given,", before_NV, wide_NV)

    def _check_gate(self, operation: str, spec: AttentionSpec, what: str, actual: Tensor, expected: Tensor) -> None:
        check_form(f"{what} ({describe(spec)})", actual, expected.shape, spec.dtype)
        allowed = 2 * self.tolerance(spec, operation)  # may be rounded in between
        check_close(f"{what} ({describe(spec)})", actual, expected, allowed)

    def _shapes(self, spec: AttentionSpec) -> tuple[tuple[int, int], ...]:
        return (*SHAPES, *product(self.most_tokens(spec), (SHAPES[1][1],)))
