"""A checkpoint's linears quantised and written file by file, so that no more than one file is in memory.

A model built without memory shows which tensors are linears; the quantization makes the tensors to store for each.
Legend: O outputs, D inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    QuantizationConfig,
    QuantizedMatrix,
    StoredForm,
    is_offered,
)
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import Option
from hookline.core.quantize.calibration import (
    MOMENTS_BYTES,
    Texts,
    cut,
    passes,
    perplexity,
    read_texts,
    reading,
    recording,
)
from hookline.core.quantize.job import Job
from hookline.core.quantize.recording import Moments

_CPU, _NOWHERE = torch.device("cpu"), torch.device("meta")


def write_quantised(job: Job, host: PluginHost) -> str:
    """Write the quantised checkpoint; returns a line with the numbers of linears and bytes, and the perplexity.

    Raises: ConfigError for a quantization that writes no checkpoints, or cannot be calibrated, and for unsuitable
    texts; CheckpointError for a source that is no safetensors, has several linears in one tensor or none that is
    quantised, or cannot be read; whatever resolving the configuration raises.
    """
    text = read_texts(job.texts) if job.texts is not None else None
    config, checkpoint = with_model(job.config, host)
    resolved = resolve(config, host, checkpoint=checkpoint)
    quantization, target = resolved.quantization, job.target
    assert quantization is not None
    if not is_offered(quantization.written):
        raise ConfigError(
            f"quantization={config.quantization.name} writes no checkpoints; those that quantise while loading do: "
            "fp8, fp8_block, int8, int4"
        )
    if job.is_calibrated and not is_offered(quantization.calibrated):
        raise ConfigError(f"quantization={config.quantization.name} rounds to the nearest alone; leave out rounding=")
    folder = resolved.checkpoint.folder
    if folder is None or resolved.checkpoint.source is not None:
        raise CheckpointError(f"{resolved.checkpoint.reference} is no folder of safetensors, and only those are read")
    stored, linears = _linears(resolved)
    source = _Source(stored, linears, quantization)
    plain = replace(config, quantization=Option(None, QuantizationConfig()), device=job.device)
    told = ""
    if text is not None:
        assert job.texts is not None
        pieces, before, rounded = _computed(plain, host, job, source, text)
        source = replace(source, rounded=rounded)
        if job.is_calibrated and len(rounded) < len(linears):
            told += f"; {len(linears) - len(rounded)} had no inputs and are rounded to the nearest"
    left = [name.removesuffix(WEIGHT) for name, one in stored.items() if len(one.shape) == 2 and name not in linears]
    target.mkdir(parents=True, exist_ok=True)
    try:
        bytes_before, bytes_after = source.write(target)
        _write_config(folder, target, quantization.states(left))
        if text is not None:
            model = replace(plain.model, config=replace(plain.model.config, checkpoint=str(target)))
            with reading(replace(plain, model=model), host) as llm:
                after = perplexity(llm, pieces.held_out)
            told += f"; perplexity of {pieces.num_held_out:,} tokens at the end of {job.texts}: "
            told += f"{before:.4g} before, {after:.4g} after"
    except BaseException:  # half a checkpoint would be taken for one
        shutil.rmtree(target, ignore_errors=True)
        raise
    sizes = f"{bytes_before / 1e9:.3g} GB became {bytes_after / 1e9:.3g} GB"
    return f"{target}: {len(linears)} linears quantised, {sizes}{told}"


def _computed(
    plain: Config, host: PluginHost, job: Job, source: _Source, text: str
) -> tuple[Texts, float, Mapping[str, QuantizedMatrix]]:
    """The texts in pieces, their perplexity without quantisation, and the calibrated matrices by tensor name."""
    assert job.texts is not None
    moments, rounded = Moments(MOMENTS_BYTES), dict[str, QuantizedMatrix]()
    config = recording(plain, source.quantization, moments) if job.is_calibrated else plain
    with reading(config, host) as llm:
        pieces = cut(llm, text, job.texts)
        before = perplexity(llm, pieces.held_out)
        if job.is_calibrated:
            stored_as = {linear: name for name, linear in source.linears.items()}
            for found in passes(llm, pieces.calibrating, moments):
                for linear, moment_DD in found.items():
                    rounded[stored_as[linear]] = source.calibrated(stored_as[linear], moment_DD)
    return pieces, before, rounded


class _Recorded(Quantization):
    """A quantization that notes the names of the linears whose matrices it makes."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        self.inner: Quantization = config
        self.linears: set[str] = set()

    def stores(self, name: str) -> Hashable:
        return self.inner.stores(name)

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        self.linears |= {piece.name for piece in pieces}
        return self.inner.matrix(pieces, place)


