"""The safetensors files of a checkpoint folder and the tensors in them, read from the files' headers alone.

Imports no torch, so that front ends of the server start without it. Pickled weights are never opened, only named in the
error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hookline.core.errors import CheckpointError, one_short_line, shown, shown_key

INDEX = "model.safetensors.index.json"
"""Hugging Face's list of the shards of a checkpoint."""
MAX_FILE_NAME = 200
"""Most bytes of a shard's name, as UTF-8; file systems end at 255."""
MXFP4 = "mxfp4"
"""The quantisation that mxfp4.py dequantises while it is loaded."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of the two tensors that store an MXFP4 tensor."""
MXFP4_BYTES = 16
"""Bytes of a group of 32 values."""
QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys of a config.json that say how weights are quantised: transformers', compressed-tensors' and MLX's."""
QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of modelopt, AutoGPTQ and AutoAWQ that say so beside a config.json; without a quant_method, the file's name
takes its place."""
PACKED = (".qweight", ".weight_packed")
"""How the names of quantised matrices end that are stored beside no plain one."""
UNQUANTISED = "use the unquantised checkpoint of the model (bfloat16, float16 or float32)"
"""The advice in errors about quantised checkpoints."""
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
"""Safetensors' names of the dtypes of plain tensors."""
_OTHER_FORMS = ("adapter_", "consolidated")
"""Prefixes of safetensors files that do not hold a model in Hugging Face's form."""
_OF_HUB = "models--"
"""Prefix of a model's folder in the hub's cache: models--OWNER--NAME."""
_POINTER = b"version https://git-lfs.github.com/"
"""The beginning of the file that Git leaves in place of a large one where Git LFS is not installed."""
MAX_POINTER = 1024
"""Most bytes of such a file."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Within:
    """Where a matrix lies in a stored tensor: its expert, or None for all, and its first row.

    transposed: the stored tensor has the last two dimensions exchanged.
    """

    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """The file of a tensor, its shape, and safetensors' name of its dtype.

    name: the tensor's name in the file, if it is known by another one. join: for a tensor that is dequantised when it
    is read: called with a function that opens a file's tensor by path and name, returns an object that is indexed like
    the plain tensor. copy: another file with a tensor of this name, if no index says which one counts. within: for a
    matrix of an expert, its place in the file's tensor of all experts.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    name: str = ""
    join: Callable[[Callable[[Path, str], Any]], Any] | None = None
    copy: Path | None = None
    within: Within | None = None

    def check(self, name: str, dtypes: Sequence[str] = FLOAT_DTYPES) -> None:
        """Make sure that the tensor can be loaded. name: for errors.

        Raises: CheckpointError for a dtype that is not among `dtypes`, or if it is stored twice.
        """
        if self.dtype not in dtypes and self.join is None:
            supported = ", ".join(dtypes)
            raise CheckpointError(f"tensor '{name}' in {self.path} has dtype {self.dtype}; supported: {supported}")
        if self.copy is not None:
            raise CheckpointError(f"tensor '{name}' is in {self.path.name} and in {self.copy} as well; remove one")


def stored_tensors(folder: Path, *, may_be_quantised: bool = False) -> dict[str, StoredTensor]:
    """Name -> StoredTensor of every tensor of the folder, in the files' order; of copies, the one in the index.

    may_be_quantised: the caller can read quantised checkpoints; otherwise such a folder is refused.

    Raises: CheckpointError for a missing or corrupt shard, quantised weights, or no safetensors at all.
    """
    if not may_be_quantised:
        refuse_quantised(folder)
    index = _index(folder / INDEX)
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder, index):
        for name, tensor in _header(path).items():
            first, named = tensors.get(name), index.get(name)
            if first is None or path.name == named:
                tensors[name] = tensor
            elif first.path.name != named:
                tensors[name] = replace(first, copy=path)
    return _with_mxfp4_joined(tensors)


