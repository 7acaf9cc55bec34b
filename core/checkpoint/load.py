"""Loads weights into parameters: from safetensors, of which each rank reads only its own slice, from the source of a
model class or quantization, or at random.

A model's `WeightTarget`s say where each tensor goes. Missing, surplus and misshaped tensors, and files that cannot be
read, are errors here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.core.checkpoint.safetensors_files import FLOAT_DTYPES, PACKED, StoredTensor, open_file, stored_tensors
from hookline.core.checkpoint.stacked_experts import WithinSlices
from hookline.core.contracts import CheckpointSource, ModelSpec, WeightTarget
from hookline.core.contracts.weights import LosesFractions
from hookline.core.errors import CheckpointError

RANDOM_STD = 0.02
"""Standard deviation of "normal"."""
_NUM_READERS = 4
_MOST_NAMED = 5
DEAD_BUFFERS = re.compile(
    r"(^|\.)(\w*inv_freq|(sin|cos)_cached|rope\.freqs|position_ids|token_type_ids|masked_bias|causal_mask"
    r"|_float_tensor|_extra_state)$"
)
"""Names of constants that older checkpoints store beside the weights and models compute themselves."""
MASKS = re.compile(r"(^|\.)(self_)?attn(\.attention)?\.bias$|(^|\.)(self_)?attention\.bias$")
"""Names of causal masks, of four dimensions; a bias has one."""


Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by its name."""
Sums = list[tuple[str, Tensor]]
"""Pairs of a tensor's name and its sum in float32 on its device, which is not finite if the tensor holds NaN or inf."""


class BytesRead:
    """Counts the bytes of a model's weights that are loaded, and all bytes. Any number of threads may add."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """All bytes to load; 0 until the number is known."""
        self.memory_bytes = 0
        """Bytes of memory that the weights take; 0 until they are loaded."""
        self._read: list[int] = []

    def add(self, num_bytes: int) -> None:
        """Count a tensor that is loaded."""
        self._read.append(num_bytes)  # a single operation, so that no thread's count is lost

    def __str__(self) -> str:
        return "" if not self.num_bytes else f"{sum(self._read) / 1e9:.2f} of {self.num_bytes / 1e9:.2f} GB"


def refuse_other_sizes(checkpoint: str, shapes: Shapes, spec: ModelSpec) -> None:
    """Compare a model's sizes with the tensors of its checkpoint, before a model of those sizes is built.

    Raises: CheckpointError if a config.json asks for more than its checkpoint can fill.
    """
    if spec.num_layers > len(shapes):
        raise CheckpointError(
            f"checkpoint {checkpoint} has {len(shapes)} tensors, too few for the {spec.num_layers} layers of its "
            "config.json. Is it the right one?"
        )
    largest = max(spec.vocab_size, spec.num_heads * spec.head_dim) * spec.hidden_size
    num_stored = sum(map(prod, shapes.values()))
    if largest > num_stored:
        raise CheckpointError(
            f"checkpoint {checkpoint} holds {num_stored} numbers, and its config.json asks for a single tensor of "
            f"{largest} (vocab_size={spec.vocab_size}, {spec.num_heads} heads of {spec.head_dim}, "
            f"hidden_size={spec.hidden_size}). Is it the right one?"
        )


def load_checkpoint(
    folder: Path | str,
    targets: Mapping[str, WeightTarget],
    *,
    stored: Mapping[str, StoredTensor] | None = None,
    num_readers: int = _NUM_READERS,
    read: BytesRead | None = None,
) -> int:
    """Fill every target from the safetensors of a folder, converting to the target's dtype and device.

    stored: the result of `stored_tensors` for the folder, if the caller has it. read: counts the bytes read.
    Units:  returns the bytes written to the targets.
    Raises: CheckpointError naming missing, surplus or misshaped tensors, unreadable files, quantised weights, or a
            tensor that holds NaN or infinity, or fractions where the model keeps integers; nothing is written before
            all names and shapes are checked.
    """
    stored = stored_tensors(Path(folder)) if stored is None else stored
    wanted = [name for name in stored if name in targets and targets[name].view is not None]
    for name in wanted:
        stored[name].check(stored[name].name or name, targets[name].dtypes or FLOAT_DTYPES)
    _check(str(folder), {name: tensor.shape for name, tensor in stored.items()}, targets)
    jobs = [(stored[name].name or name, stored[name], targets[name]) for name in wanted]
    # Strided shares keep the readers close together in the file, so the disk still reads ahead in order.
    shares = [jobs[first::num_readers] for first in range(num_readers)]
    read = BytesRead() if read is None else read
    read.num_bytes = sum(_num_bytes(target) for _, _, target in jobs)
    with ThreadPoolExecutor(num_readers) as readers:
        sums = [one for found in readers.map(partial(_read, read=read), shares) for one in found]
    _refuse_not_finite(str(folder), sums)
    return read.num_bytes


def load_source(
    name: str, source: CheckpointSource, targets: Mapping[str, WeightTarget], read: BytesRead | None = None
) -> int:
    """Fill every target from the source of a model class or quantization, tensor by tensor. name: of it, for errors.

    read: counts the bytes.
    Units:  returns the bytes written to the targets.
    Raises: CheckpointError naming missing, surplus or misshaped tensors, before anything is read; or a tensor that the
            source returns in another shape than it stated.
    """
    shapes = source.shapes()
    _check(name, shapes, targets)
    sums, read = [], BytesRead() if read is None else read
    read.num_bytes = sum(_num_bytes(target) for target in targets.values())
    for tensor_name, target in targets.items():
        if _num_bytes(target):
            tensor = source.read(tensor_name)
            if tuple(tensor.shape) != shapes[tensor_name]:
                said, given = list(shapes[tensor_name]), list(tensor.shape)
                raise CheckpointError(f"checkpoint {name} gives {tensor_name} with shape {given} and said {said}")
            _fill(tensor_name, target, tensor)
            read.add(_num_bytes(target))
            if target.write is None:
                sums.append((tensor_name, _sum(target)))
    _refuse_not_finite(name, sums)
    return read.num_bytes


def memory_of(targets: Mapping[str, WeightTarget]) -> int:
    """Bytes of memory that all targets' views lie in, of which each counts once."""
    views = [one.view for target in targets.values() for one in target.pieces if one.view is not None]
    storages = {one.data_ptr(): one.nbytes() for one in (view.untyped_storage() for view in views)}
    return sum(storages.values())


