"""GPTQ: values rounded one input after the other, each rounding's error made good by the inputs that follow.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022). Scales
and zero points are those of the matrix that was rounded to the nearest, and inputs are taken in the order of how large
they were, so the layout stays as it is.
Legend: O outputs, D inputs, B inputs of a block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hookline.core.contracts import HALF_INT4, INT4, ScaledMatrix
from hookline.core.errors import CheckpointError
from hookline.plugins.quantizations.rounding import codes_of, packed

DAMPING = 0.01
"""Added to the diagonal, as a fraction of its mean, since weights of rare inputs would be fitted to noise."""
BLOCK = 128
"""Inputs after which their errors are propagated to the rest of the matrix by one product."""
ATTEMPTS = 6
"""How often the damping is multiplied by ten, until the moments can be factored."""


def gptq(matrix: ScaledMatrix, weight_OD: Tensor, moment_DD: Tensor) -> ScaledMatrix:
    """See Quantization.calibrated. Computed in float32 on the moments' device.

    Raises: CheckpointError if the moments are not finite.
    """
    scheme, device = matrix.scheme, moment_DD.device
    diagonal_D = moment_DD.diagonal()
    order_D = diagonal_D.argsort(descending=True)
    weight_OD = weight_OD.to(device, torch.float32)[:, order_D]
    shape = matrix.num_rows, matrix.num_columns
    scale_OD = matrix.spread(matrix.scales_RC).to(device).expand(shape)[:, order_D]
    zero_OD = None
    if matrix.zeros_RC is not None:
        zero_OD = matrix.spread(matrix.zeros_RC).to(device).expand(shape)[:, order_D]
    factor_DD = _factor(moment_DD[order_D][:, order_D])
    codes_OD: Tensor | None = None
    for start in range(0, matrix.num_columns, BLOCK):
        stop = min(start + BLOCK, matrix.num_columns)
        error_OB = weight_OD.new_empty(matrix.num_rows, stop - start)
        for column in range(start, stop):
            here = slice(column, column + 1)
            zero_O1 = None if zero_OD is None else zero_OD[:, here]
            code_O1 = codes_of(weight_OD[:, here].clone(), scheme, scale_OD[:, here], zero_O1)
            if codes_OD is None:
                codes_OD = torch.empty(shape, dtype=code_O1.dtype, device=device)
            codes_OD[:, order_D[column]] = code_O1[:, 0]
            offset = HALF_INT4 if scheme.values == INT4 else 0
            rounded_O1 = (code_O1.float() - (offset if zero_O1 is None else zero_O1)) * scale_OD[:, here]
            error_O1 = (weight_OD[:, here] - rounded_O1) / factor_DD[column, column]
            error_OB[:, column - start] = error_O1[:, 0]
            weight_OD[:, column + 1 : stop].addmm_(error_O1, factor_DD[here, column + 1 : stop], alpha=-1)
        weight_OD[:, stop:].addmm_(error_OB, factor_DD[start:stop, stop:], alpha=-1)
    assert codes_OD is not None, "a matrix has inputs"
    data = packed(codes_OD) if scheme.values == INT4 else codes_OD
    return replace(matrix, data=data.to(matrix.data.device))


def _factor(moment_DD: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments."""
    if not bool(moment_DD.isfinite().all()):
        raise CheckpointError("calibration texts gave a linear inputs that are not finite")
    diagonal_D = moment_DD.diagonal()
    mean = diagonal_D.mean().clamp(min=torch.finfo(torch.float32).tiny)
    unseen_D = (diagonal_D == 0).float()
    for attempt in range(ATTEMPTS):
        damped_DD = moment_DD + torch.diag(unseen_D * mean + mean * DAMPING * 10**attempt)
        lower_DD, failed = torch.linalg.cholesky_ex(damped_DD)
        if not failed:
            upper_DD: Tensor
            upper_DD, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_DD), upper=True)
            if not failed:
                return upper_DD
    raise CheckpointError("the inputs that calibration texts gave a linear are too alike; give more of them")
