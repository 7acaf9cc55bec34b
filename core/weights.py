"""Weights into parameters: streamed from safetensors, of which each rank reads only its own slice, given by a source
that the model brought, or drawn at random.

Knows nothing of models: a model says in `WeightTarget`s what goes where. Missing, surplus and misshaped tensors are
errors here, and so is everything about the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from core.contracts import CheckpointSource
from core.errors import CheckpointError
from core.parallel import Part
from core.safetensors_files import open_file, stored_tensors

Init = Literal["normal", "ones", "zeros"]
"""How `random_weights` draws a tensor."""
RANDOM_STD = 0.02
"""Standard deviation of "normal"."""
_NUM_READERS = 4
_MOST_NAMED = 5


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """Where one checkpoint tensor goes on this rank.

    view: this rank's part of a parameter; None if the tensor is known and not needed. shape: of the whole tensor in the
    checkpoint. dim, start, stop: the rank reads [start, stop) of dimension dim; dim None reads it whole.
    """

    view: Tensor | None
    shape: tuple[int, ...] = ()
    dim: int | None = None
    start: int = 0
    stop: int = 0
    init: Init = "normal"

    @classmethod
    def whole(cls, view: Tensor, *, init: Init = "normal") -> WeightTarget:
        """A tensor every rank holds whole."""
        return cls(view, tuple(view.shape), init=init)

    @classmethod
    def shard(cls, view: Tensor, dim: int, part: Part, *, init: Init = "normal") -> WeightTarget:
        """A tensor split along `dim`; `view` has this part's size there."""
        assert view.shape[dim] == part.size, (view.shape, dim, part)
        shape = (*view.shape[:dim], part.total, *view.shape[dim + 1 :])
        return cls(view, tuple(shape), dim, part.start, part.stop, init)

    @classmethod
    def ignored(cls) -> WeightTarget:
        """A tensor that checkpoints may hold and this model does not need, e.g. the head when it is tied."""
        return cls(None)

    def cut(self, whole: Any) -> Any:
        """The rank's slice of the whole tensor, or of anything indexed like one."""
        if self.dim is None:
            return whole[...]
        return whole[(*[slice(None)] * self.dim, slice(self.start, self.stop))]


def load_checkpoint(folder: Path | str, targets: Mapping[str, WeightTarget], *, num_readers: int = _NUM_READERS) -> int:
    """Fill every target from the safetensors of a folder, converting to the target's dtype and device.

    Units:  returns the bytes written to the targets.
    Raises: CheckpointError naming missing, surplus or misshaped tensors, unreadable files, or quantised weights;
            nothing is written before all names and shapes are checked.
    """
    stored = stored_tensors(Path(folder))
    _check(str(folder), {name: tensor.shape for name, tensor in stored.items()}, targets)
    jobs = [(name, stored[name].path, targets[name]) for name in stored if targets[name].view is not None]
    # Strided shares keep the readers close together in the file, so the disk still reads ahead in order.
    shares = [jobs[first::num_readers] for first in range(num_readers)]
    with ThreadPoolExecutor(num_readers) as readers:
        return sum(readers.map(_read, shares))


def load_source(name: str, source: CheckpointSource, targets: Mapping[str, WeightTarget]) -> int:
    """Fill every target from a source that a model brought, tensor by tensor; `name` stands for it in errors.

    Units:  returns the bytes written to the targets.
    Raises: CheckpointError naming missing, surplus or misshaped tensors, before anything is read; or one that the
            source gives in another shape than it said.
    """
    shapes = source.shapes()
    _check(name, shapes, targets)
    num_bytes = 0
    for tensor_name, target in targets.items():
        if target.view is not None and target.view.numel():
            tensor = source.read(tensor_name)
            if tuple(tensor.shape) != shapes[tensor_name]:
                said, given = list(shapes[tensor_name]), list(tensor.shape)
                raise CheckpointError(f"checkpoint {name} gives {tensor_name} with shape {given} and said {said}")
            target.view.copy_(target.cut(tensor))
            num_bytes += target.view.nbytes
    return num_bytes


def random_weights(targets: Mapping[str, WeightTarget], seed: int) -> None:
    """Fill every target at random: "normal" with mean 0 and std 0.02.

    The draw depends on the seed and the tensor's name only: the whole tensor is drawn on the target's device, then cut,
    so that ranks of any layout hold the same model. CPU and CUDA draw different numbers.
    """
    with torch.inference_mode():
        for name, target in targets.items():
            if target.view is not None:
                target.view.copy_(target.cut(_draw(name, target, target.view.device, seed)))


def _draw(name: str, target: WeightTarget, device: torch.device, seed: int) -> Tensor:
    if target.init != "normal":
        return torch.full(target.shape, float(target.init == "ones"), device=device)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.empty(target.shape, device=device).normal_(0.0, RANDOM_STD, generator=generator)


@torch.inference_mode()  # The parameters may be inference tensors, and the mode is per thread.
def _read(jobs: Sequence[tuple[str, Path, WeightTarget]]) -> int:
    num_bytes = 0
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name, path, target in jobs:
            if path not in files:
                files[path] = stack.enter_context(open_file(path))
            assert target.view is not None
            if target.view.numel():
                target.view.copy_(target.cut(files[path].get_slice(name)))
                num_bytes += target.view.nbytes
    return num_bytes


def _check(checkpoint: str, stored: Mapping[str, tuple[int, ...]], targets: Mapping[str, WeightTarget]) -> None:
    """Compare names and shapes before a byte is read."""
    wanted = {name: target for name, target in targets.items() if target.view is not None}
    problems = [
        _some("missing", [name for name in wanted if name not in stored], str),
        _some("surplus", [name for name in stored if name not in targets], str),
        _some(
            "misshaped",
            [name for name, target in wanted.items() if name in stored and stored[name] != target.shape],
            lambda name: f"{name} has {list(stored[name])} and needs {list(wanted[name].shape)}",
        ),
    ]
    found = "; ".join(filter(None, problems))
    if found:
        raise CheckpointError(
            f"checkpoint {checkpoint} does not match the model: {found}. Is its config.json the right one?"
        )


def _some(problem: str, names: Iterable[str], describe: Callable[[str], str]) -> str:
    listed = list(names)
    if not listed:
        return ""
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    tensors = "tensor" if len(listed) == 1 else "tensors"
    return f"{len(listed)} {problem} {tensors}: {', '.join(map(describe, listed[:_MOST_NAMED]))}{more}"
