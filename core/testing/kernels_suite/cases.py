"""The attention cases of the kernels' conformance suite: their sizes, their inputs, and the comparison.

Every case lays its rows over blocks in random order, in a cache whose other slots are full of numbers, so kernels that
read a wrong slot, block, head or position give a wrong result. Legend: as in core/testing/batches.py, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product, takewhile
from typing import ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, Kernels
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.core.testing.checks import PoisonedMemory, check_close, check_form, check_unchanged
from hookline.core.testing.plain_kernels import PlainKernels

MIN_BLOCKS, MIN_SLOTS = 40, 1300
"""Smallest size of a test's cache, in blocks and in tokens."""


class AttentionCases:
    """The base of the suite; the attributes an author may narrow are described in KernelsSuite."""

    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    block_sizes: ClassVar[Sequence[int]] = (16, 64)
    head_dims: ClassVar[Sequence[int]] = (64,)
    groups: ClassVar[Sequence[int]] = (1, 2, 4, 8)
    kv_heads: ClassVar[Sequence[int]] = (2, 1, 5)
    max_num_seqs: ClassVar[int] = 64
    max_num_batched_tokens: ClassVar[int] = 1021  # no multiple of any tile
    max_model_len: ClassVar[int] = 1024
    device: ClassVar[str] = "cpu"
    captured_decodes: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = True
    graph_prefill: ClassVar[bool] = False
    sizes_alike: ClassVar[bool] = False
    attention: ClassVar[Sequence[str]] = ()
    tolerances: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 2e-5,  # Sums of some hundred terms, each rounded to 24 bits.
        torch.float16: 4e-3,  # Four roundings to 11 bits: of weights, sums and the result.
        torch.bfloat16: 2e-2,  # The same to 8 bits; some of the errors cancel.
    }
    operation_tolerances: ClassVar[Mapping[str, Mapping[torch.dtype, float]]] = {}

    def make(self, spec: AttentionSpec) -> Kernels:
        """The kernels under test, built for `spec`."""
        raise NotImplementedError("return your kernels from make(spec)")

    def specs(self, groups: Sequence[int] | None = None) -> Iterator[AttentionSpec]:
        """Every combination the author wants tested, with the first of `kv_heads`."""
        yield from self._specs(self.groups if groups is None else groups, self.kv_heads[:1])

    def specs_of_other_heads(self) -> Iterator[AttentionSpec]:
        """Each of `kv_heads` after the first, with the first of `groups`."""
        yield from self._specs(self.groups[:1], self.kv_heads[1:])

    def _specs(self, groups: Sequence[int], kv_heads: Sequence[int]) -> Iterator[AttentionSpec]:
        sizes = product(self.dtypes, self.block_sizes, self.head_dims, groups, kv_heads)
        for dtype, size, head_dim, group, num_kv_heads in sizes:
            yield AttentionSpec(
                num_heads=group * num_kv_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=size,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                device=torch.device(self.device),
                dtype=dtype,
            )

    def most_tokens(self, spec: AttentionSpec) -> tuple[int, ...]:
        """The spec's max_num_batched_tokens, if limits are tested with this spec; they are with one for each dtype."""
        firsts = self.block_sizes[0], self.head_dims[0], self.groups[0] * self.kv_heads[0]
        is_tested = (spec.block_size, spec.head_dim, spec.num_heads) == firsts
        return (spec.max_num_batched_tokens,) if is_tested else ()

    def compare(
        self,
        spec: AttentionSpec,
        what: str,
        lengths: Sequence[tuple[int, int]],
        num_decodes: int | None = None,
        num_shared: int = 0,
        query_scale: float = 1.0,
        slack: float = 1.0,
        window: int | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> None:
        """Attend with rows of these (context, queries), and compare with the reference."""
        rows = self.scattered(spec, lengths, num_shared)
        q_THE, kv_2NSKE = self.inputs(spec, rows, query_scale)
        batch = make_batch(rows, spec, num_decodes=len(rows) if num_decodes is None else num_decodes)
        if window is not None:
            batch = with_window(batch, rows, spec, window)
        expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch, form)
        actual = self.attend(spec, q_THE, kv_2NSKE, batch, form=form)
        check_close(f"attend, {what} ({describe(spec)})", actual, expected, slack * self.tolerance(spec, "attend"))

    def attend(
        self,
        spec: AttentionSpec,
        q_THE: Tensor,
        kv_2NSKE: Tensor,
        batch: Batch,
        kernels: Kernels | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """The queries' attention, by these kernels or by new ones, with the checks that hold in every case."""
        before, q_copy_THE = kv_2NSKE.clone(), q_THE.clone()
        with PoisonedMemory(), torch.inference_mode():
            kernels = kernels or self.make(spec)
            kernels.prepare(batch)
            out_THE = kernels.attend(q_copy_THE, kv_2NSKE, batch, *forms(form))
        check_form("what attend returns", out_THE, (*q_THE.shape[:-1], spec.out_dim), spec.dtype)
        check_unchanged("the cache that attend reads", before, kv_2NSKE)
        return out_THE

    def scattered(self, spec: AttentionSpec, lengths: Sequence[tuple[int, int]], num_shared: int = 0) -> list[Row]:
        """Rows of these (context, queries) over blocks in random order."""
        return scatter_rows(lengths, spec.block_size, cache_blocks(spec), seed=len(lengths), num_shared=num_shared)

    def inputs(self, spec: AttentionSpec, rows: Sequence[Row], query_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Queries of the rows, and the second layer of a cache full of numbers."""
        num_tokens = sum(row.num_queries for row in rows)
        q_THE = self.random(spec, num_tokens, spec.num_heads, spec.head_dim) * query_scale
        return q_THE, random_cache(spec, cache_blocks(spec), seed=1, num_layers=2)[:, 1]

    def random(self, spec: AttentionSpec, *shape: int, seed: int = 0) -> Tensor:
        """Standard normal values, always the same for a seed."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(spec.device, spec.dtype)

    def form(self, spec: AttentionSpec, *features: str) -> AttentionForm:
        """A form with these of ATTENTION_FEATURES, besides "window", as far as the kernels declare them."""
        asked = {name for name in features if name in self.attention}
        sinks_H = torch.linspace(-2, 4, spec.num_heads).to(spec.device, spec.dtype)
        return AttentionForm(
            scale=0.3 if "scale" in asked else None,
            softcap=1.5 if "softcap" in asked else None,
            sinks_H=sinks_H if "sinks" in asked else None,
        )

    def window(self, tokens: int) -> int | None:
        """`tokens` as a window, if the kernels declare "window"; otherwise None."""
        return tokens if "window" in self.attention else None

    def tolerance(self, spec: AttentionSpec, operation: str) -> float:
        """Largest error allowed in an operation's results, relative to 1 + |expected|."""
        of_operation = self.operation_tolerances.get(operation, {})
        return of_operation[spec.dtype] if spec.dtype in of_operation else self.tolerances[spec.dtype]

    def make_poisoned(self, spec: AttentionSpec) -> Kernels:
        """The kernels under test, whose scratch space holds NaN."""
        with PoisonedMemory():
            return self.make(spec)


def forms(form: AttentionForm) -> tuple[AttentionForm, ...]:
    """The form as arguments for `attend`; none for the plain form, since kernels without forms take none."""
    return (form,) if form.features else ()


def with_window(
    batch: Batch, rows: Sequence[Row], spec: AttentionSpec, window: int, scratch: int | None = None
) -> Batch:
    """The same batch with a window; its table names the scratch block for blocks that no query of a row sees."""
    scratch = cache_blocks(spec) if scratch is None else scratch
    table_BM = batch.block_table_BM.clone()
    for row, table_M in zip(rows, table_BM, strict=True):
        table_M[: max(0, row.context - row.num_queries - window + 1) // spec.block_size] = scratch
    return replace(batch, window=window, block_table_BM=table_BM)


def exact(spec: AttentionSpec) -> AttentionSpec:
    """The same sizes in the dtype of the reference."""
    return replace(spec, dtype=torch.float64, kv_dtype=None)


def longest_decodes(spec: AttentionSpec) -> list[tuple[int, int]]:
    """(context, queries) of the most rows that a step may have, the last one as long as it may be."""
    contexts = [1 + 5 * row % 17 for row in range(spec.max_num_seqs - 1)]
    return [(min(context, spec.max_model_len), 1) for context in (*contexts, spec.max_model_len)]


def largest_step(spec: AttentionSpec, *, with_decodes: bool = True) -> list[tuple[int, int]]:
    """(context, queries) of as many tokens as a step may have, in chunks whose contexts are as long as they may be.

    with_decodes: whether decodes are the other rows, as many as a step may have.
    """
    num_chunks = min(spec.max_num_seqs, -(-spec.max_num_batched_tokens // spec.max_model_len))
    num_decodes = spec.max_num_seqs - num_chunks if with_decodes else 0
    chunks, left = [], spec.max_num_batched_tokens - num_decodes
    for _ in range(num_chunks):
        chunks.append((spec.max_model_len, min(left, spec.max_model_len)))
        left -= chunks[-1][1]
    return [*longest_decodes(spec)[:num_decodes], *chunks]


def num_decodes_of(lengths: Sequence[tuple[int, int]]) -> int:
    """Rows of one token, up to the first of several."""
    return len(list(takewhile(lambda length: length[1] == 1, lengths)))


def blocks_of(spec: AttentionSpec, lengths: Sequence[tuple[int, int]]) -> int:
    """Blocks of these rows, and a few others."""
    return sum(-(-context // spec.block_size) for context, _ in lengths) + 5


def cache_blocks(spec: AttentionSpec) -> int:
    """Number of blocks of a test's cache; the block after them is scratch."""
    return max(MIN_BLOCKS, MIN_SLOTS // spec.block_size)


def describe(spec: AttentionSpec) -> str:
    """The case in words, for failure messages."""
    dtype = str(spec.dtype).removeprefix("torch.")
    heads = f"{spec.num_heads} heads over {spec.num_kv_heads} kv heads of {spec.head_dim}"
    return f"{dtype}, block size {spec.block_size}, {heads}"
