"""Checks of plugins' results in every eager step: shapes and dtypes, which the host knows without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor

from hookline.core.errors import StepFault, shown
from hookline.core.plugin.blame import breach


class FormChecks:
    """Checks results, and raises StepFault naming the plugin and method at fault. names: of the plugins, by kind."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}

    def fault(self, kind: str, method: str, what: str) -> StepFault:
        """The error that blames the plugin of a kind for a breach of contract by one of its methods."""
        return StepFault(breach(self._names.get(kind, f"the {kind}"), method, what))

    def form(self, kind: str, method: str, found: Any, shape: Sequence[int], *dtypes: torch.dtype) -> None:
        """Check the shape of a result, and its dtype if any dtypes are given."""
        if fault := form_fault(found, shape, dtypes):
            raise self.fault(kind, method, fault)

    def shard_form(self, found: Any, num_rows: int) -> tuple[Tensor, Tensor]:
        """The scores and tokens that `sample_shard` returned, of which only shapes and dtypes are checked."""
        scores_N, tokens_N = self.parts("sampler", "sample_shard", found, 2)
        self.form("sampler", "sample_shard", scores_N, (num_rows,), torch.float32)
        self.form("sampler", "sample_shard", tokens_N, (num_rows,), torch.int64)
        return scores_N, tokens_N

    def parts(self, kind: str, method: str, found: Any, count: int) -> Sequence[Any]:
        """A method's return value as a sequence of `count` results."""
        parts = found if isinstance(found, tuple | list) else (found,)
        if len(parts) != count:
            raise self.fault(kind, method, f"it returned {described(found)}, not {count} tensors")
        return parts


def form_fault(found: Any, shape: Sequence[int], dtypes: Sequence[torch.dtype] = (), what: str = "it returned") -> str:
    """A short description of a result's wrong shape or dtype; empty if both are right."""
    if isinstance(found, Tensor) and found.shape == Size(shape) and (not dtypes or found.dtype in dtypes):
        return ""
    dtype = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
    return f"{what} {described(found)}, not shape {tuple(shape)}{f' of {dtype}' * bool(dtype)}"


def described(found: Any) -> str:
    """A result in an error message: shape and dtype of a tensor, type and value of anything else."""
    if isinstance(found, Tensor):
        return f"shape {tuple(found.shape)} of {str(found.dtype).removeprefix('torch.')}"
    return f"{type(found).__name__} {shown(found)}"
