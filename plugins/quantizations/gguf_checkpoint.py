"""A GGUF file as a checkpoint: its metadata as a config.json, its tensors under Hugging Face's names, its tokenizer.

Implements hookline.core.contracts.CheckpointSource. The package gguf dequantises what is read as floats.
Imports no torch, so that a server's front ends, which want the tokenizer alone, start without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hookline.core.errors import PASSES, CheckpointError, shown_key
from hookline.plugins.quantizations.gguf_families import ROPE_FACTORS, Metadata, config_of, expert_names, name_of
from hookline.plugins.quantizations.gguf_header import Header, StoredBlocks, read_header

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.plugins.quantizations.gguf_blocks import StoredMatrix

FLOATS = ("F32", "F16", "BF16")
UNREAD = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")
"""Types that weights do not have, and that the package gguf does not dequantise."""
MAX_PARTS = 1024
_PART = re.compile(r"(.*-)00001(-of-(\d{5}))")
_CHUNK = 2**21
"""Values that are converted at once, which takes several arrays of their size."""
_NUM_READERS = 4
_BESIDE = "put the tokenizer.json of the model beside the file, or name its folder with model.tokenizer"
_SPLITS = ("llama-bpe", "qwen2", "default", "gpt-2")
"""Pre-tokenizers by `tokenizer.ggml.pre` that every version of transformers 5 knows."""


@dataclass(frozen=True)
class Place:
    """A tensor as the model wants it, in the file. expert: its index in a tensor of all experts; None: all of it."""

    stored: StoredBlocks
    shape: tuple[int, ...]
    expert: int | None = None

    @property
    def kind(self) -> GGMLQuantizationType:
        """The type of its values."""
        return GGMLQuantizationType(self.stored.kind)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the innermost dimension."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size


class GgufCheckpoint:
    """A file, or the first of several. Its header is read when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # another process reads the file itself

    def config(self) -> dict[str, Any]:
        """See CheckpointSource. Says which types its tensors have, if not all are floats, as a quantization_config."""
        factors = self._rope_factors()
        config = config_of(self.metadata, self.shapes(), factors)
        types = Counter(one.kind.name for one in self.places.values())
        if any(name not in FLOATS for name in types):
            kinds = {
                name.removesuffix(".weight"): one.kind.name
                for name, one in self.places.items()
                if len(one.shape) == 2 and one.kind.name not in FLOATS
            }
            config["quantization_config"] = {"quant_method": "gguf", "types": dict(types), "linears": kinds}
        return config

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See CheckpointSource."""
        return {name: place.shape for name, place in self.places.items()}

    def read(self, name: str) -> StoredMatrix | Tensor:
        """See CheckpointSource: as a Hugging Face checkpoint has it; a matrix is read when it is indexed.

        Raises: CheckpointError if the file got shorter meanwhile.
        """
        import torch

        from hookline.plugins.quantizations.gguf_blocks import StoredMatrix

        place, family = self.places[name], self.metadata.family
        order = self._order(name, place.shape[0])
        if len(place.shape) == 2:
            return StoredMatrix(self._raw(place), place.kind, place.shape[1], order)
        values = torch.from_numpy(self._values(place))
        values = values if order is None else values[order]
        return values.sub_(family.norm_add) if name.rpartition(".")[0].endswith("norm") else values

    def _order(self, name: str, num_rows: int) -> np.ndarray | None:
        """The stored row of each row of queries and keys, of whose heads the file interleaves the two halves."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        if not self.metadata.family.is_paired or part not in ("q_proj", "k_proj"):
            return None
        key = "attention.head_count" if part == "q_proj" else "attention.head_count_kv"
        num_heads = self.metadata.size(key, self.metadata.size("attention.head_count"))
        if num_rows % (2 * num_heads):
            raise CheckpointError(f"{self.path}: the {num_rows} rows of {name} are no {num_heads} heads")
        return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def tokenizer(self) -> Any:
        """See CheckpointSource: the tokenizer that transformers builds from the metadata.

        Raises: CheckpointError for a tokenizer that transformers cannot build, or would build with another
                pre-tokenizer.
        """
        values = self.header.metadata
        if "tokenizer.ggml.model" not in values:
            return None
        kind, split = values["tokenizer.ggml.model"], str(values.get("tokenizer.ggml.pre", "default"))
        known = {*_SPLITS, *_known_splits(), *_own_splits()}
        if kind == "gpt2" and split not in known:
            raise CheckpointError(
                f"{self.path} has a tokenizer that splits texts as {shown_key(split)}, which transformers does not "
                f"know; {_BESIDE}"
            )
        import transformers

        try:
            found: Any = transformers.AutoTokenizer.from_pretrained(
                str(self.path.parent), gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
            )
            if kind == "gpt2" and split in _own_splits():
                found.backend_tokenizer.pre_tokenizer = _own_splits()[split]
        except PASSES:
            raise
        except BaseException as error:  # tokenizers panics with an error that is no Exception
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise CheckpointError(
                f"{self.path} has a tokenizer that transformers cannot make ({why}); {_BESIDE}"
            ) from None
        return found

    @cached_property
    def header(self) -> Header:
        """The file's, with the tensors of all parts."""
        first = read_header(self.path)
        count = first.metadata.get("split.count", 1)
        if count in (0, 1):
            return first
        part = _PART.fullmatch(self.path.stem)
        if part is None or not isinstance(count, int) or int(part[3]) != count or count > MAX_PARTS:
            raise CheckpointError(
                f"{self.path} is one of {shown_key(count)} parts of a GGUF checkpoint; give the first, whose name ends "
                "with -00001-of-000NN.gguf, as it was published"
            )
        tensors = dict(first.tensors)
        for number in range(2, count + 1):
            path = self.path.with_stem(f"{part[1]}{number:05d}{part[2]}")
            if not path.is_file():
                raise CheckpointError(f"{self.path} has {count} parts, and {path.name} is not beside it; download it")
            tensors |= read_header(path).tensors
        return Header(first.metadata, tensors)

    @cached_property
    def metadata(self) -> Metadata:
        """The file's, checked as it is read."""
        return Metadata(self.path, self.header.metadata)

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of each tensor in the file, by Hugging Face's name."""
        found: dict[str, Place] = {}
        sizes: dict[Path, int] = {}
        for name, stored in self.header.tensors.items():
            if stored.path not in sizes:
                sizes[stored.path] = stored.path.stat().st_size
            _check(name, stored, sizes[stored.path])
            if name == ROPE_FACTORS:
                continue
            experts = expert_names(self.metadata.family, name, stored.shape)
            new = {name_of(self.metadata.family, name): Place(stored, stored.shape)}
            if experts is not None:
                new = {one: Place(stored, stored.shape[1:], index) for index, one in enumerate(experts)}
            if not found.keys().isdisjoint(new):
                raise CheckpointError(f"{self.path} has the tensor {shown_key(name)} under two names")
            found |= new
        return found

    def _rope_factors(self) -> list[float] | None:
        stored = self.header.tensors.get(ROPE_FACTORS)
        if stored is None:
            return None
        if prod(stored.shape) > 2**16:
            raise CheckpointError(
                f"{self.path} has {prod(stored.shape)} values in {ROPE_FACTORS}, one for each frequency"
            )
        _check(ROPE_FACTORS, stored, stored.path.stat().st_size)
        return [float(one) for one in self._values(Place(stored, stored.shape)).reshape(-1)]

    def _values(self, place: Place) -> np.ndarray:
        """The values of a tensor, dequantised, in float32."""
        return dequantised(self._raw(place), place.kind).reshape(place.shape)

    def _raw(self, place: Place) -> np.ndarray:
        """The bytes of a tensor's rows, in the file."""
        num_rows, row_bytes = prod(place.shape[:-1]), place.row_bytes
        start = place.stored.start + (place.expert or 0) * num_rows * row_bytes
        try:
            return np.memmap(place.stored.path, np.uint8, "r", start, (num_rows, row_bytes)).view(np.ndarray)
        except ValueError as error:
            raise CheckpointError(f"{place.stored.path} is shorter than it was; download or copy it again") from error


