"""Checkpoints that are a file: which quantization opens them, and what stands for the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hookline.core.checkpoint.checkpoint import resolve_model
from hookline.core.contracts import ModelConfig, Needs, Quantization, QuantizationConfig, StoredForm
from hookline.core.errors import CheckpointError
from hookline.core.plugin.host import PluginHost
from hookline.core.tokenizer.codec import Codec
from tests.core.checkpoint.test_source import Source
from tests.core.plugin_fakes import full_plugin, host_with, plugin_module, registering

CONFIG = {"model_type": "plain", "quantization_config": {"quant_method": "crate", "bits": 3}}


class OpensNothing(Quantization):
    def __init__(self, config: Any, form: StoredForm) -> None:
        """Read nothing."""

    def stores(self, name: str) -> None:
        return None

    def matrix(self, pieces: Any, place: Any) -> Any:
        raise AssertionError("nothing is in few bits")


class Opens(OpensNothing):
    @classmethod
    def open_checkpoint(cls, config: ModelConfig) -> Any:
        source: Any = Source({})
        source.config, source.path = lambda: dict(CONFIG), config.checkpoint
        return source


def host(target: str = "Opens", **options: Any) -> PluginHost:
    options = {"config": QuantizationConfig, "methods": ("crate",), **options}
    register = registering("quantization", "crates", target=f"{__name__}:{target}", **options)
    return host_with(full_plugin(), plugin_module(register_quantizations=register))


def opened(path: Path, host: PluginHost) -> Any:
    return resolve_model(ModelConfig(checkpoint=str(path)), host=host)


def test_a_file_is_opened_by_the_quantization_whose_method_is_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "small.crate").write_bytes(b"")
    found = opened(tmp_path / "small.crate", host())
    assert found.source.path == str(tmp_path / "small.crate") and found.stored == {}
    assert found.config == {"model_type": "plain"} and found.quantization == CONFIG["quantization_config"]
    assert found.folder == tmp_path, "a tokenizer may lie there"


def test_a_folder_with_one_such_file_or_the_parts_of_one_stands_for_it(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"large-0000{number}-of-00002.crate").write_bytes(b"")
    assert opened(tmp_path, host()).source.path == str(tmp_path / "large-00001-of-00002.crate")


def test_a_folder_with_two_such_files_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.crate").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints \(a\.crate, b\.crate\); give the file that is"):
        opened(tmp_path, host())


def test_a_folder_of_safetensors_is_read_by_core(tmp_path: Path) -> None:
    for name, text in (("a.crate", ""), ("model.safetensors", ""), ("config.json", '{"hidden_size": 8}')):
        (tmp_path / name).write_text(text)
    found = opened(tmp_path, host())
    assert found.source is None and found.config == {"hidden_size": 8}


@pytest.mark.parametrize(
    "unlike", [{"target": "OpensNothing"}, {"methods": ("box",)}, {"needs": Needs(packages=("no_such_package",))}]
)
def test_a_file_that_no_quantization_opens_is_refused_as_a_file(tmp_path: Path, unlike: dict[str, Any]) -> None:
    (tmp_path / "small.crate").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"small\.crate' is a file; give a folder with config\.json"):
        opened(tmp_path / "small.crate", host(**unlike))


def test_the_tokenizer_beside_a_file_counts_and_else_the_sources(tmp_path: Path, monkeypatch: Any) -> None:
    source: Any = SimpleNamespace(tokenizer=lambda: "the source's")
    monkeypatch.setattr("hookline.core.tokenizer.codec.check_growth", lambda tokenizer: 1.0)
    assert Codec(tmp_path, source=source).tokenizer == "the source's"
    monkeypatch.setattr("hookline.core.tokenizer.codec.load_tokenizer", lambda folder: "the folder's")
    assert Codec(tmp_path, source=source).tokenizer == "the folder's"
