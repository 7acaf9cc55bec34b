"""The conformance suite, and an engine that serves the bundled checkpoint with its weights as codes."""

from __future__ import annotations

import json
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
import torch
from hookline_codebook.codebook import Codebook
from safetensors.torch import load_file, save_file
from torch import Tensor

from hookline import LLM, SamplingParams
from hookline.core.contracts import QuantizationConfig, StoredForm
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.testing.quantization_suite import QuantizationSuite

STATED = {"quant_method": "codebook", "num_values": 64}


def write(values_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Codes of the nearest of 64 values, at equal distances from the smallest to the largest."""
    book_V = torch.linspace(float(values_OD.min()), float(values_OD.max()), 64)
    codes = torch.bucketize(values_OD, (book_V[1:] + book_V[:-1]) / 2)
    return {"codes": codes.to(torch.uint8), "codebook": book_V}, book_V[codes]


class TestCodebook(QuantizationSuite):
    stated = STATED

    def make(self, form: StoredForm) -> Any:
        return Codebook(QuantizationConfig(), form)

    def write(self, values_OD: Tensor) -> Any:
        return write(values_OD)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled checkpoint with codes, and with the values that these stand for."""
    root = tmp_path_factory.mktemp("codebook")
    with as_file(files("hookline.plugins.models") / "qwen3_tiny") as bundled:
        for name in ("codes", "plain"):
            shutil.copytree(bundled, root / name)
    tensors = load_file(root / "plain" / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.endswith("_proj.weight"):
            parts, tensors[name] = write(tensor.float())
            stored |= {name.replace("weight", suffix): part for suffix, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, root / "codes" / "model.safetensors")
    save_file(tensors, root / "plain" / "model.safetensors")
    config = json.loads((root / "codes" / "config.json").read_text())
    (root / "codes" / "config.json").write_text(json.dumps({**config, "quantization_config": STATED}))
    return {name: root / name for name in ("codes", "plain")}


def tokens(folder: Path, **options: Any) -> list[int]:
    engine = {"max_num_seqs": 2, "num_blocks": 16, "max_num_batched_tokens": 64, "max_model_len": 64}
    with LLM(str(folder), device="cpu", engine=engine, **options) as llm:
        return list(llm.generate("import os\n", SamplingParams(max_tokens=16, temperature=0))[0].token_ids)


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"quantization": {"dequantize": True}}, {"model": "transformers"}])
def test_an_engine_gives_the_tokens_of_the_plain_checkpoint(folders: dict[str, Path], options: dict[str, Any]) -> None:
    assert tokens(folders["codes"], **options) == tokens(folders["plain"])


def test_codes_beyond_the_codebook_are_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["codes"], tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".codes"))
    tensors[name][0, 0] = 200
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has code 200"):
        tokens(tmp_path / "bad")


def test_a_number_of_values_that_a_byte_cannot_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_values = 300"):
        Codebook(QuantizationConfig(), StoredForm({"num_values": 300}))
