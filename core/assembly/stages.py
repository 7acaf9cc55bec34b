"""Divides a model's layers among stages, and refuses models that cannot be divided. Legend: pp stages of a model."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hookline.core.config.settings import Config
from hookline.core.contracts import WHOLE_MODEL, ModelSpec, Stage
from hookline.core.errors import ConfigError


def stage_of(config: Config, spec: ModelSpec, index: int) -> Stage:
    """The stage of this index.

    Raises: ConfigError if the layers cannot be cut so.
    """
    counts = layer_counts(config.pp, spec.num_layers, config.engine.pp_layers)
    if config.pp == 1:
        return WHOLE_MODEL
    ends = list(accumulate(counts))
    return Stage(index, config.pp, ends[index] - counts[index], ends[index])


def layer_counts(pp: int, num_layers: int, stated: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The number of layers of each stage: as stated, else as equal as possible, with one more on the first ones.

    The last stage also has the head, which takes a GPU as long as some layers do; the first has the embedding, which
    takes next to no time.
    Raises: ConfigError if there are fewer layers than stages, or if the stated numbers do not fit.
    """
    if stated is not None:
        if len(stated) != pp or sum(stated) != num_layers:
            raise ConfigError(
                f"engine.pp_layers={list(stated)} must name a number of layers for each of pp={pp} stages, "
                f"{num_layers} in all"
            )
        return stated
    if pp > num_layers:
        raise ConfigError(f"pp={pp} is more stages than this model has layers, {num_layers}; take at most as many")
    return tuple(num_layers // pp + (index < num_layers % pp) for index in range(pp))


def refuse_uncut(config: Config, model_class: Any) -> None:
    """Raise ConfigError if pp > 1 and a model cannot be cut into stages."""
    assert config.model.entry is not None
    if config.pp > 1 and not getattr(model_class, "runs_in_stages", False):
        name = config.model.entry.name
        why = f"model={name} cannot be cut into stages; take pp=1, and tp=N for several GPUs"
        raise ConfigError(f"pp={config.pp}: {why}")
