"""`hookline quantize`: what it writes is loaded back as what is quantised while it is loaded, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import LLM, SamplingParams
from hookline.core.quantize.command import main
from tests.hf_models import make_qwen3, make_qwen3_moe
from tests.transformers_cases import CASES, make_checkpoint

SIZES: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 32, "max_num_batched_tokens": 64, "max_model_len": 64}
MODEL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
OPTIONS = {
    "fp8": ["quantization=fp8"],
    "fp8_block": ["quantization=fp8_block"],
    "int8": ["quantization=int8"],
    "int4": ["quantization=int4", "quantization.group_size=32"],
    "int4 without zero points": ["quantization=int4", "quantization.group_size=16", "quantization.zero_points=false"],
    "the head too": ["quantization=int8", "quantization.skip=[]"],
}


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(str(folder), device="cpu", engine=SIZES, **options) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return [list(one.token_ids) for one in llm.generate([[5, 6, 7, 8, 9], [20, 21, 22]], params)]


def quantised(folder: Path, target: Path, options: list[str]) -> Path:
    assert main([str(folder), str(target), *options]) == 0
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_written_checkpoint_gives_the_tokens_of_one_that_is_quantised_while_it_is_loaded(
    name: str, tmp_path: Path
) -> None:
    make_qwen3(tmp_path / "plain", tie_word_embeddings=False, **MODEL)
    found = quantised(tmp_path / "plain", tmp_path / "written", OPTIONS[name])
    stated: dict[str, Any] = {}
    for option in OPTIONS[name]:
        key, _, value = option.removeprefix("quantization").partition("=")
        stated[key.removeprefix(".") or "name"] = value if not key else json.loads(value)
    expected = tokens(tmp_path / "plain", quantization=stated)
    assert tokens(found) == expected
    assert tokens(found, model="transformers") == expected
    assert tokens(found, quantization={"dequantize": True}) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_experts_and_two_ranks_read_what_was_written(tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path / "plain", hidden_size=64, head_dim=16)
    options = ["quantization=int4", "quantization.group_size=8"]
    found = quantised(tmp_path / "plain", tmp_path / "written", options)
    expected = tokens(tmp_path / "plain", quantization={"name": "int4", "group_size": 8})
    assert tokens(found) == tokens(found, tp=2) == expected
    routers = [name for name in load_all(found) if name.endswith("mlp.gate.weight")]
    assert routers, "routers are no linears that are quantised"


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


THROUGH_TRANSFORMERS = [name for name in ("stablelm", "exaone", "falcon_groups", "nemotron_h") if name in CASES]
"""Families with the model's names, with other names in checkpoints, and with linears of their own class."""


