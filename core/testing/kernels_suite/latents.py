"""The part of the kernels' conformance suite (suite.py) that is about values that are a part of the keys ("latent").

There is one kv head, as of multi-head latent attention in its absorbed form, and the cache holds keys alone. Legend: as
in core/testing/batches.py, H heads, E head dim of the keys, F of the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

import torch

from hookline.core.contracts import ATTENTION_FEATURES, AttentionSpec, Kernels, Rope
from hookline.core.testing.batches import Row, make_batch, random_cache, seen_slots
from hookline.core.testing.checks import PoisonedMemory, check, check_close
from hookline.core.testing.kernels_suite.attention import FAR_OUT
from hookline.core.testing.kernels_suite.cases import cache_blocks, describe, exact
from hookline.core.testing.kernels_suite.graphs import GraphSuite
from hookline.core.testing.plain_kernels import PlainKernels


class LatentCases(GraphSuite):
    """Tests of kernels that declare "latent". latent_dims: pairs of how many numbers of a key are rotated, and F.

    latent_heads: numbers of query heads.
    """

    latent_dims: ClassVar[Sequence[tuple[int, int]]] = ((16, 40),)
    latent_heads: ClassVar[Sequence[int]] = (4, 1, 20)

    def test_latent_attend_decodes_chunks_and_mixed_steps(self) -> None:
        """Rows around block boundaries, and whole prompts; each alone and beside the other."""
        for spec in self._latent_specs():
            size = spec.block_size
            decodes = [(size + 1, 1), (1, 1), (2 * size + 3, 1)]
            chunks = [(size + 5, 5), (2 * size + 2, size + 2), (3, 3)]
            self.compare(spec, "decodes over keys alone", decodes)
            self.compare(spec, "chunks over keys alone", chunks, num_decodes=0)
            self.compare(spec, "a mixed step over keys alone", decodes + chunks, num_decodes=3)

    def test_latent_attend_long_and_many_contexts(self) -> None:
        """Long enough to be worth splitting, and many rows of very different lengths."""
        for spec in self._latent_specs(self.latent_heads[:1]):
            self.compare(spec, "one decode of 390 tokens over keys alone", [(390, 1)])
            self.compare(spec, "a chunk of 40 tokens of 200 over keys alone", [(200, 40)], num_decodes=0)
            lengths = [(1 + 7 * row % 24, 1) for row in range(33)]
            self.compare(spec, "33 decodes over keys alone", lengths)

    def test_latent_attend_in_every_form(self) -> None:
        """With all other ATTENTION_FEATURES that the kernels declare, in a mixed step."""
        for spec in self._latent_specs(self.latent_heads[:1]):
            size, window = spec.block_size, self.window(spec.block_size + 2)
            lengths = [(size + 1, 1), (2 * size + 3, 1), (3 * size + 3, size), (size + 5, 5)]
            form = self.form(spec, *ATTENTION_FEATURES)
            self.compare(spec, "a mixed step over keys alone, in a form", lengths, 2, window=window, form=form, slack=2)

    def test_latent_attend_ignores_other_slots(self) -> None:
        """Finite garbage in all slots that no row's context occupies."""
        for spec in self._latent_specs(self.latent_heads[:1]):
            size = spec.block_size
            rows = self.scattered(spec, [(2 * size + 3, 1), (3, 1), (size + 4, 4)])
            q_THE, kv_1NSKE = self.inputs(spec, rows)
            dirty, seen = torch.full_like(kv_1NSKE, FAR_OUT), seen_slots(rows, size)
            dirty.flatten(1, 2)[:, seen] = kv_1NSKE.flatten(1, 2)[:, seen]
            batch = make_batch(rows, spec, num_decodes=2)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_1NSKE.double(), batch)
            what = f"attend over keys alone with garbage beside them ({describe(spec)})"
            check_close(what, self.attend(spec, q_THE, dirty, batch), expected, self.tolerance(spec, "attend"))

    def test_latent_attend_as_captured_graphs_lay_steps_out(self) -> None:
        """Decodes without lengths on the host, beside padding rows; and steps with prompts if those are captured."""
        for spec in self._latent_specs(self.latent_heads[:1]) if self.captured_decodes else ():
            size, scratch = spec.block_size, cache_blocks(spec)
            rows = self.scattered(spec, [(size + 1, 1), (3, 1), (2 * size, 1)])
            padded = [*rows, Row(1, 1, (scratch,) * 4)]
            q_THE, kv_1NSKE = self.inputs(spec, padded)
            batch = make_batch(padded, spec, num_decodes=4, filler=scratch)
            expected = PlainKernels(None, exact(spec)).attend(q_THE.double(), kv_1NSKE.double(), batch)
            captured = replace(batch, context_lens_host=None, max_context_len=4 * size, scratch={})
            actual = self.attend(spec, q_THE, kv_1NSKE, captured)
            what = f"attend over keys alone without lengths on the host ({describe(spec)})"
            check_close(what, actual[:3], expected[:3], self.tolerance(spec, "attend"))
            for num_decodes in (0, 2) if self.graph_prefill else ():
                self._attend_captured(spec, num_decodes)

    def test_latent_qk_norm_rope_write(self) -> None:
        """Queries and keys are rotated, keys alone written, in their slots and nowhere else; qkv_attend does both."""
        for spec in self._latent_specs():
            rotated = spec.head_dim - spec.out_dim
            for rope in [None, _rotation(spec, rotated)] if rotated else [None]:
                self._check_write(spec, self.make_poisoned(spec), rope)

    def _check_write(self, spec: AttentionSpec, kernels: Kernels, rope: Rope | None) -> None:
        size = spec.block_size
        for lengths, num_decodes in (([(5, 1), (size + 1, 1)], 2), ([(5, 1), (size + 4, 4)], 1)):
            rows = self.scattered(spec, lengths)
            batch = make_batch(rows, spec, num_decodes=num_decodes)
            qkv_TC = self.random(spec, batch.num_tokens, (spec.num_heads + 1) * spec.head_dim)
            cache = random_cache(spec, cache_blocks(spec), seed=3, num_layers=2)
            plain, expected = PlainKernels(None, exact(spec)), cache.double()
            wanted_THE = plain.qk_norm_rope_write(qkv_TC.double(), expected[:, 1], batch, rope, None)
            with PoisonedMemory():
                actual, q_THE = cache.clone(), None
                q_THE = kernels.qk_norm_rope_write(qkv_TC.clone(), actual[:, 1], batch, rope, None)
                fused = cache.clone()
                kernels.prepare(batch)
                out_THF = kernels.qkv_attend(qkv_TC.clone(), fused[:, 1], batch, rope, None)
            what = f"{'with' if rope else 'without'} rotation, keys alone ({describe(spec)})"
            tolerance = self.tolerance(spec, "qk_norm_rope_write")
            check_close(f"the queries of qk_norm_rope_write {what}", q_THE, wanted_THE, tolerance)
            written = torch.zeros(cache.shape[2] * size, dtype=torch.bool)
            written[batch.slot_mapping_T.cpu()] = True
            for name, found in (("qk_norm_rope_write", actual), ("qkv_attend", fused)):
                check_close(f"the cache after {name} {what}", found, expected, tolerance)
                others = found.flatten(2, 3)[:, :, ~written], cache.flatten(2, 3)[:, :, ~written]
                check(torch.equal(*others), f"{name} {what} wrote to other slots than the step's")
                check(torch.equal(found[:, 0], cache[:, 0]), f"{name} {what} wrote to another layer's cache")
            attended = plain.attend(wanted_THE, expected[:, 1], batch)
            check_close(f"qkv_attend {what}", out_THF, attended, 2 * self.tolerance(spec, "qkv_attend"))

    def _latent_specs(self, heads: Sequence[int] | None = None) -> Iterator[AttentionSpec]:
        """Every combination of the author's dtypes, block sizes and latents; none if "latent" is not declared."""
        if "latent" not in self.attention:
            return
        base = next(iter(self.specs()))
        sizes = product(self.dtypes, self.block_sizes, self.latent_dims, self.latent_heads if heads is None else heads)
        for dtype, block_size, (rotated, value_dim), num_heads in sizes:
            yield replace(
                base,
                num_heads=num_heads,
                num_kv_heads=1,
                head_dim=rotated + value_dim,
                value_dim=value_dim,
                dtype=dtype,
                block_size=block_size,
            )


def _rotation(spec: AttentionSpec, num_rotated: int) -> Rope:
    """Of the first numbers of a key."""
    frequency_F = 50.0 ** -torch.linspace(0, 1, num_rotated // 2)
    angle_PF = torch.outer(torch.arange(float(spec.max_model_len)), frequency_F)
    return Rope(torch.cat((angle_PF.cos(), angle_PF.sin()), -1).to(spec.device))
