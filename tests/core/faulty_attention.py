"""Kernels with one planted fault each in what attention may do beyond the plain one, and in partial rotation.

What the conformance suite must say of them is below. Legend: as in core/contracts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import ATTENTION_FEATURES, AttentionForm, AttentionSpec, Batch, QKNorm, Rope
from hookline.core.testing.plain_kernels import PlainKernels
from tests.core.faulty_kernels import DenseKernels


class PlainForms(PlainKernels):
    """No fault, and held to every feature."""

    attention = ATTENTION_FEATURES


class FaultyWindow(PlainForms):
    """Attends within the window that `seen` makes of the right one."""

    def seen(self, batch: Batch) -> int | None:
        return batch.window

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        return super().attend(q_THE, kv_2NSKE, replace(batch, window=self.seen(batch)), *form)


class IgnoresTheWindow(FaultyWindow):
    def seen(self, batch: Batch) -> int | None:
        return None


class SeesOneTokenBeforeTheWindow(FaultyWindow):
    def seen(self, batch: Batch) -> int | None:
        return None if batch.window is None else batch.window + 1


class SeesOneTokenOfTheWindowTooFew(FaultyWindow):
    def seen(self, batch: Batch) -> int | None:
        return None if batch.window is None else max(1, batch.window - 1)


class RoundsTheWindowToBlocks(FaultyWindow):
    def seen(self, batch: Batch) -> int | None:
        size = self.spec.block_size
        return None if batch.window is None else -(-batch.window // size) * size


class CountsTheWindowFromTheFirstQuery(PlainForms):
    """All queries of a chunk see what the first one sees, and what comes after it."""

    def attend_row(
        self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, window: int | None, form: AttentionForm
    ) -> Tensor:
        return super().attend_row(q_QHE, k_LKE, v_LKE, window and window + len(q_QHE) - 1, form)


class WeighsWhatLiesBeforeTheWindow(PlainForms):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        out_THE = super().attend(q_THE, kv_2NSKE, batch, *form)
        return (
            out_THE if batch.window is None else out_THE + 1e-3 * kv_2NSKE[-1, batch.block_table_BM[:, 0].long()].mean()
        )


class TakesTheFirstNumbersForValues(PlainForms):
    """Of keys alone, values are the last ones."""

    def read_row(self, kv_2NSKE: Tensor, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        k_LKE, v_LKE = super().read_row(kv_2NSKE, batch, row)
        return k_LKE, v_LKE if len(kv_2NSKE) == 2 else k_LKE[..., : self.spec.out_dim]


class ClearsTheSlotBehindALatent(PlainForms):
    """As if a value lay there."""

    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        super().write_kv(k_TKE, v_TKE, kv_2NSKE, slot_mapping_T)
        if len(kv_2NSKE) == 1:
            kv_2NSKE.flatten(1, 2)[0, slot_mapping_T + 1] = 0


class KeepsItsWindow(PlainForms):
    """Of several batches of a step it attends within the window of the one that was prepared last."""

    def prepare(self, batch: Batch) -> None:
        self.window = batch.window

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        return super().attend(q_THE, kv_2NSKE, replace(batch, window=self.window), *form)


class KeepsBatchesWithoutLengthsByTheirSize(PlainForms):
    """Captured steps, that is: the batch that was prepared last of each size."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.batches: dict[int, Batch] = {}

    def prepare(self, batch: Batch) -> None:
        self.batches[batch.num_requests] = batch

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        kept = self.batches[batch.num_requests] if batch.context_lens_host is None else batch
        return super().attend(q_THE, kv_2NSKE, kept, *form)


class WindowsNeedLengthsOnTheHost(PlainForms):
    def prepare(self, batch: Batch) -> None:
        assert batch.window is None or batch.context_lens_host is not None, "the lengths are not on the host"


class WaitsForTheStartOfTheWindow(DenseKernels):
    def prepare(self, batch: Batch) -> None:
        if batch.window is not None:
            batch.scratch["first"] = int((batch.context_lens_B - batch.window).min())


