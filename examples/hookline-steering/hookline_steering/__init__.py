"""Activation steering: its settings, its arguments and its registration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.core.contracts import Needs, Registrar, hookimpl

API_VERSION = 2


@dataclass
class SteeringConfig:
    """What an engine has to steer by: extensions.steering.file=vectors.safetensors."""

    file: str = ""
    """A safetensors file with vectors by name, each (D,), or (num_layers, D) for one after each layer."""
    layers: list[int] = field(default_factory=list)
    """After which layers vectors are added, counted from 0; empty: after the middle one."""


@dataclass
class SteeringArguments:
    """What a request asks for: SamplingParams(extra_args={"steering": {"vector": "formal", "strength": 4.0}})."""

    strength: float = 0.0
    """How much of the vector is added; 0 changes nothing, less than 0 steers away from it."""
    vector: str = ""
    """Its name in the file."""


@hookimpl
def register_extensions(register: Registrar) -> None:
    register(
        "steering",
        "hookline_steering.extension:Steering",
        config=SteeringConfig,
        arguments=SteeringArguments,
        help="vector, strength: add a vector to the hidden states after chosen layers",
        needs=Needs(graph_safe=True, sizes_alike=True),
    )
