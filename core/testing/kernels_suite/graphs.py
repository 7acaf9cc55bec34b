"""The part of the kernels' conformance suite (suite.py) that is about CUDA graphs.

Captured operations may not wait for the device, and lengths are known to the device alone; both are tested on a CPU,
too.
Legend: as in core/testing/batches.py, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from hookline.core.contracts import (
    ATTENTION_FEATURES,
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    Kernels,
    QKNorm,
)
from hookline.core.testing.batches import Row, make_batch
from hookline.core.testing.checks import check_close, check_nothing_kept
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.testing.kernels_suite.cases import AttentionCases, cache_blocks, describe, exact, forms, with_window
from hookline.core.testing.plain_kernels import PlainKernels

EPS = 1e-5


class GraphSuite(AttentionCases):
    """Tests of kernels that declare graph_safe: no host sync, and steps with prompts as a captured graph has them."""

    def test_what_a_graph_captures_never_waits_for_the_host(self) -> None:
        """Each operation of a decode step is tested separately, so that the message names it."""
        for spec in self.specs(self.groups[:1]) if self.graph_safe else ():
            self._watch_operations(spec)
            batches = self._captured(spec)
            for batch in batches:
                self._watch_attention(spec, batch)
            if self.attention:
                window, form = self.window(spec.block_size // 2 + 1), self.form(spec, *ATTENTION_FEATURES)
                self._watch_attention(spec, replace(batches[-1], window=window), form)

    def test_attend_prefills_as_a_captured_graph_lays_them_out(self) -> None:
        """No lengths on the host, rows without queries, and the last row's queries in the scratch block."""
        for spec in self.specs() if self.graph_prefill else ():
            self._attend_captured(spec, 0)

    def test_attend_computes_mixed_steps_as_a_captured_graph_lays_them_out(self) -> None:
        """The same after decodes; one of the rows that the graph does not treat as a decode has a single query."""
        for spec in self.specs() if self.graph_prefill else ():
            self._attend_captured(spec, 2)

    def test_attend_computes_every_form_of_mixed_steps_as_a_captured_graph_lays_them_out(self) -> None:
        """With all of ATTENTION_FEATURES that the kernels declare."""
        for spec in self.specs() if self.graph_prefill and self.attention else ():
            form = self.form(spec, *ATTENTION_FEATURES)
            for window in {self.window(spec.block_size // 2 + 1), self.window(spec.block_size + 2)}:
                self._attend_captured(spec, 2, window, form)

    def test_another_number_of_rows_leaves_nothing_behind(self) -> None:
        """Kernels that do not declare sizes_alike pass."""
        for spec in self.specs(self.groups[:1]) if self.sizes_alike else ():
            kernels = self.make(spec)
            self._use(spec, kernels, 3)
            for num_rows in (1, 5):
                with check_nothing_kept(f"a step of {num_rows} rows ({describe(spec)})"):
                    self._use(spec, kernels, num_rows)

    def _use(self, spec: AttentionSpec, kernels: Kernels, num_rows: int) -> None:
        """Call the operations of a decode step of num_rows rows."""
        for call in self._operations(spec, kernels, num_rows).values():
            call()
        rows = self.scattered(spec, [(spec.block_size + 1, 1)] * num_rows)
        batch = make_batch(rows, spec, num_decodes=num_rows, filler=cache_blocks(spec))
        _, kv_2NSKE = self.inputs(spec, rows)
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        with torch.no_grad():
            kernels.prepare(batch)
            kernels.qkv_attend(self.random(spec, num_rows, num_heads * spec.head_dim), kv_2NSKE, batch, None, None)

    def _attend_captured(
        self,
        spec: AttentionSpec,
        num_decodes: int,
        window: int | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> None:
        rows, captured = self._captured_prompts(spec, num_decodes)
        captured = captured if window is None else with_window(captured, rows, spec, window)
        q_THE, kv_2NSKE = self.inputs(spec, rows)
        needed = rows[:-2]
        num_needed = sum(row.num_queries for row in needed)
        batch = replace(make_batch(needed, spec, num_decodes=num_decodes), window=window)
        reference = PlainKernels(None, exact(spec))
        expected = reference.attend(q_THE[:num_needed].double(), kv_2NSKE.double(), batch, form)
        actual = self.attend(spec, q_THE, kv_2NSKE, captured, form=form)[:num_needed]
        seen = f"prompts and {num_decodes} decodes" if window is None else f"prompts and decodes within {window}"
        what = f"attend of {seen} as a graph captures them ({describe(spec)})"
        check_close(what, actual, expected, self.tolerance(spec, "attend"))

    def _captured(self, spec: AttentionSpec) -> list[Batch]:
        """Batches of the kinds of step that are captured."""
        counts = (0, 2) if self.graph_prefill else ()
        return [self._captured_decodes(spec), *(self._captured_prompts(spec, count)[1] for count in counts)]

    def _captured_decodes(self, spec: AttentionSpec) -> Batch:
        rows = self.scattered(spec, [(spec.block_size + 1, 1), (3, 1)])
        batch = make_batch(rows, spec, num_decodes=2, filler=cache_blocks(spec))
        return replace(batch, context_lens_host=None, max_context_len=4 * spec.block_size)

    def _captured_prompts(self, spec: AttentionSpec, num_decodes: int) -> tuple[list[Row], Batch]:
        """Decodes, three rows of the step's, one without queries, and the padding row."""
        scratch = cache_blocks(spec)
        decodes = [(spec.block_size + 1, 1), (3, 1)][:num_decodes]
        needed = self.scattered(spec, [*decodes, (spec.block_size + 3, 1), (spec.block_size + 7, 7), (5, 5)])
        rows = [*needed, Row(1, 0, (scratch,)), Row(20, 20, (scratch,) * (-(-20 // spec.block_size)))]
        batch = make_batch(rows, spec, num_decodes=num_decodes, filler=scratch)
        on_device = replace(batch, query_starts_host=None, context_lens_host=None)
        num_others = batch.num_tokens - num_decodes
        return rows, replace(on_device, max_query_len=num_others, max_context_len=4 * spec.block_size)

    def _operations(self, spec: AttentionSpec, kernels: Kernels, num_rows: int) -> dict[str, Callable[[], object]]:
        """Functions that each call one operation on num_rows rows, by its name; attention is not among them."""
        x_TD = self.random(spec, num_rows, 64)
        weight_OD, weight_D = self.random(spec, 32, 64), self.random(spec, 64)
        q_THE = self.random(spec, num_rows, spec.num_heads, spec.head_dim)
        k_TKE = self.random(spec, num_rows, spec.num_kv_heads, spec.head_dim)
        positions_T = torch.arange(num_rows, device=spec.device)
        return {
            "rms_norm": lambda: kernels.rms_norm(x_TD, weight_D, EPS),
            "add_rms_norm": lambda: kernels.add_rms_norm(x_TD.clone(), x_TD.clone(), weight_D, EPS),
            "linear": lambda: kernels.linear(x_TD, weight_OD, None),
            "linear_silu_mul": lambda: kernels.linear_silu_mul(x_TD, weight_OD),
            "silu_mul": lambda: kernels.silu_mul(x_TD),
            "qk_norm_rope": lambda: kernels.qk_norm_rope(q_THE.clone(), k_TKE.clone(), positions_T, None, None),
        }

    def _watch_operations(self, spec: AttentionSpec) -> None:
        for name, call in self._operations(spec, self.make(spec), 3).items():
            call()  # the first call may compile
            with torch.no_grad(), no_host_sync(f"{name} ({describe(spec)})"):
                call()

    def _watch_attention(self, spec: AttentionSpec, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> None:
        """A step's calls in their order: prepare, then the cache writes and the attention of a layer."""
        kernels = self.make(spec)
        kind = "decode" if batch.num_requests == batch.num_decodes else f"prefill beside {batch.num_decodes} decodes"
        weight_E = self.random(spec, spec.head_dim)
        norm = QKNorm(weight_E, weight_E.flip(0), EPS)
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv_TC = self.random(spec, batch.num_tokens, num_heads * spec.head_dim)
        kv_2NSKE = torch.zeros(2, cache_blocks(spec) + 1, spec.block_size, spec.num_kv_heads, spec.head_dim).to(qkv_TC)
        for watch in (False, True):
            now = replace(batch, scratch={})
            what = (f"{name} of a captured {kind} ({describe(spec)})" for name in ("prepare", "writing", "attend"))
            with torch.no_grad():
                with _watched(next(what), watch):
                    kernels.prepare(now)
                with _watched(next(what), watch):
                    q_THE = kernels.qk_norm_rope_write(qkv_TC.clone(), kv_2NSKE, now, None, norm)
                with _watched(next(what), watch):
                    kernels.attend(q_THE, kv_2NSKE, now, *forms(form))


def _watched(what: str, watch: bool) -> AbstractContextManager[None]:
    return no_host_sync(what) if watch else nullcontext()
