"""The executors that ship with Hookline beside core's own, whose ranks are child processes. Imports no Ray."""

from hookline.core.contracts import Registrar, hookimpl

API_VERSION = 2


@hookimpl
def register_executors(register: Registrar) -> None:
    """Add Ray's actors as ranks."""
    register(
        "ray",
        "hookline.plugins.executors.ray.executor:RayExecutor",
        help="every rank is an actor of a Ray cluster, with a GPU, or with CPUs where no node has one",
    )
