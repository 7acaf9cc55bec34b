"""What an entry requires of the machine, the model and the engine, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What an entry requires of the machine, the model and the engine. An empty value means anything will do.

    Core compares needs with the facts once, before any weight is loaded, and says what does not fit.
    """

    devices: tuple[str, ...] = ()
    """Device types, e.g. ("cuda",)."""
    dtypes: tuple[str, ...] = ()
    """Names of torch dtypes, e.g. ("bfloat16", "float16")."""
    block_size_multiple: int = 1
    """engine.block_size must be a multiple of this."""
    preferred_block_size: int = 16
    """Kernels: engine.block_size where the user names none; small blocks share prefixes more finely."""
    head_dims: tuple[int, ...] = ()
    """Kernels: head dims of models that they serve."""
    compute_capability: tuple[int, int] | None = None
    """Lowest CUDA compute capability, e.g. (8, 0)."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable; looked up without importing them."""
    graph_safe: bool = False
    """A capability: every operation may be captured in a CUDA graph (no host sync, no data-dependent shape)."""
    graph_prefill: bool = False
    """A capability of kernels that are graph_safe: so may steps with prompts, be there decodes in them or not, whose
    lengths then only the device knows (`Batch` says what such a batch looks like). Without it, decode steps alone are
    captured."""
    shared_prefix: bool = False
    """A capability of kernels: `attend` makes use of Batch.shared_lens_B."""
    attention: tuple[str, ...] = ()
    """Capabilities of kernels: which of ATTENTION_FEATURES `attend` does. Models that need others are refused."""
    batch_invariant: bool = False
    """A capability of kernels, models and samplers: what a row gets has the same bits whatever else is in its step, and
    however its prompt was cut into steps. Kernels keep that where AttentionSpec.batch_invariant asks for it, models
    where Runtime.batch_invariant does, samplers always. Without it, engine.batch_invariant=true refuses the entry."""
    vocabulary_shards: bool = False
    """A capability of samplers: `sample_shard` works on one rank's part of the vocabulary."""