def with_values(folder: Path, target: Path, values: dict[str, torch.Tensor]) -> Path:
    """A checkpoint that is not quantised, with these values in place of those in `folder`."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    save_file({name: one.contiguous() for name, one in values.items()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_a_model_of_transformers_is_written_and_gives_the_tokens_of_its_dequantised_values(
    name: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "plain", CASES[name])
    found = quantised(tmp_path / "plain", tmp_path / "written", ["quantization=fp8"])
    values = load_all(found)
    linears = [one.removesuffix("_scale") for one in values if one.endswith(".weight_scale")]
    assert len(linears) >= 8
    for linear in linears:
        values[linear] = values[linear].float() * values.pop(f"{linear}_scale")
    assert tokens(found) == tokens(with_values(found, tmp_path / "dequantised", values))
    assert tokens(found) == tokens(tmp_path / "plain", quantization="fp8")


@pytest.mark.slow
@pytest.mark.skipif("lara_mini" not in CASES, reason="this transformers has no such model")
@pytest.mark.parametrize(("left", "kept"), [("nothing", slice(0)), ("in_proj_z", slice(4096, 6144))])
def test_linears_of_one_tensor_are_quantised_each_while_they_are_loaded(left: str, kept: slice, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", CASES["lara_mini"])
    values = load_all(tmp_path / "plain")
    names = [name for name in values if name.endswith("linear_attn.in_proj.weight")]
    for name in names:
        scales = values[name].abs().amax(1, keepdim=True) / 127
        rounded = (values[name] / scales).round() * scales
        rounded[kept] = values[name][kept]
        values[name] = rounded
    expected = tokens(with_values(tmp_path / "plain", tmp_path / "rounded", values))
    skip = [r"re:^(?!.*in_proj)", left]
    assert tokens(tmp_path / "plain", quantization={"name": "int8", "skip": skip}) == expected
    assert len(names) > 1 and expected != tokens(tmp_path / "plain")


def test_all_that_is_no_linear_is_as_it_was_and_each_file_is_one_of_the_source(tmp_path: Path) -> None:
    make_qwen3(tmp_path / "plain", **MODEL)
    found = quantised(tmp_path / "plain", tmp_path / "written", ["quantization=fp8"])
    before, after = load_all(tmp_path / "plain"), load_all(found)
    assert {path.name for path in found.iterdir()} == {path.name for path in (tmp_path / "plain").iterdir()}
    kept = [name for name in before if not name.endswith("_proj.weight")]
    assert len(kept) > 4 and all(torch.equal(before[name], after[name]) for name in kept)
    index = json.loads((found / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(after) and len(set(index.values())) > 1
    stated = json.loads((found / "config.json").read_text())["quantization_config"]
    assert stated["ignore"] == ["embed_out", "lm_head", "model.embed_tokens"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{plain}"], "a source and a target are needed, and 1 are given"),
        (["{out}", "{out}", "quantization=fp8"], "does not exist; give a folder with config.json"),
        (["{plain}", "{out}"], "give quantization=fp8, fp8_block, int8 or int4"),
        (["{plain}", "{plain}", "quantization=fp8"], "is there already"),
        (["{plain}", "{out}", "quantizaton=fp8"], "unknown key 'quantizaton'. Did you mean 'quantization'?"),
        (["{plain}", "{out}", "quantization=awq"], "is not quantised"),
        (["{plain}", "{out}", "quantization=int4"], "group_size=128 does not divide the 64 inputs"),
        (["{written}", "{out}", "quantization=int8"], "this checkpoint is quantised"),
        (
            ["{plain}", "{out}", "quantization=int8", "quantization.skip=[model,lm_head]"],
            "int8 quantises none of its linears",
        ),
        (
            ["{gpt2}", "{out}", "quantization=fp8"],
            "transformer.h.0.attn.c_attn is a Conv1D, whose matrix checkpoints hold transposed, and no quantization "
            "reads or makes one; serve an unquantised checkpoint without quantization=",
        ),
    ],
)
def test_what_cannot_be_written_is_an_error_of_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_qwen3(tmp_path / "plain", **MODEL)
    if "{written}" in arguments:
        quantised(tmp_path / "plain", tmp_path / "written", ["quantization=fp8"])
    if "{gpt2}" in arguments:
        make_checkpoint(tmp_path / "gpt2", CASES["gpt2"])
    places = {name: tmp_path / name for name in ("plain", "out", "written", "gpt2")}
    assert main([one.format(**places) for one in arguments]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "error: " in one)
    assert told in line


def test_packed_values_are_read_by_the_library_compressed_tensors(tmp_path: Path) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    make_qwen3(tmp_path / "plain", **MODEL)
    found = load_all(quantised(tmp_path / "plain", tmp_path / "written", OPTIONS["int4"]))
    plain, name = load_all(tmp_path / "plain"), "model.layers.0.self_attn.q_proj"
    codes = helpers.unpack_from_int32(found[f"{name}.weight_packed"], 4, torch.Size(found[f"{name}.weight_shape"]))
    scales = found[f"{name}.weight_scale"]
    zeros = helpers.unpack_from_int32(found[f"{name}.weight_zero_point"], 4, scales.shape, packed_dim=0)
    values = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    step = scales.repeat_interleave(32, 1)
    assert bool(((values - plain[f"{name}.weight"]).abs() <= step * 0.51).all())