def random_weights(targets: Mapping[str, WeightTarget], seed: int) -> None:
    """Fill every target at random: "normal" with mean 0 and std 0.02; integers evenly over all values of their type.

    The draw depends on the seed and the tensor's name only: the whole tensor is drawn on the target's device, then cut,
    so that ranks of any layout hold the same model. CPU and CUDA draw different numbers.
    """
    with torch.inference_mode():
        for name, target in targets.items():
            if target.view is not None:
                target.fill(_draw(name, target, target.view.device, seed))


def _draw(name: str, target: WeightTarget, device: torch.device, seed: int) -> Tensor:
    assert target.view is not None
    is_float = target.view.is_floating_point() or (target.write is not None and not target.dtypes)
    dtype = torch.float32 if is_float else target.view.dtype
    if target.init != "normal":
        return torch.full(target.shape, int(target.init == "ones"), dtype=dtype, device=device)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
    if not dtype.is_floating_point:
        num_bytes = math.prod(target.shape) * dtype.itemsize
        drawn = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_(generator=generator)
        return (drawn > 127 if dtype is torch.bool else drawn.view(dtype)).reshape(target.shape)
    return torch.empty(target.shape, device=device).normal_(0.0, RANDOM_STD, generator=generator)


@torch.inference_mode()  # The parameters may be inference tensors, and the mode is per thread.
def _read(jobs: Sequence[tuple[str, StoredTensor, WeightTarget]], read: BytesRead) -> Sums:
    sums = []
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def _slices(path: Path, name: str) -> Any:
            if path not in files:
                files[path] = stack.enter_context(open_file(path))
            return files[path].get_slice(name)

        for name, tensor, target in jobs:
            if not _num_bytes(target):
                continue
            if tensor.join is not None:
                whole = tensor.join(_slices)
            else:
                whole = _slices(tensor.path, tensor.name or name)
                whole = whole if tensor.within is None else WithinSlices(whole, tensor.within)
            _fill(name, target, whole)
            read.add(_num_bytes(target))
            if target.write is None:
                sums.append((name, _sum(target)))
    return sums