def renamed(
    folder: Path | str, stored: Mapping[str, StoredTensor], rename: Callable[[str], str | None]
) -> dict[str, StoredTensor]:
    """The tensors of a folder under the model's names, without tensors that it does not need (rename returns None).

    Raises: CheckpointError if two tensors would have the same name.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        new = rename(name)
        if new is not None and new in found:
            raise CheckpointError(f"{folder} holds {found[new].name} and {name}, which are the same tensor; remove one")
        if new is not None:
            found[new] = replace(tensor, name=tensor.name or name)
    return found


def weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """The files in the index; without an index, model.safetensors; if that is missing, every *.safetensors.

    Raises: CheckpointError if there are none.
    """
    if index:
        return [folder / name for name in sorted(set(index.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(_OTHER_FORMS))
    if not files:
        raise CheckpointError(_nothing_to_read(folder))
    return files


def open_file(path: Path) -> Any:
    """A safetensors handle, memory-mapped.

    Raises: CheckpointError with the file if it is corrupt or unreadable.
    """
    check_regular(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}); download or copy it again"
        ) from error


def check_regular(path: Path) -> None:
    """Refuse a folder, a link to nothing, a named pipe (to open it waits for its other end), a device (to read it may
    never end) or a pointer of Git LFS that stands in place of a checkpoint's file.

    Raises: CheckpointError. A file that is missing is not refused.
    """
    if not path.is_file():
        if os.path.lexists(path):
            what = "no regular file" if path.exists() else "a link to a file that is not there"
            raise CheckpointError(f"{path} is {what}; download or copy it again")
        return
    if path.stat().st_size <= MAX_POINTER and path.read_bytes().startswith(_POINTER):
        raise CheckpointError(f"{path} is a pointer of Git LFS in place of the file; run git lfs pull in its folder")


def quantisation(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The quantisation that a config.json states: its method, and a description for errors; None if there is none."""
    key = next((key for key in QUANTISED if config.get(key)), None)
    if key is None:
        return None
    values = config[key] if isinstance(config[key], Mapping) else {}
    method = values.get("quant_method") or values.get("mode") or "unknown"
    bits = values.get("bits", values.get("weight_bits"))
    told = f"{key} = quant_method {shown_key(method)}" + (f", {shown(bits)} bits" if isinstance(bits, int) else "")
    return str(method), told


def refuse_quantised(folder: Path) -> None:
    """Refuse a checkpoint whose config.json says that it is quantised.

    Raises: CheckpointError.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return  # core.checkpoint.checkpoint reports errors of the config; a folder of weights alone may have none.
    found = quantisation(config) if isinstance(config, dict) else None
    if found is not None and found[0] != MXFP4:
        raise CheckpointError(f"{folder} is quantised ({found[1]}), which is not supported; {UNQUANTISED}")


def _index(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names; empty without an index."""
    check_regular(index)
    if not index.is_file():
        return {}
    try:
        whole = json.loads(index.read_bytes())
        found = whole.get("weight_map") if isinstance(whole, dict) else None
        if not isinstance(found, dict):
            raise ValueError("it has no weight_map from tensors to files")
        names = set(found.values())
    except (OSError, ValueError, TypeError, RecursionError) as error:
        why = one_short_line(error)
        raise CheckpointError(f"{index} is not a readable index ({why}); download or copy it again") from error
    for name in sorted(names, key=str):
        if not _is_file_name(name) or not (index.parent / name).is_file():
            name = shown_key(name)
            raise CheckpointError(f"{index} lists {name}, which is not in the folder; download or copy it again")
    return found


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or len(name.encode(errors="surrogatepass")) > MAX_FILE_NAME:
        return False
    return Path(name).name == name and "\0" not in name


def _header(path: Path) -> dict[str, StoredTensor]:
    tensors = {}
    with open_file(path) as file:
        for name in file.offset_keys() if hasattr(file, "offset_keys") else file.keys():
            piece = file.get_slice(name)
            tensors[name] = StoredTensor(path, tuple(piece.get_shape()), piece.get_dtype())
    return tensors


