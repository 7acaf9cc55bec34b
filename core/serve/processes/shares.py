"""Divides the machine among a server's replicas: GPUs in their order, or the cores of a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from hookline.core.config.settings import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Share:
    """One replica's part. gpus: its CUDA_VISIBLE_DEVICES. cores: numbers of its CPU cores. None: all of the machine."""

    gpus: str | None = None
    cores: tuple[int, ...] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """Variables of its process."""
        return {} if self.gpus is None else {VISIBLE: self.gpus}


def shares_of(config: Config, num_replicas: int) -> list[Share]:
    """The parts of all replicas.

    Raises: ConfigError if there are fewer GPUs than all ranks of all replicas need.
    """
    if num_replicas == 1:
        return [Share()]
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"device={config.device} is one GPU, and serve.replicas={num_replicas} have several: device=cuda"
        )
    num_gpus = 0 if config.device == "cpu" else _num_gpus()
    if num_gpus:
        parts = gpu_parts(num_replicas, config.num_ranks, num_gpus, os.environ.get(VISIBLE))
        return [Share(gpus=part) for part in parts]
    return [Share(cores=part) for part in core_parts(num_replicas, sorted(os.sched_getaffinity(0)))]


def gpu_parts(num_replicas: int, num_ranks: int, num_gpus: int, visible: str | None) -> list[str]:
    """GPUs of each replica, a GPU for each of its ranks. visible: the value of CUDA_VISIBLE_DEVICES, None if unset.

    Raises: ConfigError if there are too few.
    """
    if num_replicas * num_ranks > num_gpus:
        needed = f"serve.replicas={num_replicas} with {num_ranks} GPU{'s' * (num_ranks > 1)} each"
        raise ConfigError(f"{needed} needs {num_replicas * num_ranks} GPUs and {num_gpus} are here")
    names = [str(number) for number in range(num_gpus)] if visible is None else visible.split(",")
    return [",".join(names[one * num_ranks : (one + 1) * num_ranks]) for one in range(num_replicas)]


def core_parts(num_replicas: int, cores: list[int]) -> list[tuple[int, ...] | None]:
    """Cores of each replica; None if there are fewer cores than replicas, which then share them."""
    each = len(cores) // num_replicas
    return [tuple(cores[one * each : (one + 1) * each]) or None for one in range(num_replicas)]


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()  # asks the driver alone: no GPU's memory is taken