class CapturedPromptsHaveNoWindow(DenseKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        window = None if batch.query_starts_host is None else batch.window
        return super().attend(q_THE, kv_2NSKE, replace(batch, window=window), *form)


class FaultyForm(PlainForms):
    """Attends in the form that `changed` makes of the right one."""

    def changed(self, form: AttentionForm) -> AttentionForm:
        return form

    def attend_row(
        self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, window: int | None, form: AttentionForm
    ) -> Tensor:
        return super().attend_row(q_QHE, k_LKE, v_LKE, window, self.changed(form))


class IgnoresTheScale(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return replace(form, scale=None)


class IgnoresTheCap(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return replace(form, softcap=None)


class CapsBeforeTheScale(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return form if form.softcap is None else replace(form, softcap=form.softcap * self.spec.scale)


class IgnoresTheSinks(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return replace(form, sinks_H=None)


class ScalesTheSinks(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return form if form.sinks_H is None else replace(form, sinks_H=form.sinks_H * self.spec.scale)


class CountsTheSinksTwice(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return form if form.sinks_H is None else replace(form, sinks_H=form.sinks_H + 0.69)


class GivesHeadsEachOthersSinks(FaultyForm):
    def changed(self, form: AttentionForm) -> AttentionForm:
        return form if form.sinks_H is None else replace(form, sinks_H=form.sinks_H.flip(0))


class CountsTheSinksOfAPrefixToo(PlainForms):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        if batch.shared_lens_B is not None and form and form[0].sinks_H is not None:
            form = (replace(form[0], sinks_H=form[0].sinks_H + 0.69),)
        return super().attend(q_THE, kv_2NSKE, batch, *form)


class DropsTheFormWhenItFuses(PlainForms):
    def qkv_attend(self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, *rest: Any) -> Tensor:
        rest = rest if batch.num_requests > batch.num_decodes else rest[:2]
        return super().qkv_attend(qkv_TC, kv_2NSKE, batch, *rest)


class FaultyRotation(PlainKernels):
    """Rotates by the table that `changed` makes of a narrow one."""

    def changed(self, table_PR: Tensor) -> Tensor:
        return table_PR

    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        if rope is not None and rope.table_PE.shape[1] < self.spec.head_dim:
            rope = Rope(self.changed(rope.table_PE))
        return super().qk_norm_rope(q_THE, k_TKE, positions_T, rope, norm)


class RotatesAllValues(FaultyRotation):
    def changed(self, table_PR: Tensor) -> Tensor:
        return torch.cat(
            [half.repeat(1, self.spec.head_dim // table_PR.shape[1]) for half in table_PR.chunk(2, -1)], -1
        )


class PairsHalvesOfTheWholeHead(FaultyRotation):
    """As if the frequencies that are left out were zero."""

    def changed(self, table_PR: Tensor) -> Tensor:
        rest = self.spec.head_dim // 2 - table_PR.shape[1] // 2
        cos_PF, sin_PF = table_PR.chunk(2, -1)
        ones_PF = torch.ones(len(table_PR), rest)
        return torch.cat((cos_PF, ones_PF, sin_PF, torch.zeros_like(ones_PF)), -1)


FAULTS = {
    IgnoresTheWindow: "test_attend_decodes_within_windows: attend, decodes within windows of 1",
    SeesOneTokenBeforeTheWindow: "test_attend_decodes_within_windows: attend, decodes within windows of 1",
    SeesOneTokenOfTheWindowTooFew: "test_attend_decodes_within_windows: attend, decodes within windows of 15",
    RoundsTheWindowToBlocks: "test_attend_mixed_batches_within_windows: attend, a mixed step, windows of 9",
    CountsTheWindowFromTheFirstQuery: "test_attend_chunks_within_windows: attend, chunks within windows of 1",
    WeighsWhatLiesBeforeTheWindow: "test_attend_ignores_what_lies_before_a_window: attend with garbage before windows",
    TakesTheFirstNumbersForValues: "test_latent_attend_decodes_chunks_and_mixed_steps: attend, decodes over keys alone",
    ClearsTheSlotBehindALatent: "test_latent_qk_norm_rope_write: the cache after qk_norm_rope_write",
    KeepsItsWindow: "test_all_batches_of_a_step_are_prepared_before_one_attends: "
    "attend of batch 2 of a step of 3, all prepared before, decodes",
    KeepsBatchesWithoutLengthsByTheirSize: "test_all_batches_of_a_step_are_prepared_before_one_attends: "
    "all prepared before, decodes without lengths on the host",
    WindowsNeedLengthsOnTheHost: "test_attend_decodes_in_every_form_as_a_captured_graph_lays_them_out: "
    "the lengths are not on the host",
    WaitsForTheStartOfTheWindow: "test_what_a_graph_captures_never_waits_for_the_host: "
    "waits for the device: Tensor.__int__ in faulty_attention.py:",
    CapturedPromptsHaveNoWindow: "test_attend_computes_every_form_of_mixed_steps_as_a_captured_graph_lays_them_out: "
    "attend of prompts and decodes within 9 as a graph captures them",
    IgnoresTheScale: "test_attend_with_a_scale_of_its_own: attend, decodes with scale",
    IgnoresTheCap: "test_attend_with_capped_scores: attend, decodes with softcap",
    CapsBeforeTheScale: "test_attend_with_capped_scores: attend, decodes with softcap",
    IgnoresTheSinks: "test_attend_with_sinks: attend, decodes with sinks",
    ScalesTheSinks: "test_attend_with_sinks: attend, decodes with sinks",
    CountsTheSinksTwice: "test_attend_with_sinks: attend, decodes with sinks",
    GivesHeadsEachOthersSinks: "test_attend_with_sinks: attend, decodes with sinks",
    CountsTheSinksOfAPrefixToo: "test_attend_decodes_told_of_a_shared_prefix_in_every_form: "
    "attend with scale, sinks, softcap of decodes told of a shared prefix",
    DropsTheFormWhenItFuses: "test_qkv_attend_in_every_form: qkv_attend within a window of",
    RotatesAllValues: "test_qk_norm_rope: q of qk_norm_rope with norm and rope of a quarter of each head",
    PairsHalvesOfTheWholeHead: "test_qk_norm_rope: q of qk_norm_rope with norm and rope of a quarter of each head",
}