def dequantised(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The values of rows of blocks (rows, bytes), in float32."""
    block, size = GGML_QUANT_SIZES[kind]
    num_rows, width = len(raw), raw.shape[1] // size * block
    values = np.empty((num_rows, width), np.float32)

    def dequantise(part: slice) -> None:
        with np.errstate(all="ignore"):  # NaN and infinity are checked later, in all values at once
            values[part] = dequantize(raw[part], kind)

    by_rows(num_rows, width, dequantise)
    return values


def by_rows(num_rows: int, width: int, convert: Callable[[slice], None]) -> None:
    """Convert all rows of so many values, some at a time, of which several threads have a share."""
    step = max(1, _CHUNK // max(1, width))
    parts = [slice(first, first + step) for first in range(0, num_rows, step)]
    if len(parts) < 2:
        for part in parts:
            convert(part)
        return
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        list(readers.map(convert, parts))


def _check(name: str, stored: StoredBlocks, file_size: int) -> None:
    """Whether a tensor is of a type that is read, in whole blocks, and within the file.

    Raises: CheckpointError.
    """
    where = f"tensor {shown_key(name)} in {stored.path}"
    try:
        kind = GGMLQuantizationType(stored.kind)
    except ValueError:
        raise CheckpointError(
            f"{where} has a type of code {stored.kind}, which the package gguf does not know; pip install -U gguf"
        ) from None
    if kind.name in UNREAD:
        raise CheckpointError(
            f"{where} has type {kind.name}, which is not read; give a file with weights of other types"
        )
    block, size = GGML_QUANT_SIZES[kind]
    if stored.shape[-1] % block:
        raise CheckpointError(f"{where} has rows of {stored.shape[-1]} values, and {kind.name} has blocks of {block}")
    if stored.start + prod(stored.shape) // block * size > file_size:
        raise CheckpointError(f"{where} ends behind the end of the file, which is cut off; download or copy it again")


def _known_splits() -> Mapping[str, Any]:
    """The ways to split texts that the installed transformers knows by name."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return {}
    return GGUF_PRE_TOKENIZER_SPLITS


def _own_splits() -> Mapping[str, Any]:
    """Pre-tokenizers that transformers does not know, by their GGUF names."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return {"smollm": pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])}