def _linears(resolved: ResolvedConfig) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The files' tensors by the files' names, and the linears that are quantised, by the names of their tensors.

    Raises: CheckpointError if one of these is part of a larger tensor.
    """
    recorded = _Recorded(resolved.quantization, StoredForm())
    resolved = replace(resolved, quantization=recorded)
    runtime = replace(runtime_of(resolved, make_kernels(resolved)), device=_NOWHERE)
    model, targets = build_model(resolved, runtime, resolved.checkpoint.config)
    stored, _ = matched(resolved, model, targets)
    by_name = {**stored, **{one.name: one for one in stored.values() if one.name}}
    linears, reference = {}, resolved.checkpoint.reference
    how = f"quantization={resolved.config.quantization.name}"
    for name in recorded.linears:
        tensor = by_name.get(name + WEIGHT)
        if tensor is None or tensor.within is not None or tensor.join is not None:
            raise CheckpointError(
                f"{reference} has no tensor {name}{WEIGHT} of its own (several linears in one tensor, or a tied "
                f"head); serve it with {how}, which quantises while it is loaded"
            )
        linears[tensor.name or name + WEIGHT] = name
    if not linears:
        raise CheckpointError(f"{reference} would be written as it is: {how} quantises none of its linears")
    return {one.name or name: one for name, one in resolved.checkpoint.stored.items()}, linears


@dataclass(frozen=True)
class _Source:
    """A checkpoint's tensors, and how its linears are quantised.

    stored, linears: see `_linears`. rounded: the calibrated matrices, by the tensors' names.
    """

    stored: Mapping[str, StoredTensor]
    linears: Mapping[str, str]
    quantization: Quantization
    rounded: Mapping[str, QuantizedMatrix] = field(default_factory=dict)

    def write(self, target: Path) -> tuple[int, int]:
        """Write the files; bytes of all tensors before and after."""
        by_path: dict[Path, list[str]] = {}
        for name, one in self.stored.items():
            by_path.setdefault(one.path, []).append(name)
        index: dict[str, str] = {}
        before = after = 0
        for path, names in sorted(by_path.items()):
            tensors: dict[str, Tensor] = {}
            with open_file(path) as file:
                for name in names:
                    tensor = file.get_tensor(name)
                    before += tensor.nbytes
                    tensors |= self._written(name, tensor) if name in self.linears else {name: tensor}
            save_file({name: one.contiguous() for name, one in tensors.items()}, target / path.name, {"format": "pt"})
            index |= dict.fromkeys(tensors, path.name)
            after += sum(one.nbytes for one in tensors.values())
        if len(by_path) > 1 or set(index.values()) != {"model.safetensors"}:
            told = {"metadata": {"total_size": after}, "weight_map": index}
            (target / INDEX).write_text(json.dumps(told, indent=2) + "\n")
        return before, after

    def calibrated(self, name: str, moment_DD: Tensor) -> QuantizedMatrix:
        """The matrix of a tensor's linear, rounded for inputs of these moments."""
        with open_file(self.stored[name].path) as file, torch.inference_mode():
            weight_OD = file.get_tensor(name)
            return self.quantization.calibrated(self._rounded(name, weight_OD), weight_OD, moment_DD)

    def _written(self, name: str, weight_OD: Tensor) -> dict[str, Tensor]:
        linear, matrix = name.removesuffix(WEIGHT), self.rounded.get(name)
        written = self.quantization.written(linear, matrix or self._rounded(name, weight_OD))
        return {f"{linear}.{suffix}": one for suffix, one in written.items()}

    def _rounded(self, name: str, weight_OD: Tensor) -> QuantizedMatrix:
        """The matrix of a tensor's linear, rounded to the nearest values."""
        num_rows, num_columns = weight_OD.shape
        piece = MatrixPiece(
            name.removesuffix(WEIGHT), 0, Part(num_rows, 0, num_rows), Part(num_columns, 0, num_columns)
        )
        loading = self.quantization.matrix([piece], MatrixPlace(num_rows, num_columns, _CPU, from_floats=True))
        for part in loading.targets().values():
            part.fill(weight_OD)
        return loading.loaded()


def _write_config(folder: Path, target: Path, stated: Mapping[str, Any]) -> None:
    """Write config.json with `stated` as its quantization_config, and copy all other files but weights."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and path.name != INDEX:
            shutil.copyfile(path, target / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    config["quantization_config"] = dict(stated)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
