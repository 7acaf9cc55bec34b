"""Quantised checkpoints: each layout gives the matrices, and the tokens, of the same checkpoint dequantised."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hookline import LLM, SamplingParams
from hookline.core.assembly.resolve import resolve
from hookline.core.assembly.worker import load_model, make_kernels
from hookline.core.config.settings import Config, validate
from hookline.core.contracts import QuantizationConfig, StoredForm
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CheckpointError, ConfigError, HooklineError
from hookline.core.layers.quantized import DequantisingWeight
from hookline.core.plugin.host import PluginHost
from hookline.plugins.quantizations.auto_round import AutoRound
from hookline.plugins.quantizations.compressed_tensors import CompressedTensors
from hookline.plugins.quantizations.gptq import Gptq
from tests.hf_models import make_qwen3, make_qwen3_moe
from tests.quantised_layouts import (
    FURTHER,
    LAYOUTS,
    Layout,
    compressed,
    fp8_channel,
    packed,
    words,
    write_layout,
    write_stacked_fp8,
)
from tests.small_models import CONFIGS, save_checkpoint
from tests.transformers_cases import CASES, make_checkpoint

SIZES: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 32, "max_num_batched_tokens": 64, "max_model_len": 64}
ODD: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 56, "head_dim": 12}
"""Sizes that no block or group of the layouts divides."""
LARGE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 72}
"""Sizes of more than one block of 128, and of heads and shards that cut through blocks."""
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Makes a layout's folders for a model of these sizes, once, and the model once for all layouts."""
    plain: dict[Any, Path] = {}
    made: dict[Any, tuple[Path, Path]] = {}

    def make(name: str, make_model: Callable[..., Any] = make_qwen3, **sizes: Any) -> tuple[Path, Path]:
        model = make_model, tuple(sorted(sizes.items()))
        if model not in plain:
            plain[model] = tmp_path_factory.mktemp("plain")
            make_model(plain[model], **sizes)
        if (name, model) not in made:
            made[name, model] = write_layout(plain[model], tmp_path_factory.mktemp(name), (LAYOUTS | FURTHER)[name])
        return made[name, model]

    return make


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.load()


class Apart(LocalRanks):
    """A rank that decides by itself what all would agree on."""

    def smallest(self, value: int) -> int:
        return value


@cache
def validated(host: PluginHost, tree: str) -> Config:
    """The configuration of a tree in JSON, which is the same for every folder of a model."""
    return validate(json.loads(tree), host)


def loaded(host: PluginHost, folder: Path, rank: int = 0, tp: int = 1, **tree: Any) -> Any:
    """One rank's model with its weights."""
    tree["model"] = {"name": "qwen3", **tree.get("model", {})}
    config = validated(host, json.dumps({"engine": SIZES, "device": "cpu", "tp": tp, **tree}))
    model = replace(config.model, config=replace(config.model.config, checkpoint=str(folder)))
    resolved = resolve(replace(config, model=model), host, rank)
    resolved = replace(resolved, ranks=Apart(rank, tp))
    return load_model(resolved, make_kernels(resolved))


def matrices(model: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Each linear's matrix in float32, and whether it is kept in few bits."""
    for index, layer in enumerate(model.layers):
        parts = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        for name, linear in parts.items():
            weight = linear.weight.linear.__self__ if hasattr(linear.weight, "linear") else linear.weight
            yield f"{index}.{name}", weight.matrix_OD, isinstance(weight, DequantisingWeight)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "tp"), [(ODD, 1), (LARGE, 2), (ODD, 4)], ids=["odd", "large 2", "odd 4"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *FURTHER])
