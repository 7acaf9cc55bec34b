"""Wrappers of the `attend` that a model is given: checks in first steps, and scales of cached keys and values.

Legend: T tokens of a step, H heads, K kv heads, E head dim, C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, QKNorm, Rope, StateRows
from hookline.core.worker.step_checks import StepChecks


class CheckedAttention:
    """Wraps a `core.contracts.Attend` in first steps: it checks the model's arguments before kernels are given them."""

    def __init__(self, attend: Any, checks: StepChecks, num_tokens: int) -> None:
        self._attend, self._checks, self._num_tokens = attend, checks, num_tokens

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend."""
        self._checks.attended(self._num_tokens, layer, qkv_TC, rope, norm, form)
        attended_TC: Tensor = self._attend(layer, qkv_TC, rope, norm, form)
        return attended_TC

    def states(self, layer: int) -> StateRows:
        """See Attend."""
        self._checks.keeps_state(layer)
        rows: StateRows = self._attend.states(layer)
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attend, name)


class LayerScale:
    """The scales of one layer, by which its cached keys and values are divided: k of keys, v of values.

    Queries are multiplied by k, so attention scores stay as they are, and results by v; kernels know no scale. Scales
    are powers of two, so none of this rounds. Legend: C = (H + 2K) * E.
    """

    def __init__(self, k: float, v: float, spec: AttentionSpec) -> None:
        self._k, self.v = k, v
        sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        place: Any = {"device": spec.device, "dtype": spec.dtype}
        self._plain_C, self._normed_C = (
            torch.cat([torch.full((size,), factor, **place) for size, factor in zip(sizes, factors, strict=True)])
            for factors in ((k, 1 / k, 1 / v), (1.0, 1.0, 1 / v))
        )
        self._norm: tuple[QKNorm, QKNorm] | None = None

    def scaled(self, qkv_TC: Tensor, norm: QKNorm | None) -> tuple[Tensor, QKNorm | None]:
        """The arguments for kernels. A norm undoes its input's scale, so its weights are scaled, once for all steps.

        Shapes: qkv_TC (T, C), or queries alone (T, H * E).
        """
        if norm is None:
            return qkv_TC * self._plain_C[: qkv_TC.shape[1]], None
        if self._norm is None or self._norm[0].q_weight_E is not norm.q_weight_E:
            self._norm = norm, QKNorm(norm.q_weight_E * self._k, norm.k_weight_E / self._k, norm.eps)
        return qkv_TC * self._normed_C[: qkv_TC.shape[1]], self._norm[1]


class ScaledAttention:
    """Wraps a `core.contracts.Attend` for a model in which some layers have a LayerScale."""

    def __init__(self, attend: Any, scales: Mapping[int, LayerScale]) -> None:
        self._attend, self._scales = attend, scales

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend."""
        scale = self._scales.get(layer)
        if scale is None:
            unscaled: Tensor = self._attend(layer, qkv_TC, rope, norm, form)
            return unscaled
        qkv_TC, norm = scale.scaled(qkv_TC, norm)
        out_TD: Tensor = self._attend(layer, qkv_TC, rope, norm, form)
        return out_TD * scale.v

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attend, name)
