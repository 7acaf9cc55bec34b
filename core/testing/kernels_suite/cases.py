"""What the attention cases of the kernels' conformance suite are made of: sizes, inputs, and the comparison.

Every case lays its rows over blocks in random order, in a cache whose other slots are full of numbers, so kernels that
read a wrong slot, block, head or position give a wrong result. Legend: as in core/testing/batches.py, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, Kernels
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.core.testing.checks import PoisonedMemory, check_close, check_form, check_unchanged
from hookline.core.testing.plain_kernels import PlainKernels

NUM_KV_HEADS = 2
MIN_BLOCKS, MIN_SLOTS = 40, 1300
"""Smallest size of a test's cache, in blocks and in tokens."""


class AttentionCases:
    """The base of the suite; the attributes an author may narrow are described in KernelsSuite."""

    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    block_sizes: ClassVar[Sequence[int]] = (16, 64)
    head_dims: ClassVar[Sequence[int]] = (64,)
    groups: ClassVar[Sequence[int]] = (1, 2, 4, 8)
    device: ClassVar[str] = "cpu"
    captured_decodes: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = True
    graph_prefill: ClassVar[bool] = False
    sizes_alike: ClassVar[bool] = False
    attention: ClassVar[Sequence[str]] = ()
    tolerances: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 2e-5,  # Sums of some hundred terms, each rounded to 24 bits.
        torch.float16: 4e-3,  # Four roundings to 11 bits: of weights, sums and the result.
        torch.bfloat16: 2e-2,  # The same to 8 bits, less what averages out.
    }

    def make(self, spec: AttentionSpec) -> Kernels:
        """The kernels under test, built for `spec`."""
        raise NotImplementedError("return your kernels from make(spec)")

    def specs(self, groups: Sequence[int] | None = None) -> Iterator[AttentionSpec]:
        """Every combination the author wants tested."""
        groups = groups or self.groups
        for dtype, size, head_dim, group in product(self.dtypes, self.block_sizes, self.head_dims, groups):
            yield AttentionSpec(
                num_heads=group * NUM_KV_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=head_dim,
                block_size=size,
                max_num_seqs=64,
                max_num_batched_tokens=1024,
                max_model_len=1024,
                device=torch.device(self.device),
                dtype=dtype,
            )

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
        check_close(f"attend, {what} ({describe(spec)})", actual, expected, slack * self.tolerance(spec))

    def attend(
        self,
        spec: AttentionSpec,
        q_THE: Tensor,
        kv_2NSKE: Tensor,
        batch: Batch,
        kernels: Kernels | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """The queries' attention, by these kernels or by new ones; checked for what holds in every case."""
        before, q_copy_THE = kv_2NSKE.clone(), q_THE.clone()
        with PoisonedMemory(), torch.inference_mode():
            kernels = kernels or self.make(spec)
            kernels.prepare(batch)
            out_THE = kernels.attend(q_copy_THE, kv_2NSKE, batch, *forms(form))
        check_form("what attend returns", out_THE, q_THE.shape, spec.dtype)
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

    def random(self, spec: AttentionSpec, *shape: int) -> Tensor:
        """Standard normal values, always the same."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(spec.device, spec.dtype)

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

    def tolerance(self, spec: AttentionSpec) -> float:
        """Largest error allowed, relative to 1 + |expected|."""
        return self.tolerances[spec.dtype]


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
    return replace(spec, dtype=torch.float64)


def cache_blocks(spec: AttentionSpec) -> int:
    """Blocks of a test's cache; the one after them is scratch."""
    return max(MIN_BLOCKS, MIN_SLOTS // spec.block_size)


def describe(spec: AttentionSpec) -> str:
    """What failure messages say of the case."""
    dtype = str(spec.dtype).removeprefix("torch.")
    heads = f"{spec.num_heads} heads over {spec.num_kv_heads} kv heads of {spec.head_dim}"
    return f"{dtype}, block size {spec.block_size}, {heads}"
