"""The steps that a rank computes before it is ready, so that no later step has to compile or load a kernel first.

They are computed as real steps are, with padding rows alone, which write to the scratch block. The kernels name the
numbers of rows and the shapes of steps that they compile other variants for: Kernels.own_row_counts and step_shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hookline.core.contracts import AttentionSpec, Kernels, StepShape
from hookline.core.step.message import Step

MOST_COMMON_TOKENS = 4096
"""Prompt tokens of the largest common step; larger steps run the same kernels, and the largest was computed before."""
DRAWS = (1, 2, 4)
"""Numbers of draws that give arrays of 4-byte and 8-byte elements addresses of different alignment."""


def eager_steps(spec: AttentionSpec, kernels: Kernels, padding_row: int, *, shares_prefixes: bool) -> Iterator[Step]:
    """Steps to compute eagerly, each once: real steps of their sizes may have draws that no graph was captured for."""
    shapes = [
        *common_shapes(spec),
        *(row_shape(spec, count) for count in kernels.own_row_counts),
        *kernels.step_shapes(),
    ]
    for shape in dict.fromkeys(within(spec, shape) for shape in shapes):
        if shape.num_decodes + shape.num_tokens and (shares_prefixes or not shape.is_shared):
            yield padding_step(spec, shape, padding_row)
    mixed = within(spec, StepShape(num_decodes=1, num_tokens=1))
    yield padding_step(spec, mixed, padding_row, all_greedy=True)
    yield padding_step(spec, within(spec, StepShape(num_tokens=1)), padding_row, draws=False)


def draw_steps(spec: AttentionSpec, padding_row: int) -> Iterator[Step]:
    """Steps to compute for each kind of draws that is to be ready: with one draw, and with few.

    A kernel may have a variant for one row, and others for addresses that are multiples of 16 bytes.
    """
    shapes = (within(spec, StepShape(num_tokens=num_draws, context_len=1)) for num_draws in DRAWS)
    for shape in dict.fromkeys(shapes):
        for all_greedy in (False, True):
            yield padding_step(spec, shape, padding_row, all_greedy=all_greedy)


def graph_steps(spec: AttentionSpec, sizes: Iterable[int], padding_row: int) -> Iterator[Step]:
    """A step for each captured size: the first replay of a graph loads it onto the device."""
    for size in sizes:
        yield padding_step(spec, StepShape(num_decodes=size, context_len=1), padding_row)


def common_shapes(spec: AttentionSpec) -> Iterator[StepShape]:
    """Prompts of twice as many tokens each time, alone and beside decodes."""
    num_tokens = 1
    while num_tokens <= min(spec.max_num_batched_tokens, MOST_COMMON_TOKENS):
        yield StepShape(num_tokens=num_tokens)
        num_tokens *= 2
    yield StepShape(num_decodes=1, num_tokens=1)
    yield StepShape(num_decodes=spec.max_num_seqs - 1, num_tokens=1)


def row_shape(spec: AttentionSpec, num_rows: int) -> StepShape:
    """A step of `num_rows` tokens with a draw for each, or with max_num_seqs draws if that is less."""
    num_draws = min(num_rows, spec.max_num_seqs)
    num_prompts = max(1, -(-(num_rows - num_draws) // max(1, spec.max_model_len - 1)))
    num_decodes = max(0, num_draws - num_prompts)
    return StepShape(num_decodes=num_decodes, num_tokens=num_rows - num_decodes)


def within(spec: AttentionSpec, shape: StepShape) -> StepShape:
    """The shape, cut down to what the limits allow."""
    num_decodes = min(shape.num_decodes, spec.max_num_seqs)
    if num_decodes == spec.max_num_seqs and shape.num_tokens:
        num_decodes -= 1  # the prompt needs a place, too
    num_tokens = min(shape.num_tokens, spec.max_num_batched_tokens - num_decodes)
    context_len = min(shape.context_len or max(num_tokens, 1), spec.max_model_len)
    num_tokens = min(num_tokens, (spec.max_num_seqs - num_decodes) * context_len)  # each prompt is drawn from
    return StepShape(num_decodes, num_tokens, context_len, shape.is_shared and num_decodes > 1)


def padding_step(
    spec: AttentionSpec, shape: StepShape, padding_row: int, *, all_greedy: bool = False, draws: bool = True
) -> Step:
    """A step of this shape, all rows of it the padding row, in as few prompts as its context length allows.

    draws: whether the step samples a token for every prompt; otherwise it samples none.
    """
    num_chunks = -(-shape.num_tokens // shape.context_len)
    lens = np.full(num_chunks, shape.context_len, dtype=np.int64)
    if num_chunks:
        lens[-1] = shape.num_tokens - lens[:-1].sum()
    return Step(
        decode_rows=np.full(shape.num_decodes, padding_row, dtype=np.int64),
        chunk_rows=np.full(num_chunks, padding_row, dtype=np.int64),
        chunk_starts=shape.context_len - lens,
        chunk_lens=lens,
        token_ids_T=np.zeros(shape.num_tokens, dtype=np.int64),
        sampled_chunks=np.arange(num_chunks if draws else 0),
        max_context_len=shape.context_len,
        shared_len=spec.block_size if shape.is_shared else 0,
        all_greedy=all_greedy,
    )
