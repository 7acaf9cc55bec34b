"""Loading: every byte where it belongs, only this rank's slice, and each broken folder refused with its reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hookline.core.checkpoint.load import RANDOM_STD, load_checkpoint, random_weights, refuse_other_sizes
from hookline.core.contracts import ModelSpec, Part, WeightTarget
from hookline.core.errors import CheckpointError

WHOLE = Part(64, 0, 64)


def stored(*names: str, shape: tuple[int, ...] = (4, 6)) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}


def targets_for(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, WeightTarget]:
    return {name: WeightTarget.whole(torch.empty(tensor.shape, dtype=dtype)) for name, tensor in tensors.items()}


def view(targets: dict[str, WeightTarget], name: str) -> Tensor:
    found = targets[name].view
    assert found is not None
    return found


def save_sharded(folder: Path, *shards: dict[str, Tensor]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path, targets: dict[str, WeightTarget]) -> str:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, targets)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_single_file_is_loaded_exactly(tmp_path: Path) -> None:
    tensors = stored("a", "b")
    save_file(tensors, tmp_path / "model.safetensors")
    targets = targets_for(tensors)
    assert load_checkpoint(tmp_path, targets) == 2 * 4 * 6 * 4
    assert all(torch.equal(view(targets, name), tensors[name]) for name in tensors)


def test_a_named_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        load_checkpoint(tmp_path, {})


def test_a_pointer_of_git_lfs_in_place_of_the_weights_is_told_with_the_command(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a pointer of Git LFS .*; run git lfs pull"):
        load_checkpoint(tmp_path, {})


def test_sharded_files_are_loaded_through_their_index(tmp_path: Path) -> None:
    tensors = stored("a", "b", "c")
    save_sharded(tmp_path, {"a": tensors["a"]}, {"b": tensors["b"], "c": tensors["c"]})
    save_file(stored("not_ours"), tmp_path / "consolidated.safetensors")
    targets = targets_for(tensors)
    load_checkpoint(tmp_path, targets)
    assert all(torch.equal(view(targets, name), tensors[name]) for name in tensors)


def test_several_files_without_an_index_are_all_read(tmp_path: Path) -> None:
    tensors = stored("a", "b")
    save_file({"a": tensors["a"]}, tmp_path / "one.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "two.safetensors")
    targets = targets_for(tensors)
    load_checkpoint(tmp_path, targets)
    assert all(torch.equal(view(targets, name), tensors[name]) for name in tensors)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_gets_its_slice_of_a_sharded_dimension(tmp_path: Path, dim: int) -> None:
    tensors = stored("a")
    save_file(tensors, tmp_path / "model.safetensors")
    part = Part(tensors["a"].shape[dim], 1, 3)
    shape = [2 if axis == dim else size for axis, size in enumerate(tensors["a"].shape)]
    targets = {"a": WeightTarget.shard(torch.empty(shape), dim, part)}
    load_checkpoint(tmp_path, targets)
    assert torch.equal(view(targets, "a"), tensors["a"].narrow(dim, 1, 2))


def test_a_rank_whose_slice_is_all_padding_reads_nothing(tmp_path: Path) -> None:
    tensors = stored("a")
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {"a": WeightTarget.shard(torch.empty(0, 6), 0, Part(4, 4, 4))}
    assert load_checkpoint(tmp_path, targets) == 0


def test_targets_may_be_views_in_any_layout(tmp_path: Path) -> None:
    tensors = stored("a")
    save_file(tensors, tmp_path / "model.safetensors")
    packed = torch.zeros(6, 10).t()
    load_checkpoint(tmp_path, {"a": WeightTarget.whole(packed[3:7])})
    assert torch.equal(packed[3:7], tensors["a"])
    assert packed[:3].count_nonzero() == 0 and packed[7:].count_nonzero() == 0


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(tmp_path: Path, kept: torch.dtype, to: torch.dtype) -> None:
    tensors = {name: tensor.to(kept) for name, tensor in stored("a").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = targets_for(tensors, to)
    load_checkpoint(tmp_path, targets)
    assert torch.equal(view(targets, "a"), tensors["a"].to(to))


def test_parameters_made_in_inference_mode_can_be_filled(tmp_path: Path) -> None:
    tensors = stored("a")
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.inference_mode():
        targets = targets_for(tensors)
    load_checkpoint(tmp_path, targets)
    assert torch.equal(view(targets, "a"), tensors["a"])


def test_missing_tensors_are_named_up_to_five_and_counted(tmp_path: Path) -> None:
    save_file(stored("a"), tmp_path / "model.safetensors")
    message = refusal(tmp_path, targets_for(stored("a", *(f"layer{i}" for i in range(7)))))
    assert "7 missing tensors: layer0, layer1, layer2, layer3, layer4 and 2 more" in message


def test_surplus_tensors_are_named(tmp_path: Path) -> None:
    save_file(stored("a", "extra"), tmp_path / "model.safetensors")
    assert "1 surplus tensor: extra" in refusal(tmp_path, targets_for(stored("a")))


def test_misshaped_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    save_file(stored("a"), tmp_path / "model.safetensors")
    message = refusal(tmp_path, targets_for(stored("a", shape=(4, 7))))
    assert "1 misshaped tensor: a has [4, 6] and needs [4, 7]" in message


def test_nothing_is_written_before_everything_is_checked(tmp_path: Path) -> None:
    save_file(stored("a", "extra"), tmp_path / "model.safetensors")
    targets = {"a": WeightTarget.whole(torch.zeros(4, 6))}
    refusal(tmp_path, targets)
    assert view(targets, "a").count_nonzero() == 0


def test_an_ignored_tensor_may_be_there_or_not(tmp_path: Path) -> None:
    save_file(stored("a", "copy"), tmp_path / "model.safetensors")
    targets = targets_for(stored("a")) | {"copy": WeightTarget.ignored(), "absent": WeightTarget.ignored()}
    assert load_checkpoint(tmp_path, targets) == 4 * 6 * 4


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    message = refusal(tmp_path, targets_for(stored("a")))
    assert str(tmp_path / "model.safetensors") in message and "again" in message


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(stored("a"), file)
    file.write_bytes(file.read_bytes()[:-8])
    assert str(file) in refusal(tmp_path, targets_for(stored("a")))


def test_a_shard_that_the_index_lists_and_the_folder_lacks_is_named(tmp_path: Path) -> None:
    tensors = stored("a", "b")
    save_sharded(tmp_path, {"a": tensors["a"]}, {"b": tensors["b"]})
    (tmp_path / "model-1.safetensors").unlink()
    assert "lists model-1.safetensors, which is not in the folder" in refusal(tmp_path, targets_for(tensors))


def test_an_index_that_points_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    save_file(stored("a"), tmp_path / "a.safetensors")
    index = {"weight_map": {"a": "../a.safetensors"}}
    (tmp_path / "outside" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not in the folder" in refusal(tmp_path / "outside", targets_for(stored("a")))


@pytest.mark.parametrize("text", ["{", "[]", "7", "{}", '{"weight_map": []}', '{"weight_map": ' + "[" * 100_000])
def test_an_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not a readable index" in refusal(tmp_path, {})


def test_a_tensor_stored_twice_is_refused(tmp_path: Path) -> None:
    save_file(stored("a"), tmp_path / "one.safetensors")
    save_file(stored("a"), tmp_path / "two.safetensors")
    assert "tensor 'a' is in one.safetensors and in" in refusal(tmp_path, targets_for(stored("a")))


def test_of_copies_the_one_counts_that_the_index_names(tmp_path: Path) -> None:
    save_sharded(tmp_path, stored("a"), {"a": torch.zeros(4, 6)}, {"a": torch.ones(4, 6, dtype=torch.int8)})
    index = tmp_path / "model.safetensors.index.json"
    for number in (0, 1):
        files = {"a": f"model-{number}.safetensors", "b": "model-0.safetensors", "c": "model-2.safetensors"}
        index.write_text(json.dumps({"weight_map": files}))
        targets = targets_for(stored("a"))
        load_checkpoint(tmp_path, targets)
        assert torch.equal(view(targets, "a"), torch.zeros(4, 6) if number else stored("a")["a"])


def test_copies_of_a_tensor_that_nothing_needs_are_no_concern(tmp_path: Path) -> None:
    tensors = stored("a")
    save_file({**tensors, "x.inv_freq": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"x.inv_freq": torch.zeros(2, dtype=torch.int32)}, tmp_path / "two.safetensors")
    targets = targets_for(tensors)
    load_checkpoint(tmp_path, targets)
    assert torch.equal(view(targets, "a"), tensors["a"])


def test_a_bias_of_attention_is_no_mask(tmp_path: Path) -> None:
    save_file({**stored("a"), "h.0.attn.bias": torch.ones(6)}, tmp_path / "model.safetensors")
    assert "1 surplus tensor: h.0.attn.bias" in refusal(tmp_path, targets_for(stored("a")))


def test_a_hub_id_without_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--old-model" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    told = refusal(folder, {})
    assert told.startswith("owner/old-model has no *.safetensors file on the hub")
    assert "from_pretrained('owner/old-model').save_pretrained(folder)" in told and "\n" not in told


def test_only_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refusal(tmp_path, {})
    assert "pytorch_model.bin" in message and "only safetensors is read" in message


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "has no *.safetensors file" in refusal(tmp_path, {})
    assert "is not a folder" in refusal(tmp_path / "absent", {})


@pytest.mark.parametrize("name", ["adapter_model", "consolidated"])
def test_files_of_another_form_are_not_taken_for_the_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(stored("a"), tmp_path / f"{name}.safetensors")
    words = {"adapter_model": "holds an adapter", "consolidated": "is in the form of the model's makers"}
    assert words[name] in refusal(tmp_path, targets_for(stored("a")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quantization_config": {"modules": ["m" * 300], "quant_method": "gptq", "bits": 4}},
            "quant_method gptq, 4 bits",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "(quantization_config = quant_method fp8)"),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "compression_config = quant_method compressed-",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "(quantization = quant_method unknown, 4 bits)"),
        ({"quantization_config": [1]}, "(quantization_config = quant_method unknown)"),
    ],
)
def test_a_quantised_checkpoint_is_named_by_its_method(tmp_path: Path, config: dict[str, object], words: str) -> None:
    save_file(stored("a"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = refusal(tmp_path, targets_for(stored("a")))
    assert words in told and told.endswith("use the unquantised checkpoint of the model (bfloat16, float16 or float32)")


def test_a_quantised_checkpoint_is_refused_by_its_config(tmp_path: Path) -> None:
    save_file(stored("a"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    message = refusal(tmp_path, targets_for(stored("a")))
    assert "gptq" in message and "not supported" in message


def test_a_tensor_of_a_quantised_dtype_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 6, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert "tensor 'a'" in refusal(tmp_path, targets_for(stored("a")))
    assert "F8_E4M3" in refusal(tmp_path, targets_for(stored("a")))


def draw(seed: int = 0, name: str = "a", part: Part = WHOLE, dtype: torch.dtype = torch.float32) -> Tensor:
    target = WeightTarget.shard(torch.empty(part.size, 32, dtype=dtype), 0, part)
    random_weights({name: target}, seed)
    assert target.view is not None
    return target.view


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    assert torch.equal(draw(), draw())
    assert not torch.equal(draw(), draw(seed=1))
    assert not torch.equal(draw(), draw(name="b"))


def test_random_weights_are_the_same_whatever_else_is_drawn() -> None:
    targets = {name: WeightTarget.whole(torch.empty(64, 32)) for name in ("first", "a")}
    random_weights(targets, 0)
    assert torch.equal(view(targets, "a"), draw())


def test_random_shards_are_slices_of_one_model() -> None:
    halves = [draw(part=Part(64, start, start + 32)) for start in (0, 32)]
    assert torch.equal(torch.cat(halves), draw())


def test_random_weights_in_bfloat16_are_the_rounded_float32_ones() -> None:
    assert torch.equal(draw(dtype=torch.bfloat16), draw().bfloat16())


def test_random_integers_are_any_that_their_type_has() -> None:
    int8_T = draw(dtype=torch.int8)
    assert int8_T.unique().numel() > 250 and torch.equal(int8_T, draw(dtype=torch.int8))
    assert float(draw(dtype=torch.int32).double().std()) == pytest.approx(2**32 / 12**0.5, rel=0.1)
    assert float(draw(dtype=torch.bool).float().mean()) == pytest.approx(0.5, abs=0.1)
    target = WeightTarget.whole(torch.empty(8, dtype=torch.int8), init="ones")
    random_weights({"a": target}, 0)
    assert view({"a": target}, "a").tolist() == [1] * 8


def test_fractions_are_not_cut_off_in_silence(tmp_path: Path) -> None:
    target = WeightTarget.whole(torch.zeros(2, 3, dtype=torch.int8))
    save_file({"w": torch.full((2, 3), 0.4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensor w cannot be loaded: torch\.bfloat16 is stored and torch\.int8 is"
    ):
        load_checkpoint(tmp_path, {"w": target})


def test_random_normal_weights_have_the_stated_spread() -> None:
    weights = draw()
    assert abs(float(weights.mean())) < RANDOM_STD / 10
    assert abs(float(weights.std()) / RANDOM_STD - 1) < 0.1


def test_ones_and_zeros_are_filled_as_asked_and_ignored_targets_are_left_out() -> None:
    targets = {
        "norm": WeightTarget.whole(torch.empty(8), init="ones"),
        "bias": WeightTarget.whole(torch.empty(8), init="zeros"),
        "copy": WeightTarget.ignored(),
    }
    random_weights(targets, 0)
    assert torch.equal(view(targets, "norm"), torch.ones(8)) and torch.equal(view(targets, "bias"), torch.zeros(8))


SPEC = ModelSpec(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, hidden_size=8, vocab_size=16, max_position=32)
SHAPES = {"embed": (16, 8), "a": (8, 8), "b": (8,)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(num_layers=2_000_000), "3 tensors, too few for the 2000000 layers"),
        (dict(num_heads=2**31), "asks for a single tensor of 68719476736"),
        (dict(vocab_size=2**31), "holds 200 numbers"),
    ],
)
def test_sizes_that_a_checkpoint_cannot_fill_are_refused_before_a_model_is_built(change, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        refuse_other_sizes("x", SHAPES, replace(SPEC, **change))


def test_sizes_that_fit_pass() -> None:
    refuse_other_sizes("x", SHAPES, SPEC)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, value: float, num_readers: int) -> None:
    tensors = stored("a", "b", "c")
    tensors["b"][1, 2] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 broken tensor: b: NaN or infinity"):
        load_checkpoint(tmp_path, targets_for(tensors), num_readers=num_readers)


@pytest.mark.parametrize("name", [7, None, "x" * 5000, "é" * 200, "\ud800", "a\0b", "../a", ["a"]])
def test_an_index_with_senseless_names_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    message = refusal(tmp_path, targets_for(stored("a")))
    assert "not in the folder" in message or "is not a readable index" in message
    assert len(message) < 600


def test_one_tensor_fills_several_views(tmp_path: Path) -> None:
    tensors = stored("fused", shape=(10, 3))
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = torch.empty(2, 3), torch.empty(3, 3)
    parts = [WeightTarget.shard(first, 0, Part(4, 2, 4)), WeightTarget.shard(second, 0, Part(6, 0, 3))]
    assert load_checkpoint(tmp_path, {"fused": WeightTarget.joined(parts)}) == 5 * 3 * 4
    assert torch.equal(first, tensors["fused"][2:4]) and torch.equal(second, tensors["fused"][4:7])


def test_what_is_not_finite_in_a_further_piece_is_found(tmp_path: Path) -> None:
    tensors = stored("fused", shape=(4, 3))
    tensors["fused"][3, 1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    parts = [WeightTarget.whole(torch.empty(2, 3)) for _ in range(2)]
    assert "NaN or infinity" in refusal(tmp_path, {"fused": WeightTarget.joined(parts)})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_transposed_and_interleaved_tensor_is_read_by_ranks(tmp_path: Path, rank: int) -> None:
    """As gpt-oss stores its experts: (experts, inputs, gate and up in turns)."""
    tensors = stored("gate_up", shape=(2, 3, 8))
    save_file(tensors, tmp_path / "model.safetensors")
    gate_XFD, up_XFD = torch.empty(2, 2, 3), torch.empty(2, 2, 3)
    part = Part(4, 2 * rank, 2 * rank + 2)
    both = [WeightTarget.shard(view, 1, part) for view in (gate_XFD, up_XFD)]
    load_checkpoint(tmp_path, {"gate_up": WeightTarget.interleaved(both, 1).transpose()})
    expected_XFD = tensors["gate_up"].mT
    assert torch.equal(gate_XFD, expected_XFD[:, 0::2][:, part.start : part.stop])
    assert torch.equal(up_XFD, expected_XFD[:, 1::2][:, part.start : part.stop])


def test_a_number_is_added_to_what_is_read_and_to_what_is_drawn(tmp_path: Path) -> None:
    tensors = stored("norm", shape=(6,))
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {"norm": WeightTarget.whole(torch.empty(6), init="zeros", add=1.0)}
    load_checkpoint(tmp_path, targets)
    assert torch.equal(view(targets, "norm"), tensors["norm"] + 1)
    random_weights(targets, 0)
    assert torch.equal(view(targets, "norm"), torch.ones(6))


def test_what_is_read_and_what_is_drawn_is_multiplied_after_it_is_added_to(tmp_path: Path) -> None:
    tensors = stored("scale", shape=(6,))
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {"scale": WeightTarget.whole(torch.empty(6), init="ones", add=1.0, times=0.25)}
    load_checkpoint(tmp_path, targets)
    assert torch.equal(view(targets, "scale"), (tensors["scale"] + 1) * 0.25)
    random_weights(targets, 0)
    assert torch.equal(view(targets, "scale"), torch.full((6,), 0.5))


def test_a_drawn_tensor_does_not_depend_on_where_its_pieces_go() -> None:
    whole, first, second = torch.empty(6, 2), torch.empty(4, 2), torch.empty(2, 2)
    joined = WeightTarget.joined([WeightTarget.whole(first), WeightTarget.whole(second)])
    random_weights({"fused": WeightTarget.whole(whole)}, 3)
    random_weights({"fused": joined}, 3)
    assert torch.equal(torch.cat([first, second]), whole)


def test_a_starred_name_ignores_all_that_begin_so(tmp_path: Path) -> None:
    tensors = stored("text.a", "vision.b", "vision.c.d")
    save_file(tensors, tmp_path / "model.safetensors")
    targets = targets_for({"text.a": tensors["text.a"]})
    assert "2 surplus tensors: vision.b, vision.c.d" in refusal(tmp_path, targets)
    load_checkpoint(tmp_path, {**targets, "vision.*": WeightTarget.ignored()})
    assert torch.equal(view(targets, "text.a"), tensors["text.a"])
