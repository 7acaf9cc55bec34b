"""One rank as an actor of Ray: says where it is, and is a rank from then on.

Ray is imported only inside of an actor, so that the engine's process and tests can import this module without it.
"""

from __future__ import annotations

import os

from hookline.core.contracts import RankPlace, RankStart
from hookline.core.launching import environment


class RankActor:
    """See `executor.RayExecutor`, which makes one for each rank."""

    def describe(self, uses_gpu: bool) -> RankPlace:
        """Where this actor is, on which device, and what of its environment must be as everywhere."""
        import ray

        context = ray.get_runtime_context()
        device, capability = "cpu", None
        if uses_gpu:
            import torch

            index = gpu_index(context.get_accelerator_ids()["GPU"][0], os.environ.get("CUDA_VISIBLE_DEVICES"))
            device, capability = f"cuda:{index}", torch.cuda.get_device_capability(index)
        host = ray.util.get_node_ip_address()
        return RankPlace(host, context.get_node_id(), os.getpid(), device, environment(), capability)

    def run(self, start: RankStart) -> None:
        """Be a rank until the engine's process ends it."""
        start.run()


def gpu_index(id_: str, visible: str | None) -> int:
    """Which of the process's GPUs Ray means by its id, if Ray leaves CUDA_VISIBLE_DEVICES alone."""
    names = visible.split(",") if visible else []
    return names.index(id_) if id_ in names else int(id_)
