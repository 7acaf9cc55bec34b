"""The part of the kernels' conformance suite (suite.py) that is about AttentionSpec.kv_dtype.

Kernels are held to the dtypes that the author's `kv_dtypes` names: attention over a cache full of such numbers is that
over the same numbers in float64. Legend: as in core/testing/batches.py, C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, QKNorm, Rope
from hookline.core.testing.batches import make_batch, random_cache
from hookline.core.testing.checks import check, check_close
from hookline.core.testing.kernels_suite.cases import (
    AttentionCases,
    cache_blocks,
    describe,
    exact,
    forms,
    num_decodes_of,
    with_window,
)
from hookline.core.testing.plain_kernels import PlainKernels

EPS = 1e-5
ROUNDING = {torch.float8_e4m3fn: (1 / 16, 1 / 512)}
"""How far a number may be from the stored one: as a part of it, half of its last bit, and where that is below the
smallest normal number, as such. Both count twice, since it is rounded to the dtype of activations before."""


class CacheDtypeCases(AttentionCases):
    """Tests of writing and reading a cache in each of `kv_dtypes`."""

    kv_dtypes: ClassVar[Sequence[torch.dtype]] = ()

    def test_attend_to_a_cache_of_another_dtype(self) -> None:
        """Decodes, long enough to be split, chunks, and both; rows that share blocks; windows and forms."""
        for spec in self._specs_in_other_dtypes():
            size, name = spec.block_size, f"a cache in {str(spec.kv_dtype).removeprefix('torch.')}"
            decodes, chunks = [(size + 1, 1), (1, 1), (400, 1)], [(size + 5, 5), (2 * size, size)]
            self.compare(spec, f"decodes of {name}", decodes)
            self.compare(spec, f"chunks of {name}", chunks, num_decodes=0)
            self.compare(spec, f"a mixed step of {name}", [*decodes, *chunks], num_decodes=len(decodes))
            form = self.form(spec, "scale", "softcap", "sinks")
            lengths, window = [*decodes, *chunks], self.window(size + 2)
            self.compare(spec, f"{name}, in forms", lengths, len(decodes), window=window, form=form)
            rows = self.scattered(spec, [(2 * size + 1, 1), (2 * size + 5, 1), (3 * size + 2, 1)], num_shared=2)
            q_THE, kv_2NSKE = self.inputs(spec, rows)
            batch = make_batch(rows, spec, num_decodes=3)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_2NSKE.double(), batch)
            shared_lens_B = torch.full((3,), 2 * size, dtype=torch.int32, device=spec.device)
            out_THE = self.attend(spec, q_THE, kv_2NSKE, replace(batch, shared_lens_B=shared_lens_B))
            what = f"attend of rows that share blocks of {name} ({describe(spec)})"
            check_close(what, out_THE, expected, self.tolerance(spec, "attend"))

    def test_qkv_attend_writes_a_cache_of_another_dtype(self) -> None:
        """Each key and value is rounded to a neighbour and clamped to the largest number; attention reads the rounded
        values; no other slot changes.
        """
        for spec in self._specs_in_other_dtypes():
            size = spec.block_size
            for lengths in ([(1, 1), (5, 1), (size + 1, 1)], [(size + 1, 1), (size + 4, 4)]):
                self._check_written(spec, lengths, None, PLAIN_ATTENTION)
                self._check_written(spec, lengths, self.window(size), self.form(spec, "sinks"))

    def _check_written(
        self, spec: AttentionSpec, lengths: Sequence[tuple[int, int]], window: int | None, form: AttentionForm
    ) -> None:
        assert spec.kv_dtype is not None
        rows = self.scattered(spec, lengths)
        batch = make_batch(rows, spec, num_decodes=num_decodes_of(lengths))
        batch = batch if window is None else with_window(batch, rows, spec, window)
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv_TC = self.random(spec, batch.num_tokens, num_heads * spec.head_dim)
        limit = torch.finfo(spec.kv_dtype).max
        qkv_TC[:, -1] = torch.where(
            qkv_TC[:, -1] < 0, -2 * limit, 2 * limit
        )  # a value that no number is large enough for
        generator = torch.Generator().manual_seed(3)
        rope = Rope(torch.rand(spec.max_model_len, spec.head_dim, generator=generator).mul_(2).sub_(1).to(spec.device))
        weight_E = torch.linspace(0.5, 1.5, spec.head_dim).to(spec.device, spec.dtype)
        norm = QKNorm(weight_E, weight_E.flip(0), EPS)
        cache = random_cache(spec, cache_blocks(spec), seed=4, num_layers=2)
        before, kv_2NSKE = cache.double(), cache[:, 1]
        exact_2NSKE, reference = before[:, 1].clone(), PlainKernels(None, exact(spec))
        q_THE = reference.qk_norm_rope_write(qkv_TC.double(), exact_2NSKE, batch, rope, norm)
        kernels = self.make_poisoned(spec)
        with torch.inference_mode():
            kernels.prepare(batch)
            out_THE = kernels.qkv_attend(qkv_TC.clone(), kv_2NSKE, batch, rope, norm, *forms(form))
        what = f"qkv_attend of a cache in {str(spec.kv_dtype).removeprefix('torch.')} ({describe(spec)})"
        after, (part, least) = cache.double(), ROUNDING[spec.kv_dtype]
        check(torch.equal(after[:, 0], before[:, 0]), f"{what} wrote to another layer")
        wanted_2NSKE = exact_2NSKE.clamp(-limit, limit)
        is_close = (after[:, 1] - wanted_2NSKE).abs() <= 2 * (part * wanted_2NSKE.abs() + least)
        check(bool(is_close.all()), f"{what} wrote numbers that are not the nearest ones")
        is_old = torch.ones(cache.shape[2] * spec.block_size, dtype=torch.bool, device=spec.device)
        is_old[batch.slot_mapping_T] = False
        old_and_new = (each[:, 1].flatten(1, 2)[:, is_old] for each in (before, after))
        check(torch.equal(*old_and_new), f"{what} wrote to slots of no new token")
        expected = reference.attend(q_THE, after[:, 1], batch, form)
        # The largest values of opposite signs cancel, the errors of their weights do not: an error counts beside the
        # sum of the parts' sizes.
        sizes_2NSKE = torch.stack((after[0, 1], after[1, 1].abs()))
        sizes_THE = reference.attend(q_THE, sizes_2NSKE, batch, form).clamp_(min=1)
        check_close(what, out_THE / sizes_THE, expected / sizes_THE, self.tolerance(spec, "attend"))

    def _specs_in_other_dtypes(self) -> Iterator[AttentionSpec]:
        for kv_dtype in self.kv_dtypes:
            yield from (replace(spec, kv_dtype=kv_dtype) for spec in self.specs(groups=self.groups[-1:]))
