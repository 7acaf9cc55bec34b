"""Needs: the requirements of a registered entry towards the machine, the model and the engine, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """Requirements of an entry towards the machine, the model and the engine. An empty value requires nothing.

    Core checks them once, before any weight is loaded; its error names the requirement that is not met.
    """

    devices: tuple[str, ...] = ()
    """Device types, e.g. ("cuda",)."""
    dtypes: tuple[str, ...] = ()
    """Names of torch dtypes, e.g. ("bfloat16", "float16")."""
    block_size_multiple: int = 1
    """engine.block_size must be a multiple of this."""
    preferred_block_size: int = 16
    """Kernels: engine.block_size if the user sets none; small blocks share prefixes more finely."""
    head_dims: tuple[int, ...] = ()
    """Kernels: the head dims they can compute; not checked for models with "latent" attention."""
    compute_capability: tuple[int, int] | None = None
    """Lowest CUDA compute capability, e.g. (8, 0)."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable; looked up without importing them."""
    graph_safe: bool = False
    """A capability: every operation may be captured in a CUDA graph (no host sync, no data-dependent shape)."""
    graph_prefill: bool = False
    """A capability of kernels that are graph_safe: steps with prompts, with or without decodes, may be captured too.
    The lengths of such a step are known on the device only; `Batch` says what it looks like. Without this, only decode
    steps are captured."""
    sizes_alike: bool = False
    """A capability of kernels, models, samplers and step extensions: the first step with a new number of rows or tokens
    allocates nothing on the device that is kept, measures nothing and sets nothing up. Steps of further sizes are then
    captured without a trial run, which takes half the time. (A set-up inside of a captured step would be repeated by
    each replay.)"""
    shared_prefix: bool = False
    """A capability of kernels: `attend` makes use of Batch.shared_lens_B."""
    attention: tuple[str, ...] = ()
    """Capabilities of kernels: which of ATTENTION_FEATURES `attend` computes. Models that need more are refused."""
    kv_dtypes: tuple[str, ...] = ()
    """Capabilities of kernels: names of the torch dtypes, besides the model's own, in which they store keys and values
    and attend to them, e.g. ("float8_e4m3fn",); see AttentionSpec.kv_dtype. engine.kv_dtype refuses other kernels."""
    batch_invariant: bool = False
    """A capability of kernels, models and samplers: a row's results have the same bits whatever other rows its step
    has, and however its prompt was cut into steps. Kernels guarantee it if AttentionSpec.batch_invariant is set, models
    if Runtime.batch_invariant is, samplers always. Without it, engine.batch_invariant=true refuses the entry."""
    vocabulary_shards: bool = False
    """A capability of samplers: `sample_shard` works on one rank's part of the vocabulary."""
