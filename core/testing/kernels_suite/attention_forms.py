"""The part of the kernels' conformance suite (suite.py) that is about ATTENTION_FEATURES.

Kernels are held to the features that the author's `attention` names, alone and together. In every case with a window
the table names the scratch block for blocks that no query sees. Legend: as in core/testing/batches.py, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from hookline.core.contracts import ATTENTION_FEATURES, AttentionForm, AttentionSpec
from hookline.core.testing.batches import Row, make_batch, seen_slots
from hookline.core.testing.checks import check_close
from hookline.core.testing.kernels_suite.attention import FAR_OUT
from hookline.core.testing.kernels_suite.cases import AttentionCases, cache_blocks, describe, exact, with_window
from hookline.core.testing.plain_kernels import PlainKernels

TOGETHER = (
    ("window", "sinks"),
    ("scale", "softcap"),
    ("scale", "softcap", "window"),
    ("scale", "softcap", "sinks", "window"),
)
"""Features that models use together, and all of them."""


class AttentionFormSuite(AttentionCases):
    """Tests of `attend` with each of ATTENTION_FEATURES that the kernels declare."""

    def test_attend_decodes_within_windows(self) -> None:
        """Windows shorter and longer than contexts, around block boundaries, down to the query's own token."""
        for spec in self._specs_with("window"):
            size = spec.block_size
            lengths = [(context, 1) for context in (size + 1, 1, size, 2 * size + 3, 2, 3 * size)]
            for window in window_sizes(size):
                self.compare(spec, f"decodes within windows of {window}", lengths, window=window)

    def test_attend_chunks_within_windows(self) -> None:
        """Whole prompts and chunks: each query has another window."""
        for spec in self._specs_with("window"):
            size = spec.block_size
            lengths = [(size + 5, 5), (3 * size, size), (3 * size + 1, 3), (2 * size + 2, 2 * size + 2), (size + 1, 1)]
            for window in (1, size, size + 1, 5 * size):
                self.compare(spec, f"chunks within windows of {window}", lengths, num_decodes=0, window=window)

    def test_attend_mixed_batches_within_windows(self) -> None:
        """Decodes first, then chunks with and without a prefix."""
        for spec in self._specs_with("window"):
            size = spec.block_size
            lengths = [(size, 1), (2 * size + 1, 1), (7, 7), (2 * size + 3, 3), (2 * size, size), (1, 1)]
            for window in (size // 2 + 1, size + 2):
                self.compare(spec, f"a mixed step, windows of {window}", lengths, num_decodes=2, window=window)

    def test_attend_a_window_of_a_long_context(self) -> None:
        """Long enough to be worth splitting, window and all; and many rows of very different lengths."""
        for spec in self._specs_with("window"):
            self.compare(spec, "one decode of 400 tokens, a window of 150", [(400, 1)], window=150)
            self.compare(spec, "a chunk of 40 tokens of 200", [(200, 40)], num_decodes=0, window=50)
        for spec in self._specs_with("window", groups=self.groups[-1:]):
            lengths = [(1 + 7 * row % 24, 1) for row in range(33)]
            self.compare(spec, "33 decodes, windows of 9", lengths, window=9)

    def test_attend_rows_that_share_blocks_within_windows(self) -> None:
        """A common prefix of which rows see different parts, also if Batch.shared_lens_B hints at it."""
        for spec in self._specs_with("window"):
            size = spec.block_size
            rows = self.scattered(spec, [(2 * size + 1, 1), (2 * size + 5, 1), (3 * size + 2, 1)], num_shared=2)
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            batch = replace(make_batch(rows, spec, num_decodes=3), window=size + 2)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch)
            shared_lens_B = torch.full((3,), 2 * size, dtype=torch.int32, device=spec.device)
            for told in (replace(batch, scratch={}), replace(batch, shared_lens_B=shared_lens_B, scratch={})):
                what = f"attend of rows that share blocks within windows of {size + 2} ({describe(spec)})"
                check_close(what, self.attend(spec, q_THE, kv_2NSKE, told), expected, self.tolerance(spec, "attend"))

    def test_attend_ignores_what_lies_before_a_window(self) -> None:
        """All slots that no query sees hold finite garbage, also in a block that is seen in part."""
        for spec in self._specs_with("window"):
            size = spec.block_size
            rows = self.scattered(spec, [(2 * size + 3, 1), (3 * size, 1), (2 * size, 2 * size), (3 * size + 1, 4)])
            window = size // 2 + 1
            batch = with_window(make_batch(rows, spec, num_decodes=2), rows, spec, window)
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            unseen = [Row(max(0, row.context - row.num_queries - window + 1), 0, row.blocks) for row in rows]
            dirty = torch.full_like(kv_2NSKE, FAR_OUT)
            seen = seen_slots(rows, size)
            dirty.flatten(1, 2)[:, seen] = kv_2NSKE.flatten(1, 2)[:, seen]
            dirty.flatten(1, 2)[:, seen_slots(unseen, size)] = FAR_OUT
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch)
            what = f"attend with garbage before windows of {window} ({describe(spec)})"
            check_close(what, self.attend(spec, q_THE, dirty, batch), expected, self.tolerance(spec, "attend"))

    def test_attend_with_a_scale_of_its_own(self) -> None:
        """In place of 1 / sqrt(E)."""
        self._compare_steps("scale")

    def test_attend_with_capped_scores(self) -> None:
        """The cap applies to scaled scores; scores far beyond it become equal."""
        self._compare_steps("softcap", query_scale=3.0)

    def test_attend_with_sinks(self) -> None:
        """A sink is one more score of each head, counted once however the context is cut, neither scaled nor capped."""
        self._compare_steps("sinks")
        for spec in self._specs_with("sinks"):
            self.compare(spec, "one decode of 300 tokens with sinks", [(300, 1)], form=self.form(spec, "sinks"))

    def test_attend_with_features_together(self) -> None:
        """As models use them, in decodes beside chunks."""
        for features in TOGETHER:
            self._compare_steps(*features, query_scale=2.0, only_mixed=True)

    def test_attend_in_forms_that_differ_from_layer_to_layer(self) -> None:
        """The same kernels and batch, with one form after another, and the first one again."""
        for spec in self._specs_with(*ATTENTION_FEATURES[1:], groups=self.groups[:1]):
            size, form = spec.block_size, self.form(spec, *ATTENTION_FEATURES)
            other = AttentionForm(
                scale=None if form.scale is None else 2 * form.scale,
                softcap=None if form.softcap is None else form.softcap / 2,
                sinks_H=None if form.sinks_H is None else form.sinks_H.flip(0) + 1,
            )
            lengths = [(size + 1, 1), (2 * size + 3, 1), (size + 5, 5)]
            rows, kernels = self.scattered(spec, lengths), self.make_poisoned(spec)
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            batch = make_batch(rows, spec, num_decodes=2)
            for layer, one in enumerate((form, other, form)):
                expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch, one)
                actual = self.attend(spec, q_THE, kv_2NSKE, batch, kernels, one)
                what = f"attend with {named(one)} of layer {layer} ({describe(spec)})"
                check_close(what, actual, expected, 2 * self.tolerance(spec, "attend"))

    def test_attend_decodes_told_of_a_shared_prefix_in_every_form(self) -> None:
        """Sinks are of the row, not of a part of its context."""
        for spec in self._specs_with(*ATTENTION_FEATURES[1:]):
            size = spec.block_size
            rows = self.scattered(spec, [(2 * size + 1, 1), (2 * size + 5, 1), (3 * size + 2, 1)], num_shared=2)
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            shared_lens_B = torch.full((3,), 2 * size, dtype=torch.int32, device=spec.device)
            batch = make_batch(rows, spec, num_decodes=3)
            form = self.form(spec, *ATTENTION_FEATURES)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch, form)
            actual = self.attend(spec, q_THE, kv_2NSKE, replace(batch, shared_lens_B=shared_lens_B), form=form)
            what = f"attend with {named(form)} of decodes told of a shared prefix ({describe(spec)})"
            check_close(what, actual, expected, self.tolerance(spec, "attend"))

    def test_attend_decodes_in_every_form_as_a_captured_graph_lays_them_out(self) -> None:
        """No lengths on the host, an upper bound for the longest context, padding rows over the scratch block."""
        for spec in self._specs_with(*ATTENTION_FEATURES) if self.captured_decodes else ():
            size, scratch = spec.block_size, cache_blocks(spec)
            rows = self.scattered(spec, [(size + 1, 1), (3, 1), (2 * size, 1), (3 * size + 1, 1)])
            padding = Row(1, 1, (scratch,) * 4)
            q_THE, kv_2NSKE = self.inputs(spec, [*rows, padding])
            batch = make_batch([*rows, padding], spec, num_decodes=5, filler=scratch)
            for window in {self.window(size // 2 + 1), self.window(size + 2), self.window(2 * size)}:
                form = self.form(spec, *ATTENTION_FEATURES)
                seen = batch if window is None else with_window(batch, [*rows, padding], spec, window)
                captured = replace(seen, context_lens_host=None, max_context_len=4 * size, scratch={})
                expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), seen, form)
                actual = self.attend(spec, q_THE, kv_2NSKE, captured, form=form)
                what = f"attend, window {window}, {named(form)}, without lengths on the host ({describe(spec)})"
                check_close(what, actual[:4], expected[:4], self.tolerance(spec, "attend"))

    def _compare_steps(self, *features: str, query_scale: float = 1.0, only_mixed: bool = False) -> None:
        """Decodes, chunks and a mixed step with these features, if the kernels declare them all."""
        if not set(features) <= set(self.attention):
            return
        for spec in self.specs():
            size, form = spec.block_size, self.form(spec, *features)
            decodes = [(size + 1, 1), (1, 1), (2 * size + 3, 1)]
            chunks = [(size + 5, 5), (2 * size + 2, size + 2), (3, 3)]
            window = size + 2 if "window" in features else None
            kinds = [("a mixed step", decodes + chunks, 3), ("decodes", decodes, 3), ("chunks", chunks, 0)]
            for kind, lengths, num_decodes in kinds[:1] if only_mixed else kinds[1:]:
                what = f"{kind} with {', '.join(features)}"
                # A cap amplifies no errors, but scores this large differ by the rounding of a query to 8 bits.
                self.compare(spec, what, lengths, num_decodes, 0, query_scale, 2 * query_scale, window, form)

    def _specs_with(self, *features: str, groups: Sequence[int] | None = None) -> Iterator[AttentionSpec]:
        """Every combination the author wants tested, if the kernels declare one of these features."""
        return self.specs(groups) if set(features) & set(self.attention) else iter(())


def window_sizes(block_size: int) -> list[int]:
    """Around block boundaries, and longer than any context."""
    return sorted({1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size + 3, 5 * block_size})


def named(form: AttentionForm) -> str:
    """The form in words, for failure messages."""
    return ", ".join(sorted(form.features)) or "the plain form"
