"""MXFP4 tensors of a checkpoint, dequantised when they are read: pairs of NAME_blocks and NAME_scales, as gpt-oss has.

32 neighbours share one power of two as their scale; two of their four-bit floats lie in a byte, the first in its low
half. Legend: X experts, O outputs, G groups of a row, I = 32 * G inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.util.arrays import ranges_of

_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_PAIRS = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)], dtype=torch.bfloat16)


class Mxfp4Slices:
    """An MXFP4 tensor that is indexed by ranges like the dequantised tensor (X, I, O); reads only the wanted experts
    and outputs.

    blocks, scales: slices of a safetensors file, or objects that are indexed like them.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self.blocks, self.scales = blocks, scales

    def __getitem__(self, index: Any) -> Tensor:
        """These ranges of the tensor, in bfloat16, which holds every value exactly."""
        experts, inputs, outputs = ranges_of(index, 3)
        return dequantise(self.blocks[experts, outputs], self.scales[experts, outputs]).mT[:, inputs]


def dequantise(blocks_XOGB: Tensor, scales_XOG: Tensor) -> Tensor:
    """(X, O, G, 16) and (X, O, G) bytes -> (X, O, I) bfloat16."""
    num_experts, num_rows, num_groups, num_bytes = blocks_XOGB.shape
    out_XOI = torch.empty(num_experts, num_rows, num_groups * 2 * num_bytes, dtype=torch.bfloat16)
    # Two values are one 32-bit number to copy. Expert by expert, as the indices take four times the bytes.
    pairs = _PAIRS.view(torch.int32).flatten()
    for expert in range(num_experts):
        blocks_OGB, scales_OG, out_OI = blocks_XOGB[expert], scales_XOG[expert], out_XOI[expert]
        torch.index_select(pairs, 0, blocks_OGB.flatten().int(), out=out_OI.view(torch.int32).view(-1))
        factor_OG1 = torch.exp2(scales_OG.float() - _BIAS).to(torch.bfloat16).unsqueeze(-1)
        out_OI.view(num_rows, num_groups, 2 * num_bytes).mul_(factor_OG1)
    return out_XOI
