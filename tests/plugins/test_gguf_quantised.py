"""GGUF files whose linears stay in few bits: the tokens of the same file dequantised, in the memory of few bits."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import (
    INT4,
    INT8,
    OFFSETS,
    MatrixPiece,
    MatrixPlace,
    OffsetMatrix,
    Part,
    QuantizationConfig,
    ScaledMatrix,
    StoredForm,
)
from hookline.core.errors import CheckpointError
from hookline.core.layers.quantized import QuantizedWeights
from hookline.core.testing.quantization_suite import QuantizationSuite
from hookline.core.testing.running import failures
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.quantizations.gguf import Gguf
from hookline.plugins.quantizations.gguf_blocks import PARTS, StoredMatrix
from tests.gguf_files import quantised, write_gguf
from tests.hf_models import QWEN3_MOE
from tests.plugins.test_gguf import LLAMA, answer
from tests.small_models import transformers_model

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Sizes of whole blocks of 256, which shards of two ranks cut through."""
MOE: dict[str, Any] = {**QWEN3_MOE, **WIDE, "model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 256}


class Written(StoredMatrix):
    """A matrix with the attributes of a tensor that the suite asks for."""

    dtype = torch.uint8

    def is_floating_point(self) -> bool:
        return False


def written(values: Any, kind: str) -> tuple[Written, Tensor]:
    """A matrix as a file has it, and what it stands for."""
    code = GGMLQuantizationType[kind]
    raw = quantised(values, code)
    return Written(raw, code, values.shape[1]), torch.from_numpy(dequantize(raw, code).astype("float32"))


@pytest.mark.parametrize("kind", PARTS)
def test_each_type_that_is_taken_apart_passes_the_suite(kind: str) -> None:
    """A minimum is rounded once more."""
    assert failures(suite_of(kind, 1e-7 if PARTS[kind].offsets is None else 1e-5)) == []


def suite_of(kind: str, allowed: float) -> type[QuantizationSuite]:
    class Suite(QuantizationSuite):
        num_columns = 2 * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        tolerance = allowed

        def make(self, form: StoredForm) -> Any:
            linears = {name.removesuffix(".weight"): kind for name in form.dtypes}
            return Gguf(QuantizationConfig(), StoredForm({"types": {kind: 1}, "linears": linears}, form.dtypes))

        def write(self, values_OD: Tensor) -> Any:
            stored, meant = written(values_OD.numpy(), kind)
            return {"weight": stored}, meant

    return Suite


def loaded(kinds: dict[str, str]) -> Any:
    """The matrix of joined linears of these types, each of 8 outputs and 256 inputs, and what they stand for."""
    torch.manual_seed(0)
    tensors = {name: written(torch.randn(8, 256).numpy(), kind) for name, kind in kinds.items()}
    gguf = Gguf(QuantizationConfig(), StoredForm({"types": {}, "linears": kinds}))
    whole = Part(8, 0, 8), Part(256, 0, 256)
    pieces = [MatrixPiece(name, 8 * index, *whole) for index, name in enumerate(kinds)]
    loading = gguf.matrix(pieces, MatrixPlace(8 * len(kinds), 256, CPU))
    for name, target in loading.targets().items():
        target.fill(tensors[name.removesuffix(".weight")][0])
    return loading.loaded(), torch.cat([meant for _, meant in tensors.values()])


@pytest.mark.parametrize("kind", PARTS)
def test_values_of_integers_and_scales_equal_the_packages(kind: str) -> None:
    """Bit by bit, where there is no minimum, which is rounded once more."""
    matrix, meant = loaded({"q": kind, "k": kind})
    found, has_offsets = matrix.dequantised(torch.float32), PARTS[kind].offsets is not None
    assert isinstance(matrix, OffsetMatrix if has_offsets else ScaledMatrix)
    assert matrix.scheme.values == PARTS[kind].values + " + offset" * has_offsets
    torch.testing.assert_close(found, meant, rtol=0, atol=2e-6 * float(meant.abs().max()) if has_offsets else 0)


@pytest.mark.parametrize("kind", PARTS)
def test_a_scale_of_zero_stands_for_zeros(kind: str) -> None:
    stored, _ = written(torch.randn(8, 256).numpy(), kind)
    at = 208 if kind == "Q6_K" else 0
    stored.raw_OB[3, at : at + 2] = 0  # the scale of the row's first block
    gguf = Gguf(QuantizationConfig(), StoredForm({"types": {}, "linears": {"q": kind}}))
    loading = gguf.matrix([MatrixPiece("q", 0, Part(8, 0, 8), Part(256, 0, 256))], MatrixPlace(8, 256, CPU))
    loading.targets()["q.weight"].fill(stored)
    torch.testing.assert_close(loading.loaded().dequantised(torch.float32), stored[...])


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("kind", PARTS)
def test_scales_that_are_not_finite_are_refused_by_name(kind: str, value: float) -> None:
    stored, _ = written(torch.randn(8, 256).numpy(), kind)
    at = 208 if kind == "Q6_K" else 0
    stored.raw_OB[3, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    gguf = Gguf(QuantizationConfig(), StoredForm({"types": {}, "linears": {"q": kind}}))
    loading = gguf.matrix([MatrixPiece("q", 0, Part(8, 0, 8), Part(256, 0, 256))], MatrixPlace(8, 256, CPU))
    with pytest.raises(CheckpointError, match=r"tensor q\.weight has NaN or infinity among its values"):
        loading.targets()["q.weight"].fill(stored)


def medium(stored: str) -> str:
    """The types of llama.cpp's Q4_K_M, in which values and what follows a gate have more bits."""
    if "attn_v" in stored or "ffn_down" in stored or "output" in stored:
        return "Q6_K"
    return "F32" if "ffn_gate_inp" in stored else "Q4_K"


def types_of_a_small_file(stored: str) -> str:
    """Types of which some have schemes that kernels compute."""
    return {"attn_q": "Q8_0", "attn_k": "Q4_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_0"}.get(stored.split(".")[-2], "Q5_0")


def started(caplog: pytest.LogCaptureFixture, path: Path, **options: Any) -> tuple[list[int], float, list[str]]:
    """An answer, the gigabytes of the weights that the start says, and what it says of matrices."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "hookline"):
        tokens = answer(path, **options)
    (taken,) = [found for line in caplog.messages if (found := re.search(r"weights take ([\d.e+-]+) GB", line))]
    return tokens, float(taken[1]), [line for line in caplog.messages if " matrices " in line]


@pytest.mark.parametrize("kind", ["Q8_0", "Q2_K", medium])
def test_a_cpu_whose_kernels_compute_no_few_bits_has_plain_matrices(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its products are as fast as those of any checkpoint, which they are not from few bits."""
    path = tmp_path / "wide.gguf"
    write_gguf(transformers_model(WIDE), path, kind)
    plain = started(caplog, path, quantization={"dequantize": True})
    found = started(caplog, path)
    assert found[:2] == plain[:2]
    assert plain[2] == [] and len(found[2]) == {"Q8_0": 1, "Q2_K": 0, medium: 2}[kind]


@pytest.fixture
def few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a CPU compute few bits, as those of a GPU do."""

    def computes(kernels: Any, scheme: Any, *shape: int) -> bool:
        return scheme.values in (INT8, INT4, *OFFSETS)

    def linear(kernels: Any, x_TD: Tensor, weight: Any, bias_O: Tensor | None) -> Tensor:
        return functional.linear(x_TD, weight.dequantised(x_TD.dtype), bias_O)

    def experts(kernels: Any, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for token, place in itertools.product(*map(range, expert_TA.shape)):
            index = int(expert_TA[token, place])
            hidden_1F = kernels.silu_mul(linear(kernels, x_TD[token : token + 1], gate_up.of_expert(index), None))
            out_TD[token] += weight_TA[token, place] * linear(kernels, hidden_1F, down.of_expert(index), None)[0]
        return out_TD

    for name, method in {"computes": computes, "quantized_linear": linear, "quantized_expert_mlp": experts}.items():
        monkeypatch.setattr(TorchKernels, name, method)


@pytest.mark.slow
@pytest.mark.usefixtures("few_bits")
@pytest.mark.parametrize("kind", [*PARTS, medium, types_of_a_small_file])
def test_few_bits_give_the_tokens_of_the_dequantised_file_in_less_memory(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "wide.gguf"
    write_gguf(transformers_model(WIDE), path, kind)
    wanted, plain_gb, _ = started(caplog, path, quantization={"dequantize": True})
    found, few_gb, _ = started(caplog, path)
    assert found == wanted and few_gb < (0.8 if kind is medium else 0.55) * plain_gb
    assert answer(path, model="transformers") == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("few_bits")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", medium])
def test_experts_give_the_tokens_of_the_dequantised_file(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    write_gguf(transformers_model(MOE), path, kind)
    assert answer(path) == answer(path, quantization={"dequantize": True})


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("config", [WIDE, MOE], ids=["linears", "experts"])
def test_two_ranks_give_the_tokens_of_one(config: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    write_gguf(transformers_model(config), path, medium)
    assert answer(path, tp=2) == answer(path)


def test_what_the_kernels_of_a_gpu_do_not_compute_becomes_plain_and_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"a": "Q8_0", "b": "Q4_K", "experts": "Q4_K", "more": "Q4_K"}
    gguf = Gguf(QuantizationConfig(), StoredForm({"types": {}, "linears": kinds}))
    runtime: Any = SimpleNamespace(
        kernels=SimpleNamespace(
            computes=lambda scheme, *shape: scheme.values == INT8,
            quantized_expert_mlp=lambda: None,
            expert_mlp=lambda: None,
        ),
        device=SimpleNamespace(type="cuda"),
        dtype=torch.float32,
        ranks=SimpleNamespace(size=1),
    )
    factory = QuantizedWeights(gguf, {}, from_floats=False, dequantises=False, kernels="fake")
    for name in ("zeros", "empty"):  # there is no GPU
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, make=make, **given: make(*shape, dtype=given["dtype"]))
    whole = Part(8, 0, 8), Part(256, 0, 256)
    kept, plain = (factory.matrix(runtime, 8, 256).targets([MatrixPiece(name, 0, *whole)]) for name in "ab")
    experts = factory.experts(runtime, 1, 256, 4)
    down = Part(256, 0, 256), Part(4, 0, 4)
    moved = experts.targets([MatrixPiece("experts", 0, *whole, 0)], [MatrixPiece("more", 0, *down, 0)])
    assert kept["a.weight"].write is not None
    assert plain["b.weight"].write is None and {one.write for one in moved.values()} == {None}
    with caplog.at_level(logging.INFO, "hookline"):
        factory.unfinished.clear()
        factory.finish()
    assert [line for line in caplog.messages if "dequantised as they were loaded" in line] == [
        "kernels=fake do not compute how 2 matrices are stored, which were dequantised as they were loaded"
    ]
