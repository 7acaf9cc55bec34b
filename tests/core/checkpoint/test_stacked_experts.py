"""Matrices of experts, stored one by one or all of a layer in one tensor. X experts, D hidden, F features."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hookline.core.checkpoint.load import load_checkpoint
from hookline.core.checkpoint.safetensors_files import stored_tensors
from hookline.core.checkpoint.stacked_experts import as_named, dtypes_by_matrix
from hookline.core.contracts import Part, WeightTarget
from hookline.core.errors import CheckpointError

X, D, F = 3, 4, 6
GATE_UP_XFD = torch.arange(X * 2 * F * D, dtype=torch.float32).reshape(X, 2 * F, D)
DOWN_XDF = -torch.arange(X * D * F, dtype=torch.float32).reshape(X, D, F)


def targets(part: Part) -> dict[str, WeightTarget]:
    """Of a rank that has these features of each expert."""
    found = {}
    for expert in range(X):
        for kind in ("gate_proj", "up_proj"):
            found[f"mlp.experts.{expert}.{kind}.weight"] = WeightTarget.shard(torch.zeros(part.size, D), 0, part)
        found[f"mlp.experts.{expert}.down_proj.weight"] = WeightTarget.shard(torch.zeros(D, part.size), 1, part)
    return found


def load(folder: Path, gate_up: torch.Tensor, down: torch.Tensor, wanted: dict[str, WeightTarget]) -> None:
    tensors = {"mlp.experts.gate_up_proj": gate_up.contiguous(), "mlp.experts.down_proj": down.contiguous()}
    save_file(tensors, folder / "model.safetensors")
    load_checkpoint(folder, wanted, stored=as_named(stored_tensors(folder), wanted))


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("part", [Part(F, 0, F), Part(F, 2, 5)])
def test_each_expert_gets_its_matrices_of_the_tensor_of_all(exchanged: bool, part: Part, tmp_path: Path) -> None:
    wanted = targets(part)
    load(tmp_path, *(one.mT if exchanged else one for one in (GATE_UP_XFD, DOWN_XDF)), wanted)
    rows = slice(part.start, part.stop)
    for expert in range(X):
        views = [wanted[f"mlp.experts.{expert}.{kind}_proj.weight"].view for kind in ("gate", "up", "down")]
        gate_FD, up_FD = GATE_UP_XFD[expert].chunk(2)
        for view, whole in zip(views, (gate_FD[rows], up_FD[rows], DOWN_XDF[expert][:, rows]), strict=True):
            assert view is not None
            torch.testing.assert_close(view, whole)


@pytest.mark.parametrize("exchanged", [False, True])
def test_scales_of_all_experts_are_given_to_each(exchanged: bool, tmp_path: Path) -> None:
    """Of blocks of two outputs and four inputs; those of `down_proj` are square, and lie as the values do."""
    sizes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    wanted = targets(Part(F, 0, F))
    scales = {
        f"mlp.experts.{expert}.{kind}.weight_scale_inv": WeightTarget.whole(torch.zeros(rows // 2, -(-columns // 4)))
        for expert in range(X)
        for kind, (rows, columns) in sizes.items()
    }
    gate_up, down = GATE_UP_XFD[:, ::2, ::4], DOWN_XDF[:, ::2, ::4]
    tensors = {"gate_up_proj": GATE_UP_XFD, "down_proj": DOWN_XDF}
    tensors |= {"gate_up_proj_scale_inv": gate_up, "down_proj_scale_inv": down}
    stored = {f"mlp.experts.{name}": (one.mT if exchanged else one).contiguous() for name, one in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    found = stored_tensors(tmp_path)
    assert dtypes_by_matrix(found)["mlp.experts.2.up_proj.weight_scale_inv"] == "F32"
    load_checkpoint(tmp_path, wanted | scales, stored=as_named(found, wanted | scales))
    for expert in range(X):
        for kind, whole in zip(sizes, (*gate_up[expert].chunk(2), down[expert]), strict=True):
            view = scales[f"mlp.experts.{expert}.{kind}.weight_scale_inv"].view
            assert view is not None and torch.equal(view, whole)


def test_the_matrices_above_each_other_may_be_one_of_an_expert(tmp_path: Path) -> None:
    """Whose scales cut through both."""
    gate_up, scales = torch.zeros(2 * F, D), torch.zeros(3, 1)
    wanted = {
        "mlp.experts.2.gate_up_proj.weight": WeightTarget.whole(gate_up),
        "mlp.experts.0.gate_up_proj.weight": WeightTarget.whole(torch.zeros(2 * F, D)),
        "mlp.experts.0.gate_up_proj.weight_scale_inv": WeightTarget.whole(scales),
    }
    save_file(
        {"mlp.experts.gate_up_proj": GATE_UP_XFD, "mlp.experts.gate_up_proj_scale_inv": GATE_UP_XFD[:, :3, :1].clone()},
        tmp_path / "model.safetensors",
    )
    found = stored_tensors(tmp_path)
    assert dtypes_by_matrix(found)["mlp.experts.1.gate_up_proj.weight"] == "F32"
    named = as_named(found, wanted)
    load_checkpoint(tmp_path, wanted, stored={name: named[name] for name in wanted})
    assert torch.equal(gate_up, GATE_UP_XFD[2]) and torch.equal(scales, GATE_UP_XFD[0, :3, :1])


def test_a_model_that_has_the_tensor_of_all_reads_it_in_either_order_of_dimensions(tmp_path: Path) -> None:
    wanted = {
        "mlp.experts.gate_up_proj": WeightTarget.whole(torch.zeros(X, 2 * F, D)),
        "mlp.experts.down_proj": WeightTarget.whole(torch.zeros(X, D, F)),
    }
    load(tmp_path, GATE_UP_XFD.mT, DOWN_XDF, wanted)
    assert torch.equal(wanted["mlp.experts.gate_up_proj"].view, GATE_UP_XFD)  # type: ignore[arg-type]
    assert torch.equal(wanted["mlp.experts.down_proj"].view, DOWN_XDF)  # type: ignore[arg-type]


def test_a_tensor_of_all_that_does_not_fit_is_told_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"surplus tensor: mlp\.experts\.gate_up_proj"):
        load(tmp_path, GATE_UP_XFD[:, 1:], DOWN_XDF, targets(Part(F, 0, F)))


def test_experts_of_more_than_the_model_has_are_surplus(tmp_path: Path) -> None:
    more = torch.cat([GATE_UP_XFD, GATE_UP_XFD[:1]])
    with pytest.raises(CheckpointError, match=r"surplus tensors: mlp\.experts\.3\.gate_proj"):
        load(tmp_path, more, DOWN_XDF, targets(Part(F, 0, F)))
