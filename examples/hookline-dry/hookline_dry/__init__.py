"""DRY: its arguments and its registration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class DryArguments:
    """What a request asks for: SamplingParams(extra_args={"dry": {"multiplier": 0.8}})."""

    multiplier: float = bounded(0.0, 0)
    """Strength; 0 changes nothing."""
    base: float = bounded(1.75, 1)
    """How fast the penalty grows with the length of the repetition."""
    allowed_length: int = bounded(2, 1)
    """Repetitions of so many tokens and more are penalised."""
    sequence_breakers: list[str] = field(default_factory=lambda: ["\n", ":", '"', "*"])
    """Texts over which no repetition reaches."""


@hookimpl
def register_processors(register: Registrar) -> None:
    register(
        "dry",
        "hookline_dry.processor:Dry",
        config=DryArguments,
        help="multiplier, base, allowed_length, sequence_breakers: penalise what would continue a repetition",
        needs=Needs(graph_safe=True),
        priority=150,  # after the plain penalties, before truncation
    )
