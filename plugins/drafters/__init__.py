"""The drafters that ship with Hookline: their options and their registration. Imports no torch."""

from dataclasses import dataclass, field

from hookline.core.contracts import Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class LookupConfig:
    """Drafts from a request's own tokens: the tokens that followed its newest tokens where these came before."""

    k: int = 4
    """Most drafts for a request in a step, at least 1."""
    min_match: int = 2
    """Fewest tokens that must be the same, at least 1."""
    max_match: int = 8
    """Most tokens that are compared; at least min_match."""
    adaptive: bool = True
    """Whether a request whose drafts are all wrong has none in its next step, then in two steps, and so on up to 64; on
    a GPU also whether steps have only as many drafts as pay."""


@dataclass
class DraftModelConfig:
    """Drafts by a smaller model with the same tokens, which runs in the same process and on the same device."""

    checkpoint: str = ""
    """Its checkpoint: a folder or a hub id."""
    model: str = "auto"
    """Its model plugin or preset; auto goes by the checkpoint's config.json."""
    k: int = bounded(4, 1, 64)
    """Most drafts for a request in a step."""
    memory_fraction: float = bounded(0.96, above=0, high=1)
    """Part of the GPU's memory that may be in use once the smaller model is loaded. The requests' model takes
    engine.memory_fraction, 0.9 by default, before, so the smaller model has the difference."""
    cpu_cache_gib: float = bounded(0.5, above=0)
    """Size of the smaller model's KV cache on a CPU, in GiB."""
    adaptive: bool = True
    """Whether a request whose drafts are all wrong has none in its next step, then in two steps, and so on up to 64; on
    a GPU also whether steps have only as many drafts as pay."""


@dataclass
class MtpConfig:
    """Drafts by the layer that the model's own checkpoint carries for this (DeepSeek V3, GLM-4.7-Flash)."""

    k: int = bounded(3, 1, 64)
    """Most drafts for a request in a step; the same layer makes one after the other."""
    adaptive: bool = True
    """Whether a request whose drafts are all wrong has none in its next step, then in two steps, and so on up to 64; on
    a GPU also whether steps have only as many drafts as pay."""


@dataclass
class Eagle3Config:
    """Drafts by an EAGLE-3 head that was trained for the model."""

    checkpoint: str = ""
    """The head: a folder or a hub id. With model.weights=random it may be left out, for a random head."""
    k: int = bounded(3, 1, 64)
    """Most drafts for a request in a step; the head makes one after the other."""
    layers: list[int] = field(default_factory=list)
    """The model's layers, from 0, after which the head reads the residual stream; empty: the layers that the head's
    config.json names, or the usual three."""
    adaptive: bool = True
    """Whether a request whose drafts are all wrong has none in its next step, then in two steps, and so on up to 64; on
    a GPU also whether steps have only as many drafts as pay."""


@dataclass
class SyntheticConfig:
    """For benchmarks: a stated number of tokens is kept of each step, whether they are right or not."""

    k: int = 4
    """Drafts for a request in a step, at least 1."""
    length: float = 3.0
    """Tokens that a request keeps of a step with k drafts, in the mean; from 1 to 1 + k."""


@hookimpl
def register_drafters(register: Registrar) -> None:
    """Two search the request's own tokens on the host, three compute them with weights, and one is for benchmarks."""
    register(
        "ngram",
        "hookline.plugins.drafters.lookup:Ngram",
        config=LookupConfig,
        help="drafts from the last place where a request's newest tokens came before",
    )
    register(
        "suffix",
        "hookline.plugins.drafters.lookup:Suffix",
        config=LookupConfig,
        help="drafts from the most frequent continuation of the longest suffix that came before",
    )
    register(
        "draft_model",
        "hookline.plugins.drafters.draft_model:DraftModel",
        config=DraftModelConfig,
        help="drafts by a smaller model of the same vocabulary (drafter.checkpoint)",
    )
    register(
        "mtp",
        "hookline.plugins.drafters.mtp:Mtp",
        config=MtpConfig,
        help="drafts by the layer that a checkpoint carries for this (multi-token prediction)",
    )
    register(
        "eagle3",
        "hookline.plugins.drafters.eagle3:Eagle3",
        config=Eagle3Config,
        help="drafts by an EAGLE-3 head, drafter.checkpoint=FOLDER or HUB_ID",
    )
    register(
        "synthetic",
        "hookline.plugins.drafters.synthetic:Synthetic",
        config=SyntheticConfig,
        help="for benchmarks alone: keeps a stated number of drafts, so that answers are not the model's",
    )
