"""MXFP4 pairs are loaded as what transformers makes of them, each rank its part, and misfits are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hookline.core.checkpoint.load import load_checkpoint
from hookline.core.checkpoint.mxfp4 import Mxfp4Slices
from hookline.core.checkpoint.safetensors_files import stored_tensors
from hookline.core.contracts import Part, WeightTarget
from hookline.core.errors import CheckpointError

EXPERTS, OUTPUTS, GROUPS = 2, 6, 3


def quantised() -> dict[str, Tensor]:
    """Every byte occurs; scales from far below to far above one."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, GROUPS, 16), generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256)
    scales = torch.randint(97, 158, (EXPERTS, OUTPUTS, GROUPS), generator=generator, dtype=torch.uint8)
    return {"w_blocks": blocks, "w_scales": scales}


def theirs(tensors: dict[str, Tensor]) -> Tensor:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    whole: Tensor = _convert_moe_packed_tensors(tensors["w_blocks"], tensors["w_scales"])
    return whole


def test_a_pair_is_loaded_as_transformers_dequantises_it(tmp_path: Path) -> None:
    tensors = quantised()
    save_file({"w_blocks": tensors["w_blocks"]}, tmp_path / "one.safetensors")
    save_file({"w_scales": tensors["w_scales"]}, tmp_path / "two.safetensors")
    assert stored_tensors(tmp_path)["w"].shape == (EXPERTS, GROUPS * 32, OUTPUTS)
    view = torch.empty(EXPERTS, GROUPS * 32, OUTPUTS)
    load_checkpoint(tmp_path, {"w": WeightTarget.whole(view)})
    assert torch.equal(view, theirs(tensors).float())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_either_dimension(tmp_path: Path, rank: int) -> None:
    tensors = quantised()
    save_file(tensors, tmp_path / "model.safetensors")
    whole_XIO = theirs(tensors).float()
    inputs, outputs = Part(96, 48 * rank, 48 * rank + 48), Part(3, rank, rank + 2)
    down = torch.empty(EXPERTS, OUTPUTS, 48)
    load_checkpoint(tmp_path, {"w": WeightTarget.shard(down, 2, inputs).transpose()})
    assert torch.equal(down, whole_XIO.mT[:, :, inputs.start : inputs.stop])
    gate, up = torch.empty(2, EXPERTS, 2, GROUPS * 32)
    both = [WeightTarget.shard(view, 1, outputs) for view in (gate, up)]
    load_checkpoint(tmp_path, {"w": WeightTarget.interleaved(both, 1).transpose()})
    assert torch.equal(gate, whole_XIO.mT[:, 0::2][:, rank : rank + 2])
    assert torch.equal(up, whole_XIO.mT[:, 1::2][:, rank : rank + 2])


def test_only_the_wanted_experts_and_outputs_are_read() -> None:
    class Noted:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.asked = tensor, []

        def __getitem__(self, index):
            self.asked.append(index)
            return self.tensor[index]

    tensors = quantised()
    blocks, scales = Noted(tensors["w_blocks"]), Noted(tensors["w_scales"])
    Mxfp4Slices(blocks, scales)[slice(None), slice(None), slice(1, 3)]
    assert blocks.asked == scales.asked == [(slice(None), slice(1, 3))]


@pytest.mark.parametrize(
    ("blocks", "scales", "words"),
    [
        ((2, 3, 16), (2, 3), "has blocks [2, 3, 16] and scales [2, 3]"),
        ((2, 3, 4, 16), (2, 3, 5), "expected [X, O, G, 16] and [X, O, G]"),
        ((2, 3, 4, 8), (2, 3, 4), "has blocks [2, 3, 4, 8]"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(
    tmp_path: Path, blocks: tuple[int, ...], scales: tuple[int, ...], words: str
) -> None:
    tensors = {"w_blocks": torch.zeros(blocks, dtype=torch.uint8), "w_scales": torch.zeros(scales, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        stored_tensors(tmp_path)
    assert words in str(error.value)


def test_bytes_without_a_partner_are_no_weights(tmp_path: Path) -> None:
    save_file({"w_blocks": quantised()["w_blocks"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="surplus tensor: w_blocks"):
        load_checkpoint(tmp_path, {"v": WeightTarget.whole(torch.empty(1))})