def test_each_rank_holds_the_dequantised_matrices(
    layout: str, sizes: dict[str, Any], tp: int, folders: Callable[..., tuple[Path, Path]], host: PluginHost
) -> None:
    quantised, dequantised = folders(layout, **sizes)
    for rank in range(tp):
        found, expected = (list(matrices(loaded(host, folder, rank, tp))) for folder in (quantised, dequantised))
        for (name, matrix, _), (_, plain, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(
                matrix, plain, rtol=1e-6, atol=1e-8, msg=lambda told, name=name: f"{name}: {told}"
            )
        assert any(is_quantised for *_, is_quantised in found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantised_at_load_all_matrices_are_plain(
    layout: str, folders: Callable[..., tuple[Path, Path]], host: PluginHost
) -> None:
    quantised, dequantised = folders(layout, **ODD)
    found = list(matrices(loaded(host, quantised, 1, 2, quantization={"dequantize": True})))
    expected = list(matrices(loaded(host, dequantised, 1, 2)))
    for (name, matrix, is_quantised), (_, plain, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(matrix, plain, rtol=1e-6, atol=1e-8)
        assert not is_quantised, name


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    llm = LLM(str(folder), device="cpu", engine=SIZES, **options)
    try:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        return [list(output.token_ids) for output in outputs]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def wanted() -> Callable[[Path], list[list[int]]]:
    """The tokens of a dequantised checkpoint, computed once."""
    return cache(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tokens_are_those_of_the_dequantised_checkpoint(
    layout: str, folders: Callable[..., tuple[Path, Path]], wanted: Callable[[Path], list[list[int]]]
) -> None:
    quantised, dequantised = folders(layout, **ODD)
    assert tokens(quantised) == wanted(dequantised)
    assert tokens(quantised, model="transformers") == wanted(dequantised)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("model", ["auto", "transformers"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_tokens_of_one(
    layout: str, model: str, folders: Callable[..., tuple[Path, Path]], wanted: Callable[[Path], list[list[int]]]
) -> None:
    quantised, dequantised = folders(layout, **ODD)
    assert tokens(quantised, tp=2, model=model) == wanted(dequantised)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["auto", "transformers"])
@pytest.mark.parametrize("layout", ["fp8_blocks", "fp8_tensor", "packed_zeros", "gptq_order", "modelopt_nvfp4"])
def test_experts_give_the_tokens_of_the_dequantised_checkpoint(
    model: str, layout: str, folders: Callable[..., tuple[Path, Path]], wanted: Callable[[Path], list[list[int]]]
) -> None:
    quantised, dequantised = folders(layout, make_qwen3_moe)
    assert tokens(quantised, model=model) == wanted(dequantised)


@pytest.mark.slow
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("block", [(16, 24), (8, 16)], ids=["cut through the gate", "end with it"])
def test_experts_in_one_tensor_give_the_tokens_of_the_dequantised_checkpoint(
    block: tuple[int, int], dequantize: bool, tmp_path: Path
) -> None:
    make_qwen3_moe(tmp_path / "plain", hidden_size=40)
    quantised, dequantised = write_stacked_fp8(tmp_path / "plain", tmp_path, block)
    for model in ("auto", "transformers"):
        assert tokens(quantised, model=model, quantization={"dequantize": dequantize}) == tokens(dequantised)


@pytest.mark.slow
def test_llama_4s_experts_in_one_tensor_are_read_as_meta_stores_them(tmp_path: Path) -> None:
    """In FP8, with the inputs first, and a scale for each output."""
    make_checkpoint(tmp_path / "plain", CASES["llama4"])
    stated = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn", "feed_forward.router"]}
    values: dict[str, Tensor] = {}
    for file in (tmp_path / "plain").glob("*.safetensors"):
        values |= load_file(file)
    packed = dict(values)
    for name in [name for name in values if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stored, meant = zip(*[fp8_channel(matrix.T) for matrix in values[name]], strict=True)
        packed[name] = torch.stack([one["weight"].view(torch.uint8).T for one in stored]).view(torch.float8_e4m3fn)
        packed[f"{name}_scale"] = torch.stack([one["weight_scale"].T for one in stored])
        values[name] = torch.stack([one.T for one in meant])
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    folders = tmp_path / "quantised", tmp_path / "dequantised"
    for folder, tensors, more in zip(folders, (packed, values), ({"quantization_config": stated}, {}), strict=True):
        folder.mkdir()
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    assert tokens(folders[0]) == tokens(folders[1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fp8_channel", "packed"])
def test_llama_4s_experts_may_be_stored_one_by_one_as_quantised_ones_are(layout: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole", CASES["llama4"])
    plain, apart = tmp_path / "plain", {}
    for file in (tmp_path / "whole").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            stem, _, kind = name.rpartition(".experts.")
            kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
            for expert, matrix in enumerate(tensor if kinds else ()):
                each = zip(kinds, matrix.T.chunk(len(kinds)), strict=True)
                apart |= {f"{stem}.experts.{expert}.{one}.weight": part.contiguous() for one, part in each}
            apart |= {} if kinds else {name: tensor}
    plain.mkdir()
    save_file(apart, plain / "model.safetensors")
    shutil.copy(tmp_path / "whole" / "config.json", plain)
    assert tokens(plain) == tokens(tmp_path / "whole")
    quantised, dequantised = write_layout(plain, tmp_path, replace(LAYOUTS[layout], left=("router",)))
    assert tokens(quantised) == tokens(dequantised)


MIXTRAL: dict[str, Any] = {**CONFIGS["llama"], "model_type": "mixtral", "num_local_experts": 3}
"""A model whose checkpoints have other names (block_sparse_moe.experts.0.w1) than transformers' module of it."""
EXPERTS_BY_NAME = Layout(
    {
        **compressed("mixed-precision", {}),
        "config_groups": {
            "experts": {
                "targets": ["re:.*block_sparse_moe[.]experts.*"],
                "format": "pack-quantized",
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
            },
            "others": {
                "targets": ["Linear"],
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            },
        },
        "ignore": ["lm_head", "re:.*block_sparse_moe[.]gate"],
    },
    fp8_channel,
    left=("block_sparse_moe.gate",),
    others={"experts": packed(16)},
)


@pytest.mark.parametrize(
    "layout",
    [EXPERTS_BY_NAME, *(replace(LAYOUTS[name], left=("block_sparse_moe.gate",)) for name in ("fp8_blocks", "awq"))],
    ids=["by name", "fp8_blocks", "awq"],
)
def test_a_model_that_calls_tensors_otherwise_than_its_checkpoints_is_read_by_the_checkpoints_names(
    layout: Layout, tmp_path: Path
) -> None:
    save_checkpoint(MIXTRAL, tmp_path / "plain")
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path, layout)
    assert tokens(quantised) == tokens(dequantised)


def test_a_quantised_decoder_alone_has_its_prefix_added(tmp_path: Path) -> None:
    """As BLOOM's on the hub, whose names begin with h.0."""
    config = {"model_type": "bloom", "vocab_size": 96, "hidden_size": 40, "n_layer": 1, "n_head": 4}
    save_checkpoint(config, tmp_path / "plain")
    layout = replace(LAYOUTS["gptq_order"], left=("word_embeddings",))
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path, layout)
    stored = load_file(quantised / "model.safetensors")
    save_file({name.removeprefix("transformer."): one for name, one in stored.items()}, quantised / "model.safetensors")
    assert tokens(quantised) == tokens(dequantised)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_quantised_while_loading_is_the_same_on_all_ranks(
    name: str, tp: int, tmp_path: Path, host: PluginHost
) -> None:
    make_qwen3(tmp_path, **LARGE)
    given = {"name": name, **({"group_size": 32} if name == "int4" else {})}
    whole = dict((name, matrix) for name, matrix, _ in matrices(loaded(host, tmp_path, quantization=given)))
    plain = dict((name, matrix) for name, matrix, _ in matrices(loaded(host, tmp_path)))
    parts = [list(matrices(loaded(host, tmp_path, rank, tp, quantization=given))) for rank in range(tp)]
    for index, (name, _, is_quantised) in enumerate(parts[0]):
        assert is_quantised
        assert 0 < (whole[name] - plain[name]).abs().max() < plain[name].abs().max() / 10
        if name.endswith(("output", "down")):
            joined = torch.cat([part[index][1] for part in parts], 1)
            torch.testing.assert_close(joined, whole[name], rtol=0, atol=0)
        elif name.endswith("gate_up"):
            halves = zip(*(part[index][1].chunk(2) for part in parts), strict=True)
            torch.testing.assert_close(torch.cat([torch.cat(half) for half in halves]), whole[name], rtol=0, atol=0)


@pytest.mark.parametrize("given", [{"weights": "random"}, {}], ids=["random", "stored"])
def test_a_quantised_checkpoint_may_have_random_weights_and_none_other_is_read(
    given: dict[str, str], folders: Callable[..., tuple[Path, Path]], host: PluginHost, tmp_path: Path
) -> None:
    quantised, _ = folders("fp8_blocks")
    shutil.copytree(quantised, tmp_path / "copy")
    if given:
        (tmp_path / "copy" / "model.safetensors").unlink()
    found = list(matrices(loaded(host, tmp_path / "copy", model=given)))
    assert all(is_quantised and bool(matrix.isfinite().all()) for _, matrix, is_quantised in found)
    assert all(float(matrix.std()) > 0.005 for _, matrix, _ in found)


def test_an_empty_skip_quantises_the_head_too(tmp_path: Path, host: PluginHost) -> None:
    make_qwen3(tmp_path, tie_word_embeddings=False)
    heads = [
        loaded(host, tmp_path, quantization={"name": "fp8", **given}).head.weight.linear.__self__
        for given in ({}, {"skip": []})
    ]
    assert [isinstance(head, DequantisingWeight) for head in heads] == [False, True]
    torch.testing.assert_close(heads[1].matrix_OD, heads[0].matrix_OD, rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("layout", ["fp8_small_blocks", "packed", "awq", "gptq_order", "modelopt_nvfp4"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_head_that_is_quantised_is_read_so_whatever_the_lists_say(
    dequantize: bool, layout: str, tmp_path: Path, host: PluginHost
) -> None:
    make_qwen3(tmp_path / "plain", tie_word_embeddings=False, **ODD)
    made = replace(LAYOUTS[layout], with_head=True)
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path, made)
    heads = [
        loaded(host, folder, 1, 2, **given).head.weight
        for folder, given in ((quantised, {"quantization": {"dequantize": dequantize}}), (dequantised, {}))
    ]
    found, expected = (head.linear.__self__ if hasattr(head, "linear") else head for head in heads)
    assert isinstance(found, DequantisingWeight) is not dequantize
    torch.testing.assert_close(found.matrix_OD, expected.matrix_OD, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("layout", ["fp8_small_blocks", "packed", "gptq_order"])
def test_a_quantised_head_of_its_own_is_read_though_the_config_ties_it(
    layout: str, tmp_path: Path, host: PluginHost
) -> None:
    make_qwen3(tmp_path / "plain", tie_word_embeddings=False, **ODD)
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path, replace(LAYOUTS[layout], with_head=True))
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    heads = [loaded(host, folder).head.weight for folder in (quantised, dequantised)]
    found, expected = (head.linear.__self__ if hasattr(head, "linear") else head for head in heads)
    torch.testing.assert_close(found.matrix_OD, expected.matrix_OD, rtol=1e-6, atol=1e-8)


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None], **stated: Any) -> Path:
    """A copy of a checkpoint with other tensors, or another quantization_config."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] |= stated
    (to / "config.json").write_text(json.dumps(config))
    return to


NAME = "model.layers.1.self_attn.k_proj"


def not_a_number(tensor: Tensor) -> Tensor:
    """With NaN as its first element, if its dtype has one; exponents (e8m0) have it as all bits set."""
    found = tensor.clone()
    if tensor.dtype == torch.float8_e4m3fn:
        found.view(torch.uint8).view(-1)[0] = 0x7F
    elif tensor.is_floating_point():
        found.view(-1)[0] = torch.nan
    elif tensor.dtype == torch.uint8 and not tensor.shape[-1] > 5:
        found.view(-1)[0] = 0xFF
    return found


def add(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight_zero_point"] = torch.zeros(1)


def nothing(tensors: dict[str, Tensor]) -> None:
    pass


def as_bytes(tensor: Tensor) -> tuple[Any, ...]:
    """All there is to it."""
    return tensor.dtype, tensor.shape, bytes(tensor.reshape(-1).view(torch.uint8).numpy())


FAULTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda _: None,
    "misshaped": lambda tensor: torch.ones(9, 9).to(tensor.dtype),
    "transposed": lambda tensor: tensor.mT.contiguous() if tensor.ndim == 2 else tensor,
    "of another dtype": lambda tensor: torch.zeros(tensor.shape, dtype=torch.int16),
    "not a number": not_a_number,
}
MAY_LACK = ("weight_shape", "input_scale", ".g_idx")
"""Tensors that some checkpoints of a layout do not have."""


@pytest.mark.slow
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_in_any_tensor_of_any_layout_is_named(
    layout: str, dequantize: bool, folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    folder = folders(layout, **ODD)[0]
    plain = load_file(folder / "model.safetensors")
    names = [name for name in plain if name.startswith(f"{NAME}.") and not name.endswith((".k_scale", ".bias"))]
    assert len(names) > 1
    for name, (fault, spoil) in itertools.product(names, FAULTS.items()):
        spoilt = spoil(plain[name])
        is_same = spoilt is not None and as_bytes(spoilt) == as_bytes(plain[name])
        may_lack = fault == "missing" and name.endswith(MAY_LACK) and not LAYOUTS[layout].config.get("desc_act")
        may_lack = may_lack or (fault == "missing" and layout == "int8_tensor_old" and name.endswith("zero_point"))
        may_lack = may_lack and LAYOUTS[layout].config.get("activation_scheme") != "static"
        is_square = fault == "transposed" and spoilt is not None and spoilt.shape == plain[name].shape
        if may_lack or is_square or is_same:
            continue

        def change(tensors: dict[str, Tensor], name: str = name, spoilt: Tensor | None = spoilt) -> None:
            tensors.pop(name)
            tensors |= {} if spoilt is None else {name: spoilt}

        bad = changed(folder, tmp_path / name / fault, change)
        with pytest.raises(CheckpointError) as caught:
            loaded(host, bad, quantization={"dequantize": dequantize})
        assert name in str(caught.value) and "\n" not in str(caught.value), (name, fault, caught.value)


@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8_blocks", "modelopt_fp8"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_bias_that_the_model_does_not_add_is_named_unless_it_is_zero(
    layout: str, dequantize: bool, folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.bias"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.tensor([0.0] * 55 + [0.5])

    folder = changed(folders(layout, **ODD)[0], tmp_path / "biased", change)
    with pytest.raises(CheckpointError, match=name):
        loaded(host, folder, quantization={"dequantize": dequantize})


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_tensor_that_no_layout_has_is_named(dequantize: bool, folders: Any, host: PluginHost, tmp_path: Path) -> None:
    folder = changed(folders("fp8_blocks")[0], tmp_path / "bad", add)
    with pytest.raises(CheckpointError, match=f"surplus tensor: {NAME}.weight_zero_point"):
        loaded(host, folder, quantization={"dequantize": dequantize})


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"quant_method": "bitsandbytes"}, ["quant_method bitsandbytes", "which no quantization here reads", "fp8"]),
        ({"fmt": "e5m2"}, ["quantization_config.fmt = 'e5m2'", "e4m3"]),
        ({"weight_block_size": [0, 128]}, ["weight_block_size", "2 whole numbers"]),
        ({"activation_scheme": "other"}, ["activation_scheme", "dynamic, static"]),
        ({"modules_to_not_convert": 3}, ["modules_to_not_convert", "a list of texts"]),
    ],
)
def test_what_a_checkpoint_states_and_is_not_read_is_named(
    stated: dict[str, Any], told: list[str], folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    folder = changed(folders("fp8_blocks")[0], tmp_path / "other", nothing, **stated)
    with pytest.raises(HooklineError) as caught:
        loaded(host, folder)
    assert all(word in str(caught.value) for word in told) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        (
            {"packing_format": "auto_round:gptqmodel"},
            ["packing_format = 'auto_round:gptqmodel'", "auto_round:auto_awq"],
        ),
        ({"data_type": "mx_fp"}, ["data_type = 'mx_fp'", "int"]),
        ({"act_bits": 8}, ["act_bits = 8", "16, 32"]),
        ({"bits": 5}, ["bits = 5", "2, 3, 4, 8"]),
        ({"extra_config": {"mlp.(": {"bits": 8}}}, ["extra_config", "no regular expression"]),
        ({"extra_config": {"lm_head": 8}}, ["extra_config.lm_head = 8", "a mapping"]),
        ({"block_name_to_quantize": 3}, ["block_name_to_quantize = 3", "names of blocks"]),
    ],
)
def test_settings_of_auto_round_that_are_not_read_are_named(stated: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoRound(QuantizationConfig(), StoredForm({"bits": 4, "group_size": 8, "sym": True, **stated})).stores(
            "lm_head"
        )
    assert all(word in str(caught.value) for word in told)


@pytest.mark.parametrize(
    "inside", ["model.language_model.", "language_model.model.", "model.text_model.", "thinker.model."]
)
def test_a_target_may_be_the_name_inside_a_checkpoint_that_also_sees_or_hears(inside: str) -> None:
    weights = {"num_bits": 8, "type": "int", "group_size": 8}
    whole = {"targets": [f"{inside}layers.0.mlp.down_proj"], "format": "pack-quantized", "weights": weights}
    others = {"targets": ["Linear"], "format": "int-quantized", "weights": {"num_bits": 8, "type": "int"}}
    stated = {"config_groups": {"group_0": others, "group_1": whole}}
    found = CompressedTensors(QuantizationConfig(), StoredForm(stated))
    forms = [found.stores(f"model.layers.{layer}.mlp.down_proj") for layer in range(2)]
    assert [form and form.written for form in forms] == ["pack-quantized", "int-quantized"]


def test_a_pattern_of_dynamic_may_name_the_language_model_inside_a_checkpoint() -> None:
    dynamic = {r"+:^model\.language_model\.layers\.0\.": {"bits": 8}, r"-:^model\.language_model\.layers\.1\.": {}}
    gptq = Gptq(QuantizationConfig(), StoredForm({"bits": 4, "group_size": 8, "dynamic": dynamic}))
    found = [gptq.stores(f"model.layers.{layer}.mlp.down_proj") for layer in range(3)]
    assert [form and form[1] for form in found] == [8, None, 4]


def test_a_quantization_that_does_not_fit_the_checkpoint_is_refused_with_the_fix(
    folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    quantised, dequantised = folders("fp8_blocks")
    for folder, given, told in (
        (quantised, {"name": "fp8"}, "leave out quantization="),
        (dequantised, {"name": "fp8_checkpoint"}, "is not quantised"),
        (dequantised, {"name": "fp8", "dequantize": True}, "leave one out"),
    ):
        with pytest.raises(ConfigError, match=told):
            loaded(host, folder, quantization=given)


def reorder(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.g_idx"] = tensors[f"{NAME}.g_idx"].flip(0)


def leave_the_groups(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.g_idx"][0] = 99


def shift_zeros(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.qzeros"] += 1


def other_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight_shape"][1] += 1


def no_input_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.input_scale"].zero_()


def shift_int8_zeros(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight_zero_point"] += 1


def spoil_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.scales"][0, 0] = torch.inf


def smooth(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.pre_quant_scale"] = torch.full((40,), 0.5)


def turn_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight_scale_inv"].view(-1)[-1] *= -1


def enlarge_scales(tensors: dict[str, Tensor]) -> None:
    next(one for name, one in tensors.items() if name.startswith(NAME) and name.endswith(SCALES)).fill_(3e38)


def lose_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight_scale_inv"].view(-1)[0] = 0


SCALES = ("scale_inv", "weight_scale", "scale_2")


def lose_all_scales(tensors: dict[str, Tensor]) -> None:
    next(one for name, one in tensors.items() if name.startswith(NAME) and name.endswith(("scales", "scale_2"))).zero_()


@pytest.mark.parametrize(
    ("layout", "change", "told"),
    [
        ("modelopt_fp8", smooth, [f"{NAME}.pre_quant_scale", "without AWQ or SmoothQuant"]),
        ("fp8_small_blocks", turn_scales, [f"{NAME}.weight_scale_inv", "scales below zero"]),
        ("fp8_small_blocks", lose_scales, [f"{NAME}.weight_scale_inv", "scales of zero"]),
        ("fp8_small_blocks", enlarge_scales, [f"{NAME}.weight_scale_inv", "up to 3e+38", "become infinite"]),
        ("packed", enlarge_scales, [f"{NAME}.weight_scale", "become infinite"]),
        ("modelopt_nvfp4", enlarge_scales, [f"{NAME}.weight_scale_2", "become infinite"]),
        ("gptq_order", lose_all_scales, [f"{NAME}.scales", "scales of zero"]),
        ("modelopt_nvfp4", lose_all_scales, [f"{NAME}.weight_scale_2", "scales of zero"]),
        ("packed", other_shape, [f"{NAME}.weight_shape", "says [24, 41], and the model needs [24, 40]"]),
        ("modelopt_fp8", no_input_scale, [f"{NAME}.input_scale is 0"]),
        ("int8_tensor_old", shift_int8_zeros, [f"{NAME}.weight_zero_point", "symmetric=false"]),
        ("gptq", reorder, [f"{NAME}.g_idx", "order of their own", "desc_act=true"]),
        ("gptq", shift_zeros, [f"{NAME}.qzeros", "zero points of its own", "sym=false"]),
        ("gptq_order", leave_the_groups, [f"{NAME}.g_idx", "to 99, and there are 5"]),
        ("awq", spoil_scales, [f"{NAME}.scales", "NaN or infinity"]),
    ],
)
def test_groups_and_zero_points_that_cannot_be_right_are_named(
    layout: str, change: Callable[..., None], told: list[str], folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    folder = changed(folders(layout, **ODD)[0], tmp_path / "bad", change)
    with pytest.raises(CheckpointError) as caught:
        loaded(host, folder)
    assert all(word in str(caught.value) for word in told) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "stated"),
    [
        ("gptq", None),
        ("packed", None),
        ("packed", {**compressed("pack-quantized", {"num_bits": 4, "group_size": 16}), "ignore": []}),
    ],
)
def test_a_quantised_matrix_that_no_config_tells_of_is_the_reason(
    layout: str, stated: dict[str, Any] | None, folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    if stated is not None:
        stated["config_groups"]["group_0"]["targets"] = ["Conv2d"]
    folder = changed(folders(layout, **ODD)[0], tmp_path / "copy", nothing)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    with pytest.raises(CheckpointError, match=r"is of a quantised matrix, and the quantization_config does not say"):
        loaded(host, folder)


def test_zero_scales_of_zeros_are_served(folders: Any, host: PluginHost, tmp_path: Path) -> None:
    """Tools write them for blocks of zeros; a group of four bits may have lost its scale to a dtype of few bits."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}.weight"][:16] = 0
        tensors[f"{NAME}.weight_scale_inv"][0] = 0

    def change_one(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}.scales"][0, 0] = 0

    for layout, changes in (("fp8_small_blocks", change), ("gptq_order", change_one)):
        loaded(host, changed(folders(layout, **ODD)[0], tmp_path / layout, changes))


@pytest.mark.parametrize(
    ("layout", "stated", "told"),
    [
        ("gptq", {"bits": 5}, ["bits = 5", "2, 3, 4, 8"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin'", "gptq, gptq_v2"]),
        ("awq", {"version": "gemv"}, ["version = 'gemv'"]),
        ("awq", {"version": None, "checkpoint_format": "gemv"}, ["checkpoint_format = 'gemv'"]),
        ("awq", {"version": None, "format": "llm-awq"}, ["format = 'llm-awq'"]),
        ("gptq", {"format": "gptq_p"}, ["format = 'gptq_p'", "gptq, gptq_v2"]),
        ("gptq", {"pack_dtype": "int16"}, ["pack_dtype = 'int16'", "int32"]),
        ("awq", {"group_size": "x"}, ["group_size = 'x'", "a whole number"]),
        ("int8", {"format": "marlin-24"}, ["format = 'marlin-24'", "pack-quantized"]),
        ("int8", {"config_groups": {}}, ["config_groups = {}"]),
        ("int8", {"transform_config": {"config_groups": {"R1": {}}}}, ["transform_config = ", "supported: none"]),
        ("int8", {"ignore": ["re:("]}, ["ignore has '('", "no regular expression"]),
        ("gptq", {"is_marlin_format": True}, ["is_marlin_format = True"]),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 5}}}, ["bits = 5", "2, 3, 4, 8"]),
        ("gptq", {"dynamic": {"+:.*down.*": 8}}, ["dynamic.+:.*down.* = 8", "a mapping"]),
        ("modelopt_fp8", {"quant_algo": "W4A8_AWQ"}, ["quant_algo = 'W4A8_AWQ'", "FP8, NVFP4"]),
        ("modelopt_fp8", {"quant_algo": "MIXED_PRECISION"}, ["quantized_layers = missing"]),
        (
            "modelopt_fp8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0": {"quant_algo": "X"}}},
            ["quantized_layers.model.layers.0.quant_algo = 'X'"],
        ),
    ],
)
def test_forms_that_are_not_read_are_named(
    layout: str, stated: dict[str, Any], told: list[str], folders: Any, host: PluginHost, tmp_path: Path
) -> None:
    folder = changed(folders(layout)[0], tmp_path / "other", nothing)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], **stated}
    if layout == "int8" and "format" in stated:
        config["quantization_config"]["config_groups"]["group_0"].pop("format", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        loaded(host, folder)
    assert all(word in str(caught.value) for word in told) and "\n" not in str(caught.value)


def with_stated(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A quantization_config with other values of its group's weights, or without those that are None."""
    group = config["config_groups"]["group_0"]
    weights = {key: value for key, value in {**group["weights"], **changes}.items() if value is not None}
    return {**config, "config_groups": {"group_0": {**group, "weights": weights}}}


def with_attention(config: dict[str, Any]) -> dict[str, Any]:
    """The same with a group of attentions, whose weights are not quantised."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}
    group = {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": inputs, "format": "dense"}
    return {**config, "config_groups": {**config["config_groups"], "group_1": group}}


GPTQ_V2 = LAYOUTS["gptq_v2_order_zeros"]
BY_CHANNEL = Layout(LAYOUTS["packed"].config, packed(2**20))


@pytest.mark.parametrize(
    ("layout", "stated", "file"),
    [
        (LAYOUTS["gptq_order"], {"bits": 4, "group_size": 8, "desc_act": True, "sym": True}, "quantize_config.json"),
        (LAYOUTS["awq"], {"zero_point": True, "q_group_size": 8, "w_bit": 4, "version": "GEMM"}, "quant_config.json"),
        (LAYOUTS["awq"], {**LAYOUTS["awq"].config, "zero_point": False, "sym": True}, ""),
        (LAYOUTS["fp8_blocks"], {**LAYOUTS["fp8_blocks"].config, "fmt": "float8_e4m3fn"}, ""),
        (LAYOUTS["packed"], with_stated(dict(LAYOUTS["packed"].config), strategy=None), ""),
        (BY_CHANNEL, with_stated(dict(BY_CHANNEL.config), strategy=None, group_size=-1), ""),
        (LAYOUTS["modelopt_nvfp4"], {**LAYOUTS["modelopt_nvfp4"].config, "quant_method": "modelopt_fp4"}, ""),
        (LAYOUTS["modelopt_nvfp4"], {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": ["lm_head"]}, ""),
        (FURTHER["modelopt_int8"], {"quant_method": "modelopt", "quant_algo": "W8A16", "ignore": ["lm_head"]}, ""),
        (LAYOUTS["packed"], with_attention(dict(LAYOUTS["packed"].config)), ""),
        (GPTQ_V2, {**GPTQ_V2.config, "checkpoint_format": None, "format": "gptq_v2"}, ""),
    ],
    ids=[
        "autogptq's file",
        "autoawq's file",
        "autoround's awq",
        "MiniMax-M2's fmt",
        "group unstated",
        "channel unstated",
        "modelopt_fp4",
        "modelopt's NVFP4_AWQ",
        "modelopt's W8A16",
        "attention",
        "format",
    ],
)
def test_what_tools_write_of_the_same_layout_in_other_words_is_read(
    layout: Layout, stated: dict[str, Any], file: str, tmp_path: Path, host: PluginHost
) -> None:
    make_qwen3(tmp_path / "plain", **ODD)
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path, layout)
    config = json.loads((dequantised / "config.json").read_text())
    whole = config if file else {**config, "quantization_config": stated}
    (quantised / "config.json").write_text(json.dumps(whole))
    if file:
        (quantised / file).write_text(json.dumps(stated))
    found, expected = (list(matrices(loaded(host, one))) for one in (quantised, dequantised))
    for (_, matrix, is_quantised), (_, plain, _) in zip(found, expected, strict=True):
        assert is_quantised and torch.allclose(matrix, plain, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {**compressed("dense", {}), "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
    ids=["modelopt", "modelopt's config.json", "compressed-tensors"],
)
def test_a_checkpoint_whose_cache_alone_is_quantised_has_plain_matrices(
    stated: dict[str, Any], tmp_path: Path, host: PluginHost
) -> None:
    make_qwen3(tmp_path, max_shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{NAME}.k_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    assert not any(is_quantised for *_, is_quantised in matrices(loaded(host, tmp_path)))


def test_groups_that_were_never_set_are_those_of_neighbours(tmp_path: Path, host: PluginHost) -> None:
    make_qwen3(tmp_path / "plain", **ODD)
    layout = replace(LAYOUTS["packed"], config=LAYOUTS["packed_order"].config)
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path, layout)

    def leave_unset(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_shape")]:
            tensors[name.replace("weight_shape", "weight_g_idx")] = torch.full((int(tensors[name][1]),), -1)

    folder = changed(quantised, tmp_path / "unset", leave_unset)
    found, expected = (list(matrices(loaded(host, one))) for one in (folder, dequantised))
    for (_, matrix, _), (_, plain, _) in zip(found, expected, strict=True):
        assert torch.allclose(matrix, plain, rtol=1e-6, atol=1e-8)


def test_modelopts_own_file_beside_a_config_is_read(folders: Any, host: PluginHost, tmp_path: Path) -> None:
    quantised, dequantised = folders("modelopt_nvfp4", **ODD)
    folder = changed(quantised, tmp_path / "two", nothing)
    config = json.loads((folder / "config.json").read_text())
    stated = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated["quantization"]}))
    found, expected = (list(matrices(loaded(host, one))) for one in (folder, dequantised))
    for (_, matrix, is_quantised), (_, plain, _) in zip(found, expected, strict=True):
        assert is_quantised and torch.allclose(matrix, plain, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dim", [0, 1])
def test_packed_values_are_those_of_the_library_compressed_tensors(dim: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 16, (24, 40), generator=torch.Generator().manual_seed(1))
    theirs = helpers.pack_to_int32((codes - 8).to(torch.int8), 4, packed_dim=dim)
    assert torch.equal(words(codes, 4, dim), theirs)