def _fill(name: str, target: WeightTarget, whole: Any) -> None:
    try:
        target.fill(whole)
    except LosesFractions as error:
        raise CheckpointError(f"tensor {name} cannot be loaded: {error}; were the weights quantised?") from error


def _num_bytes(target: WeightTarget) -> int:
    """Bytes of all its views; if several tensors are written to one view, each counts the whole view."""
    return sum(piece.view.nbytes for piece in target.pieces if piece.view is not None)


def _sum(target: WeightTarget) -> Tensor:
    """The sum of all its views in float32, which is not finite if one of their values is not."""
    return torch.stack([piece.view.sum(dtype=torch.float32) for piece in target.pieces if piece.view is not None]).sum()


def _refuse_not_finite(checkpoint: str, sums: Sums) -> None:
    """Refuse tensors whose sum is not finite; all sums are read at once, so that the host waits for a GPU once."""
    if not sums:
        return
    finite = torch.stack([total for _, total in sums]).isfinite().tolist()
    broken = _some("broken", [name for (name, _), is_finite in zip(sums, finite, strict=True) if not is_finite], str)
    if broken:
        raise CheckpointError(
            f"checkpoint {checkpoint} has {broken}: NaN or infinity is among the values; download or copy it again"
        )


def _check(checkpoint: str, stored: Mapping[str, tuple[int, ...]], targets: Mapping[str, WeightTarget]) -> None:
    """Compare names and shapes before a byte is read."""
    wanted = {name: target for name, target in targets.items() if target.view is not None}
    ignored = tuple(name[:-1] for name, target in targets.items() if target.view is None and name.endswith("*"))
    problems = [
        _some("missing", [name for name in wanted if name not in stored], str),
        _some("surplus", [name for name in stored if not _may_be(name, stored[name], targets, ignored)], str),
        _some(
            "misshaped",
            [name for name, target in wanted.items() if name in stored and not has_shape(stored[name], target)],
            lambda name: f"{name} has {list(stored[name])} and needs {list(wanted[name].shape)}",
        ),
    ]
    found = "; ".join(filter(None, problems))
    if found:
        packed = next((name for name in stored if name.endswith(PACKED) and name not in targets), None)
        told = "Is its config.json the right one?"
        if packed is not None:
            told = f"{packed} is of a quantised matrix, and the quantization_config does not say how that is stored."
        raise CheckpointError(f"checkpoint {checkpoint} does not match the model: {found}. {told}")


def has_shape(stored: tuple[int, ...], target: WeightTarget) -> bool:
    """Whether a tensor of this shape fits the target; for a converted one, sizes of 1 at the end do not matter."""
    if target.write is None or len(stored) + 1 < len(target.shape):
        return stored == target.shape
    return _without_last_ones(stored) == _without_last_ones(target.shape)


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return _without_last_ones(shape[:-1]) if shape and shape[-1] == 1 else tuple(shape)


def _may_be(name: str, shape: tuple[int, ...], targets: Mapping[str, WeightTarget], ignored: tuple[str, ...]) -> bool:
    """Whether a checkpoint may hold this tensor: the model has a target for it, or it is a dead buffer."""
    is_mask = len(shape) == 4 and MASKS.search(name)
    return bool(name in targets or name.startswith(ignored) or DEAD_BUFFERS.search(name) or is_mask)


def _some(problem: str, names: Iterable[str], describe: Callable[[str], str]) -> str:
    listed = list(names)
    if not listed:
        return ""
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    tensors = "tensor" if len(listed) == 1 else "tensors"
    return f"{len(listed)} {problem} {tensors}: {', '.join(map(describe, listed[:_MOST_NAMED]))}{more}"
