"""engine.kv_dtype=fp8_e4m3: a KV cache in 8 bits in every way of computing a request, its scales, and who refuses."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import LLM, SamplingParams
from hookline.core.assembly.cache_scales import stated_scales
from hookline.core.assembly.resolve import resolve
from hookline.core.checkpoint.safetensors_files import stored_tensors
from hookline.core.config.settings import validate
from hookline.core.contracts import AttentionForm, AttentionSpec, Needs, QKNorm, Rope
from hookline.core.errors import CheckpointError, ConfigError, PluginError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import Facts, choose_kernels
from hookline.core.testing.batches import make_batch, random_cache, scatter_rows
from hookline.core.worker.runner.attention import PagedAttention
from hookline.core.worker.runner.wrapped_attention import LayerScale, ScaledAttention
from hookline.plugins.kernels.torch_reference import TorchKernels
from tests.doc_pages import ROOT
from tests.hf_models import make_qwen3
from tests.quantised_layouts import LAYOUTS, write_layout
from tests.small_models import CONFIGS, save_checkpoint

FP8 = "fp8_e4m3"
ENGINE: dict[str, Any] = {
    "max_num_seqs": 4, "num_blocks": 96, "block_size": 8, "max_num_batched_tokens": 128, "max_model_len": 96,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 11},
    "preempting": {"num_blocks": 14},
    "overlapped": {"overlap": True},
    "no prefix cache": {"prefix_caching": False},
    "blocks of 1": {"block_size": 1, "num_blocks": 700},
}


def prompts() -> list[list[int]]:
    """Some of which share a beginning."""
    draw = random.Random(1)
    shared = [draw.randrange(4, 90) for _ in range(30)]
    alone = [[draw.randrange(4, 90) for _ in range(length)] for length in (1, 9, 40, 17)]
    return [*alone, *([*shared, one, one + 1] for one in (5, 7, 9)), shared[:20]]


def tokens(folder: Path | str, kv_dtype: str = FP8, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    params = [SamplingParams(temperature=index % 2, max_tokens=20, seed=index, ignore_eos=True) for index in range(8)]
    sizes = {**ENGINE, "kv_dtype": kv_dtype, **(engine or {})}
    name = options.pop("name", "auto")
    with LLM(model={"name": name, "checkpoint": str(folder)}, device="cpu", engine=sizes, **options) as llm:
        return [output.token_ids for output in llm.generate(prompts(), params)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_qwen3(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return tokens(folder)


def test_a_cache_in_8_bits_is_another_one(folder: Path, expected: Any) -> None:
    assert tokens(folder, "auto") != expected


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_in_every_way_of_computing(way: str, folder: Path, expected: Any) -> None:
    assert tokens(folder, engine=WAYS[way]) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_several_ranks_give_the_tokens_of_one(tp: int, pp: int, folder: Path, expected: Any) -> None:
    assert tokens(folder, tp=tp, pp=pp) == expected


def test_model_transformers_gives_the_tokens_of_the_native_model(folder: Path, expected: Any) -> None:
    assert tokens(folder, name="transformers") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_window", "gpt_oss_window"])
def test_windows_and_sinks_are_the_same_in_chunks_and_preempted(name: str, tmp_path: Path) -> None:
    save_checkpoint(CONFIGS[name], tmp_path)
    found = tokens(tmp_path)
    assert found != tokens(tmp_path, "auto")
    assert tokens(tmp_path, engine={"max_num_batched_tokens": 11, "num_blocks": 60}) == found


def test_the_same_memory_holds_more_blocks(folder: Path) -> None:
    def num_blocks(kv_dtype: str, dtype: str) -> int:
        sizes = {**ENGINE, "num_blocks": None, "cpu_cache_gib": 0.01, "kv_dtype": kv_dtype}
        with LLM(str(folder), device="cpu", dtype=dtype, engine=sizes) as llm:
            found: int = llm.engine.limits.plan.num_blocks
        return found

    for dtype, ratio in (("bfloat16", 2), ("float32", 4)):
        assert num_blocks(FP8, dtype) + 1 == pytest.approx(ratio * (num_blocks("auto", dtype) + 1), abs=ratio)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_dtype_that_is_not_known_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype='fp4' is not one of auto, fp8_e4m3"):
        tokens(folder, "fp4")


def test_a_model_without_keys_beside_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(CONFIGS["deepseek_v3"], tmp_path)
    with pytest.raises(ConfigError, match="layers keep latent keys, of which its values are 20 numbers; leave engine"):
        tokens(tmp_path)
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.layered")
    states = {"model_type": "layered", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    sizes = {"vocab_size": 61, "max_position_embeddings": 64, "layer_kinds": ["state", "none"]}
    (tmp_path / "config.json").write_text(json.dumps({**states, **sizes}))
    with pytest.raises(ConfigError, match=r"this model's layers keep states; leave engine\.kv_dtype out"):
        tokens(tmp_path, name="layered")


def test_kernels_that_do_not_declare_the_dtype_are_refused_by_name() -> None:
    host = PluginHost.load()
    facts = Facts("cpu", "float32", kv_dtype="float8_e4m3fn")
    assert choose_kernels(host, "torch", facts).name == "torch"
    told = "engine.kv_dtype asks for a cache in float8_e4m3fn, which it does not declare"
    with pytest.raises(PluginError, match=rf"kernels 'flash_attn' .*{told}.*Would fit: torch"):
        choose_kernels(host, "flash_attn", facts)
    assert Needs().kv_dtypes == ()  # what a stranger's entry says that knows nothing of it


@pytest.mark.slow
def test_a_card_that_cannot_convert_is_refused_with_the_fix(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "core.warm", "card=a100", f"engine.kv_dtype={FP8}", "engine.max_num_seqs=2"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    told = "kernels=triton read a cache in e4m3 on cards from compute capability 8.9 on, and this one has 8.0; leave"
    assert told in done.stderr, done.stderr[-2000:]


# ------------------------------------------------------------------------------------------------------------ scales


def attended(scale: tuple[float, float] | None, with_norm: bool, size: float, form: Any = None) -> torch.Tensor:
    """What a model gets of rows whose values are `size` times standard normal ones, and keys too if none norms them."""
    spec = AttentionSpec(4, 2, 16, 8, 8, 64, 64, torch.device("cpu"), torch.float32, kv_dtype=torch.float8_e4m3fn)
    if scale is None:  # the reference
        spec = replace(spec, kv_dtype=None)
    rows = scatter_rows([(9, 9), (6, 6)], spec.block_size, 12, seed=1)
    batch = make_batch(rows, spec, num_decodes=0)
    generator = torch.Generator().manual_seed(0)
    qkv_TC = torch.randn(15, 8 * 16, generator=generator)
    qkv_TC[:, 64:] *= size
    qkv_TC[:, :64] /= size if not with_norm else 1
    weight_E = torch.linspace(0.5, 1.5, 16)
    norm = QKNorm(weight_E, size * weight_E.flip(0), 1e-6) if with_norm else None
    rope = Rope(torch.cat((torch.ones(64, 8), torch.zeros(64, 8)), 1))
    kernels = TorchKernels(None, spec)
    kernels.prepare(batch)
    attend: Any = PagedAttention(kernels, [random_cache(spec, 12, seed=1)[:, 0]], batch)
    if scale is not None:
        attend = ScaledAttention(attend, {0: LayerScale(*scale, spec)})
    form = AttentionForm(scale=0.25 / size, **(form or {})) if with_norm else AttentionForm(**(form or {"scale": 0.25}))
    found: torch.Tensor = attend(0, qkv_TC, rope, norm, form)
    return found / size


@pytest.mark.parametrize("form", [None, {"sinks_H": torch.linspace(-2, 3, 4)}], ids=["plain", "sinks"])
@pytest.mark.parametrize("with_norm", [True, False])
def test_scales_keep_large_keys_and_values_in_range(with_norm: bool, form: Any) -> None:
    size = 4096.0
    expected = attended(None, with_norm, size, form)
    scaled = attended((size, size), with_norm, size, form)
    clipped = attended((1.0, 1.0), with_norm, size, form)
    assert (scaled - expected).abs().max() < 0.15  # of normal values, each off by up to 1/16 of itself
    assert (clipped - expected).abs().max() > 0.5
    ones = attended((1.0, 1.0), with_norm, 1.0, form)
    assert (attended((2.0**-3, 2.0**2), with_norm, 1.0, form) - ones).abs().max() < 0.01  # of subnormal numbers


NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "output_scale": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "kv_scale": ("self_attn.kv_scale",),
}


def with_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """The same checkpoint with these tensors in a further file."""
    shutil.copytree(folder, target)
    index = target / "model.safetensors.index.json"
    save_file(scales, target / "scales.safetensors")
    if index.exists():
        told = json.loads(index.read_text())
        told["weight_map"] |= dict.fromkeys(scales, "scales.safetensors")
        index.write_text(json.dumps(told))
    else:
        path = target / "model.safetensors"
        save_file({**load_file(path), **scales}, path)
    return target


@pytest.mark.parametrize("layout", NAMES)
def test_scales_are_read_by_each_layouts_names_as_powers_of_two(layout: str, folder: Path, tmp_path: Path) -> None:
    names = NAMES[layout]
    stated = {f"model.layers.1.{name}": torch.tensor(0.3 * (1 + place)) for place, name in enumerate(names)}
    found = stated_scales(stored_tensors(with_scales(folder, tmp_path / "scaled", stated)))
    assert found == {1: (0.5, 0.5 if len(names) == 1 else 1.0)}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_an_error_with_its_name(value: float, folder: Path, tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor([value])}
    stored = stored_tensors(with_scales(folder, tmp_path / "scaled", scales))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_scale is the scale of a KV cache"):
        stated_scales(stored)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_a_checkpoints_scales_are_used_by_every_rank(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = write_layout(folder, tmp_path / "layout", LAYOUTS["fp8_static"])
    names = {half: f"model.layers.{{}}.self_attn.{half}_scale" for half in "kv"}
    sets = {"small": (2.0**-13, 2.0**-13), "usual": (0.25, 0.25)}
    found, folders = {}, {}
    for name, (k, v) in sets.items():
        scales = {names["k"].format(1): torch.tensor(k), names["v"].format(1): torch.tensor(v)}
        folders[name] = with_scales(quantised, tmp_path / name, scales)
        with caplog.at_level(logging.INFO, "hookline"):
            found[name] = tokens(folders[name])
        assert "KV cache in fp8_e4m3: 2 of 2 layers have scales of the checkpoint, the others 1" in caplog.text
    assert found["usual"] == tokens(quantised)  # powers of two, which leave all numbers in range
    assert found["small"] != found["usual"]  # by which nearly every number is out of range
    for ranks in ({"tp": 2}, {"pp": 2}):
        assert tokens(folders["small"], **ranks) == found["small"]
    assert tokens(folders["small"], "auto") == tokens(quantised, "auto")


def test_what_is_resolved_names_the_dtypes(folder: Path) -> None:
    tree = {"model": {"name": "qwen3", "checkpoint": str(folder)}, "device": "cpu", "dtype": "bfloat16"}
    host = PluginHost.load()
    plain = resolve(validate({**tree, "engine": ENGINE}, host), host).attention
    stored = resolve(validate({**tree, "engine": {**ENGINE, "kv_dtype": FP8}}, host), host).attention
    assert (plain.kv_dtype, plain.stored_dtype) == (None, torch.bfloat16)
    assert (stored.dtype, stored.stored_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
