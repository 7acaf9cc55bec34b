"""The part of the kernels' conformance suite (suite.py) that is about attention.

Every case lays its rows over blocks in random order, in a cache whose other slots are full of numbers, so kernels that
read a wrong slot, block, head or position give a wrong result. Legend: as in core/testing/batches.py, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Batch
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows, seen_slots
from hookline.core.testing.checks import PoisonedMemory, check, check_close
from hookline.core.testing.kernels_suite.cases import (
    AttentionCases,
    blocks_of,
    cache_blocks,
    describe,
    exact,
    largest_step,
    longest_decodes,
    num_decodes_of,
    with_window,
)
from hookline.core.testing.plain_kernels import PlainKernels

FAR_OUT = 1e3
"""Finite garbage, far outside the range of keys and values."""


class AttentionSuite(AttentionCases):
    """Tests of `attend`."""

    def test_attend_decodes(self) -> None:
        """Each row has one query; contexts end around block boundaries."""
        for spec in self.specs():
            size = spec.block_size
            self.compare(spec, "decodes", [(context, 1) for context in (size + 1, 1, size, 2 * size + 3, 2, 3 * size)])

    def test_attend_one_decode_over_a_long_context(self) -> None:
        """A single row, long enough to be worth splitting."""
        for spec in self.specs():
            self.compare(spec, "one decode of 300 tokens", [(300, 1)])

    def test_attend_many_decodes(self) -> None:
        """More rows than fit one tile, of very different lengths."""
        for spec in self.specs(self.groups[-1:]):
            self.compare(spec, "33 decodes", [(1 + 7 * row % 40, 1) for row in range(33)])

    def test_attend_whole_prompts(self) -> None:
        """Prefill without a prefix: each token sees itself and all tokens before it."""
        for spec in self.specs():
            size = spec.block_size
            lengths = [(length, length) for length in (size + 1, 1, 2, size, 2 * size - 1)]
            self.compare(spec, "whole prompts", lengths, num_decodes=0)

    def test_attend_chunks_after_a_prefix(self) -> None:
        """Prefill whose first tokens are in the cache already, down to chunks of one token."""
        for spec in self.specs():
            size = spec.block_size
            lengths = [(size + 1, 1), (size + 5, 5), (3 * size, size), (3 * size + 1, 3), (2 * size + 2, size + 2)]
            self.compare(spec, "chunks after a prefix", lengths, num_decodes=0)

    def test_attend_mixed_batches(self) -> None:
        """Decodes first, then chunks with and without a prefix."""
        for spec in self.specs():
            size = spec.block_size
            lengths = [(size, 1), (2 * size + 1, 1), (7, 7), (size + 3, 3), (2 * size, size), (1, 1)]
            self.compare(spec, "decodes and chunks", lengths, num_decodes=2)

    def test_attend_at_the_limits_of_the_spec(self) -> None:
        """The most rows, the most tokens and the longest contexts: decodes, a mixed step, and chunks alone."""
        for spec in filter(self.most_tokens, self.specs(self.groups[:1])):
            self._attend_at_limits(spec, "as many decodes as there may be", longest_decodes(spec))
            self._attend_at_limits(spec, "as many tokens as there may be, behind decodes", largest_step(spec))
            chunks = largest_step(spec, with_decodes=False)
            self._attend_at_limits(spec, "as many tokens as there may be", chunks)

    def _attend_at_limits(self, spec: AttentionSpec, what: str, lengths: Sequence[tuple[int, int]]) -> None:
        num_blocks = blocks_of(spec, lengths)
        rows = scatter_rows(lengths, spec.block_size, num_blocks, seed=1)
        batch = make_batch(rows, spec, num_decodes=num_decodes_of(lengths))
        q_THE = self.random(spec, batch.num_tokens, spec.num_heads, spec.head_dim)
        kv_2NSKE = random_cache(spec, num_blocks, seed=1, num_layers=2)[:, 1]
        expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch)
        actual = self.attend(spec, q_THE, kv_2NSKE, batch)
        check_close(f"attend, {what} ({describe(spec)})", actual, expected, self.tolerance(spec, "attend"))
        if self.captured_decodes and batch.num_decodes == batch.num_requests:
            captured = replace(batch, context_lens_host=None, max_context_len=spec.max_model_len, scratch={})
            actual, what = self.attend(spec, q_THE, kv_2NSKE, captured), f"{what}, without lengths on the host"
            check_close(f"attend, {what} ({describe(spec)})", actual, expected, self.tolerance(spec, "attend"))

    def test_attend_with_other_numbers_of_kv_heads(self) -> None:
        """With one kv head and with more than two: decodes alone, and beside chunks."""
        for spec in self.specs_of_other_heads():
            size = spec.block_size
            decodes = [(size + 1, 1), (3, 1)]
            self.compare(spec, "decodes", decodes)
            self.compare(spec, "decodes and chunks", [*decodes, (5, 5), (size + 3, 3)], num_decodes=2)

    def test_attend_rows_that_share_blocks(self) -> None:
        """A common prefix lies in the cache once."""
        for spec in self.specs():
            size = spec.block_size
            lengths = [(2 * size + 1, 1), (2 * size, 1), (3 * size + 2, 1), (2 * size + 4, 4), (2 * size + 5, 5)]
            self.compare(spec, "rows that share blocks", lengths, num_decodes=3, num_shared=2)

    def test_attend_decodes_told_of_a_shared_prefix(self) -> None:
        """Batch.shared_lens_B is a hint: results are the same with it, also of rows that do not share."""
        for spec in self.specs():
            size = spec.block_size
            sharing = self.scattered(spec, [(2 * size + 1, 1), (2 * size + 5, 1), (3 * size + 2, 1)], num_shared=2)
            taken = {block for row in sharing for block in row.blocks}
            own = tuple(block for block in range(cache_blocks(spec)) if block not in taken)[:3]
            rows = [sharing[0], Row(size + 2, 1, own), *sharing[1:]]
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            batch = make_batch(rows, spec, num_decodes=4)
            shared_lens_B = torch.tensor([2 * size, 0, 2 * size, 2 * size], dtype=torch.int32, device=self.device)
            told = replace(batch, shared_lens_B=shared_lens_B)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch)
            what = f"attend of decodes told of a shared prefix ({describe(spec)})"
            check_close(what, self.attend(spec, q_THE, kv_2NSKE, told), expected, self.tolerance(spec, "attend"))

    def test_attend_to_what_another_row_writes_in_the_same_step(self) -> None:
        """A step writes all its keys and values before it attends, so a prefix can be shared within it."""
        for spec in self.specs():
            size = spec.block_size
            rows = self.scattered(spec, [(size + 2, size + 2), (size + 3, 3)], num_shared=1)
            kernels, batch = self.make(spec), make_batch(rows, spec, num_decodes=0)
            qkv_TC = self.random(spec, batch.num_tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
            expected = _attend_after_writing(PlainKernels(None, exact(spec)), qkv_TC.double(), spec, batch)
            actual = _attend_after_writing(kernels, qkv_TC.clone(), spec, batch)
            what = f"attend over blocks written in the same step ({describe(spec)})"
            check_close(what, actual, expected, 3 * self.tolerance(spec, "attend"))  # Keys and values are rounded, too.

    def test_attend_with_large_scores(self) -> None:
        """Softmax must subtract the maximum: exp overflows at 89 in float32."""
        for spec in self.specs(self.groups[:1]):
            self.compare(spec, "large scores", [(40, 1), (33, 33)], num_decodes=1, query_scale=40.0, slack=10)

    def test_attend_ignores_unseen_slots(self) -> None:
        """Finite garbage in other blocks, past the context and in the scratch block changes nothing."""
        for spec in self.specs():
            rows = self.scattered(spec, [(5, 1), (spec.block_size + 2, 1), (9, 9), (spec.block_size + 4, 4)])
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            clean, dirty = torch.zeros_like(kv_2NSKE), torch.full_like(kv_2NSKE, FAR_OUT)
            seen = seen_slots(rows, spec.block_size)
            for other in (clean, dirty):
                other.flatten(1, 2)[:, seen] = kv_2NSKE.flatten(1, 2)[:, seen]
            expected = self.attend(spec, q_THE, clean, make_batch(rows, spec, num_decodes=2))
            scratch = cache_blocks(spec)
            actual = self.attend(spec, q_THE, dirty, make_batch(rows, spec, num_decodes=2, filler=scratch))
            what = f"attend with garbage in slots no query may see ({describe(spec)})"
            check_close(what, actual, expected, self.tolerance(spec, "attend"))

    def test_a_row_alone_gets_what_it_gets_in_a_crowd(self) -> None:
        """Results do not depend on batch composition."""
        for spec in self.specs():
            rows = self.scattered(spec, [(spec.block_size + 1, 1), (3, 1), (20, 20), (spec.block_size + 9, 5)])
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            crowd = self.attend(spec, q_THE, kv_2NSKE, make_batch(rows, spec, num_decodes=2))
            starts = [0, *torch.tensor([row.num_queries for row in rows]).cumsum(0).tolist()]
            for index, row in enumerate(rows):
                mine = slice(starts[index], starts[index + 1])
                batch = make_batch([row], spec, num_decodes=int(index < 2))
                alone = self.attend(spec, q_THE[mine], kv_2NSKE, batch)
                what = f"attend of row {index} alone, compared with the same row in a batch ({describe(spec)})"
                check_close(what, alone, crowd[mine], self.tolerance(spec, "attend"))

    def test_nothing_is_kept_from_one_step_to_the_next(self) -> None:
        """The same object attends with two batches of the same shape, and again with the first."""
        for spec in self.specs():
            kernels, reference = self.make(spec), PlainKernels(None, exact(spec))
            short, long = ([(context, 1), (context + 7, 4)] for context in (5, spec.block_size + 9))
            for lengths in (short, long, short):
                rows = self.scattered(spec, lengths)
                q_THE, kv_2NSKE = self.inputs(spec, rows)
                batch = make_batch(rows, spec, num_decodes=1)
                expected = reference.attend(q_THE.double(), kv_2NSKE.double(), batch)
                actual = self.attend(spec, q_THE, kv_2NSKE, batch, kernels)
                what = f"attend of a batch after another ({describe(spec)})"
                check_close(what, actual, expected, self.tolerance(spec, "attend"))

    def test_a_batch_prepared_like_another_attends_to_its_own_blocks(self) -> None:
        """As layers of the same window have them: with equal lengths, and blocks of their own."""
        for spec in self.specs(self.groups[:1]):
            lengths = [(spec.block_size + 1, 1), (2 * spec.block_size, 1), (spec.block_size + 5, 4)]
            rows = self.scattered(spec, lengths)
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            kernels, first = self.make(spec), make_batch(rows, spec, num_decodes=2)
            others = [Row(row.context, row.num_queries, row.blocks[::-1]) for row in rows]
            second = make_batch(others, spec, num_decodes=2)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), second)
            kernels.prepare(first)
            kernels.prepare_alike(second, first)
            actual = kernels.attend(q_THE.clone(), kv_2NSKE, second)
            what = f"attend of a batch that was prepared like another ({describe(spec)})"
            check_close(what, actual, expected, self.tolerance(spec, "attend"))

    def test_all_batches_of_a_step_are_prepared_before_one_attends(self) -> None:
        """As groups of layers have them: equal lengths, blocks of their own, and windows where they are declared."""
        for spec in self.specs(self.groups[:1]):
            size = spec.block_size
            decodes = [(size + 1, 1), (3 * size + 1, 1), (2 * size, 1)]
            self._attend_by_groups("decodes", spec, decodes)
            self._attend_by_groups("decodes and chunks", spec, [*decodes[:2], (2 * size + 5, 4), (3 * size, size + 2)])
            if self.captured_decodes and self.window(1):  # without windows there is one group
                self._attend_by_groups("decodes without lengths on the host", spec, decodes, is_captured=True)

    def _attend_by_groups(
        self, kind: str, spec: AttentionSpec, lengths: Sequence[tuple[int, int]], is_captured: bool = False
    ) -> None:
        """Prepare the batches as an engine does, then attend with each, and with the first one again."""
        kernels, reference = self.make(spec), PlainKernels(None, exact(spec))
        q_THE, kv_2NSKE = self.inputs(spec, self.scattered(spec, lengths))
        prepared: list[Batch] = []
        windows = (None, spec.block_size // 2 + 1, None) if self.window(1) else (None, None)
        with PoisonedMemory(), torch.inference_mode():
            for group, window in enumerate(windows):
                rows = scatter_rows(lengths, spec.block_size, cache_blocks(spec), seed=group)
                batch = make_batch(rows, spec, num_decodes=sum(row.num_queries == 1 for row in rows))
                if window is not None:
                    batch = with_window(batch, rows, spec, window)
                if is_captured:
                    batch = replace(batch, context_lens_host=None, max_context_len=4 * spec.block_size)
                batch = replace(batch, scratch={})
                alike = [one for one in prepared if one.window == window]
                kernels.prepare_alike(batch, alike[0]) if alike else kernels.prepare(batch)
                prepared.append(batch)
            expected = [reference.attend(q_THE.double(), kv_2NSKE.double(), batch) for batch in prepared]
            for group in (*range(len(windows)), 0):
                actual = kernels.attend(q_THE.clone(), kv_2NSKE, prepared[group])
                what = f"attend of batch {group + 1} of a step of {len(windows)}, all prepared before, {kind}"
                check_close(f"{what} ({describe(spec)})", actual, expected[group], self.tolerance(spec, "attend"))

    def test_the_same_step_gives_the_same_bits(self) -> None:
        """Sums whose order varies, as with atomics, would let the same request get other tokens."""
        for spec in self.specs(self.groups[:1]):
            rows = self.scattered(spec, [(spec.block_size + 1, 1), (300, 1), (20, 20), (spec.block_size + 9, 5)])
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            kernels = self.make(spec)
            first, *others = (
                self.attend(spec, q_THE, kv_2NSKE, make_batch(rows, spec, num_decodes=2), kernels) for _ in range(3)
            )
            same = all(torch.equal(first, other) for other in others)
            check(same, f"attend gives other bits for the same step computed again ({describe(spec)})")

    def test_row_order_does_not_matter(self) -> None:
        """Reversed decodes give reversed results."""
        for spec in self.specs():
            rows = self.scattered(spec, [(spec.block_size + 1, 1), (3, 1), (2 * spec.block_size, 1), (1, 1)])
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            forward = self.attend(spec, q_THE, kv_2NSKE, make_batch(rows, spec, num_decodes=4))
            backward = self.attend(spec, q_THE.flip(0), kv_2NSKE, make_batch(rows[::-1], spec, num_decodes=4))
            what = f"attend of rows in reverse order ({describe(spec)})"
            check_close(what, backward.flip(0), forward, self.tolerance(spec, "attend"))

    def test_attend_decodes_as_a_captured_graph_lays_them_out(self) -> None:
        """No lengths on the host, an upper bound for the longest context, padding rows over the scratch block."""
        for spec in self.specs() if self.captured_decodes else ():
            size, scratch = spec.block_size, cache_blocks(spec)
            rows = self.scattered(spec, [(size + 1, 1), (3, 1), (2 * size, 1)])
            padding = Row(1, 1, (scratch, scratch, scratch, scratch))
            q_THE, kv_2NSKE = self.inputs(spec, [*rows, padding])
            batch = make_batch([*rows, padding], spec, num_decodes=4, filler=scratch)
            captured = replace(batch, context_lens_host=None, max_context_len=4 * size)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch)
            actual = self.attend(spec, q_THE, kv_2NSKE, captured)
            what = f"attend of decodes without lengths on the host ({describe(spec)})"
            check_close(what, actual[:3], expected[:3], self.tolerance(spec, "attend"))


def _attend_after_writing(kernels: Any, qkv_TC: Tensor, spec: AttentionSpec, batch: Batch) -> Tensor:
    kv_2NSKE = random_cache(spec, cache_blocks(spec), seed=2)[:, 0].to(qkv_TC.dtype)
    batch = replace(batch, scratch={})
    kernels.prepare(batch)
    q_THE = kernels.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, None, None)
    out_THE: Tensor = kernels.attend(q_THE, kv_2NSKE, batch)
    return out_THE