def _dequantised_shape(name: str, blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (X, I, O) of the MXFP4 tensor with blocks (X, O, G, 16) and scales (X, O, G); inputs come first.

    Raises: CheckpointError if they do not fit.
    """
    if len(blocks) != 4 or blocks[3] != MXFP4_BYTES or blocks[:3] != scales:
        raise CheckpointError(
            f"MXFP4 tensor '{name}' has blocks {list(blocks)} and scales {list(scales)}; expected "
            f"[X, O, G, {MXFP4_BYTES}] and [X, O, G]"
        )
    return blocks[0], blocks[2] * 2 * MXFP4_BYTES, blocks[1]


def _with_mxfp4_joined(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, in which each pair NAME_blocks and NAME_scales is replaced by one tensor NAME."""
    joined = dict(tensors)
    for name in tensors:
        whole = name.removesuffix(BLOCKS)
        pair = [tensors.get(name), tensors.get(whole + SCALES)]
        if whole != name and all(one is not None and one.dtype == "U8" for one in pair):
            blocks, scales = joined.pop(name), joined.pop(whole + SCALES)
            shape = _dequantised_shape(whole, blocks.shape, scales.shape)
            read = partial(_mxfp4_slices, (blocks.path, name), (scales.path, whole + SCALES))
            joined[whole] = replace(blocks, shape=shape, join=read, copy=blocks.copy or scales.copy)
    return joined


def _mxfp4_slices(blocks: tuple[Path, str], scales: tuple[Path, str], opened: Callable[[Path, str], Any]) -> Any:
    from hookline.core.checkpoint.mxfp4 import Mxfp4Slices  # imports torch

    return Mxfp4Slices(opened(*blocks), opened(*scales))


def _nothing_to_read(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    other = other_form(folder)
    if other is not None:
        return f"{folder} {other}"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has only pickled weights ({pickles[0]}), and only safetensors is read; convert it with "
            "transformers: model.save_pretrained(folder, safe_serialization=True)"
        )
    if folder.parent.name == "snapshots" and (cached := folder.parents[1].name).startswith(_OF_HUB):
        hub_id = cached.removeprefix(_OF_HUB).replace("--", "/")
        return (
            f"{hub_id} has no *.safetensors file on the hub, and pickled weights (*.bin) are not read; convert it with "
            f"transformers: AutoModelForCausalLM.from_pretrained('{hub_id}').save_pretrained(folder); give that folder"
        )
    return f"{folder} has no *.safetensors file; download the weights there, or set model.weights=random"


def other_form(folder: Path) -> str | None:
    """If a folder holds no model in Hugging Face's form: what it holds instead, and the fix; None if unknown."""

    def first(*patterns: str) -> str | None:
        return next((path.name for pattern in patterns for path in sorted(folder.glob(pattern))), None)

    if (folder / "adapter_config.json").is_file() or first("adapter_model.*"):
        return (
            f"holds an adapter{_base_model(folder)}, which changes a model and is none; merge the two with peft "
            "(PeftModel.merge_and_unload) and give the folder that save_pretrained writes"
        )
    if (own := first("consolidated*.safetensors", "consolidated*.pth", "params.json")) is not None:
        return (
            f"is in the form of the model's makers ({own}), which is not read; give the same model in Hugging Face's "
            "form, with config.json and model.safetensors"
        )
    if (folder / "config.json").is_file():
        return None
    if (folder / "model_index.json").is_file():
        return "holds a pipeline for images (model_index.json), and only language models are served"
    inside = sorted(path.parent for depth in ("*", "snapshots/*") for path in folder.glob(f"{depth}/config.json"))
    return f"has no config.json, but {inside[0]} has one; give that folder" if inside else None


def _base_model(folder: Path) -> str:
    """The base model of an adapter, as the words " for NAME"; empty if it is not stated."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" for {shown_key(base)}" if isinstance(base, str) and base else ""
