"""A checkpoint's linears quantised and written file by file, so that no more than one file is in memory.

The model says which tensors are linears, by being built without memory; the quantization says what is stored of each.
Legend: O outputs, D inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hookline.core.assembly.auto_model import with_model
from hookline.core.assembly.resolve import ResolvedConfig, resolve
from hookline.core.assembly.worker import build_model, make_kernels, matched, runtime_of
from hookline.core.checkpoint.dequantised import WEIGHT
from hookline.core.checkpoint.safetensors_files import INDEX, StoredTensor, open_file
from hookline.core.config.settings import Config
from hookline.core.contracts import (
    LoadingMatrix,
    MatrixPiece,
    MatrixPlace,
    Part,
    Quantization,
    StoredForm,
    is_offered,
)
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.plugin.host import PluginHost

_CPU, _NOWHERE = torch.device("cpu"), torch.device("meta")


def write_quantised(config: Config, host: PluginHost, target: Path) -> str:
    """Write the quantised checkpoint, and say in one line what was written.

    Raises: ConfigError for a quantization that writes no checkpoints; CheckpointError for one that is no safetensors,
    has experts in one tensor, or cannot be read; whatever resolving the configuration raises.
    """
    config, checkpoint = with_model(config, host)
    resolved = resolve(config, host, checkpoint=checkpoint)
    quantization = resolved.quantization
    assert quantization is not None
    if not is_offered(quantization.written):
        raise ConfigError(
            f"quantization={config.quantization.name} writes no checkpoints; those that quantise while loading do: "
            "fp8, fp8_block, int8, int4"
        )
    folder = resolved.checkpoint.folder
    if folder is None or resolved.checkpoint.source is not None:
        raise CheckpointError(f"{resolved.checkpoint.reference} is no folder of safetensors, and only those are read")
    stored, linears = _linears(resolved)
    left = [name.removesuffix(WEIGHT) for name, one in stored.items() if len(one.shape) == 2 and name not in linears]
    target.mkdir(parents=True, exist_ok=True)
    try:
        before, after = _write_files(stored, linears, quantization, target)
        _write_config(folder, target, quantization.states(left))
    except BaseException:  # half a checkpoint would be taken for one
        shutil.rmtree(target, ignore_errors=True)
        raise
    return f"{target}: {len(linears)} linears quantised, {before / 1e9:.3g} GB became {after / 1e9:.3g} GB"


class _Recorded(Quantization):
    """A quantization that notes which linears it is asked for matrices of."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        self.inner: Quantization = config
        self.linears: set[str] = set()

    def stores(self, name: str) -> Hashable:
        return self.inner.stores(name)

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        self.linears |= {piece.name for piece in pieces}
        return self.inner.matrix(pieces, place)


def _linears(resolved: ResolvedConfig) -> tuple[dict[str, StoredTensor], set[str]]:
    """The files' tensors by the files' names, and which of them are linears that are quantised.

    Raises: CheckpointError if one of these is part of a larger tensor.
    """
    recorded = _Recorded(resolved.quantization, StoredForm())
    resolved = replace(resolved, quantization=recorded)
    runtime = replace(runtime_of(resolved, make_kernels(resolved)), device=_NOWHERE)
    model, targets = build_model(resolved, runtime, resolved.checkpoint.config)
    stored, _ = matched(resolved.checkpoint, model, targets)
    linears = set()
    for name in recorded.linears:
        tensor = stored.get(name + WEIGHT)
        if tensor is None or tensor.within is not None or tensor.join is not None:
            raise CheckpointError(
                f"{resolved.checkpoint.reference} has no tensor {name}{WEIGHT} of its own (experts in one tensor, or "
                f"a tied head); serve it with quantization={resolved.config.quantization.name}, which quantises "
                "while it is loaded"
            )
        linears.add(tensor.name or name + WEIGHT)
    return {one.name or name: one for name, one in resolved.checkpoint.stored.items()}, linears


def _write_files(
    stored: Mapping[str, StoredTensor], linears: set[str], quantization: Quantization, target: Path
) -> tuple[int, int]:
    """Bytes of all tensors before and after."""
    by_path: dict[Path, list[str]] = {}
    for name, one in stored.items():
        by_path.setdefault(one.path, []).append(name)
    index: dict[str, str] = {}
    before = after = 0
    for path, names in sorted(by_path.items()):
        tensors: dict[str, Tensor] = {}
        with open_file(path) as file:
            for name in names:
                tensor = file.get_tensor(name)
                before += tensor.nbytes
                tensors |= _written(name, tensor, quantization) if name in linears else {name: tensor}
        save_file({name: one.contiguous() for name, one in tensors.items()}, target / path.name, {"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
        after += sum(one.nbytes for one in tensors.values())
    if len(by_path) > 1 or set(index.values()) != {"model.safetensors"}:
        told = {"metadata": {"total_size": after}, "weight_map": index}
        (target / INDEX).write_text(json.dumps(told, indent=2) + "\n")
    return before, after


def _written(name: str, weight_OD: Tensor, quantization: Quantization) -> dict[str, Tensor]:
    linear, (num_rows, num_columns) = name.removesuffix(WEIGHT), weight_OD.shape
    piece = MatrixPiece(linear, 0, Part(num_rows, 0, num_rows), Part(num_columns, 0, num_columns))
    loading = quantization.matrix([piece], MatrixPlace(num_rows, num_columns, _CPU, from_floats=True))
    for part in loading.targets().values():
        part.fill(weight_OD)
    return {f"{linear}.{suffix}": one for suffix, one in quantization.written(linear, loading.loaded()).items()}


def _write_config(folder: Path, target: Path, stated: Mapping[str, Any]) -> None:
    """config.json with what is stated of the weights, and all other files but weights."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and path.name != INDEX:
            shutil.copyfile(path, target / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    config["quantization_config"] = dict(stated)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
