"""The part of the kernels' conformance suite (suite.py) that is about values that are a part of the keys ("latent").

There is one kv head, as of multi-head latent attention in its absorbed form, and the cache holds keys alone. Legend: as
in core/testing/batches.py, H heads, E head dim of the keys, F of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import ATTENTION_FEATURES, AttentionSpec, Kernels, Rope
from hookline.core.testing.batches import Row, make_batch, random_cache, seen_slots
from hookline.core.testing.checks import PoisonedMemory, check, check_close, check_form, check_unchanged
from hookline.core.testing.kernels_suite.attention import FAR_OUT
from hookline.core.testing.kernels_suite.attention_forms import named
from hookline.core.testing.kernels_suite.cases import cache_blocks, describe, exact, num_decodes_of, with_window
from hookline.core.testing.kernels_suite.graphs import GraphSuite
from hookline.core.testing.plain_kernels import PlainKernels

EPS = 1e-6


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

    def test_latent_qkv_attend_in_every_form(self) -> None:
        """With all other ATTENTION_FEATURES that the kernels declare, down to windows of the newest token alone."""
        for spec in self._latent_specs(self.latent_heads[:1]):
            size, form, rotated = spec.block_size, self.form(spec, *ATTENTION_FEATURES), spec.head_dim - spec.out_dim
            rope = _rotation(spec, rotated) if rotated else None
            for lengths in ([(1, 1), (size + 1, 1), (2 * size - 1, 1)], [(390, 1)], [(size + 1, 1), (size + 4, 4)]):
                rows, num_decodes = self.scattered(spec, lengths), num_decodes_of(lengths)
                plain_batch = make_batch(rows, spec, num_decodes=num_decodes)
                qk_TC = self.random(spec, plain_batch.num_tokens, (spec.num_heads + 1) * spec.head_dim)
                cache = random_cache(spec, cache_blocks(spec), seed=3)[:, 0]
                for window in {None, self.window(1), self.window(size + 1)}:
                    batch = plain_batch if window is None else with_window(plain_batch, rows, spec, window)
                    plain, exact_cache, kernels = PlainKernels(None, exact(spec)), cache.double(), self.make(spec)
                    expected = plain.qkv_attend(qk_TC.double(), exact_cache, batch, rope, None, form)
                    with PoisonedMemory():
                        written, batch = cache.clone(), replace(batch, scratch={})
                        kernels.prepare(batch)
                        actual = kernels.qkv_attend(qk_TC.clone(), written, batch, rope, None, form)
                    what = f"over keys alone within a window of {window} with {named(form)} ({describe(spec)})"
                    check_close(f"qkv_attend {what}", actual, expected, 2 * self.tolerance(spec, "qkv_attend"))
                    tolerance = self.tolerance(spec, "qk_norm_rope_write")
                    check_close(f"the cache after qkv_attend {what}", written, exact_cache, tolerance)

    def test_latent_queries_keys(self) -> None:
        """Of tokens that lie apart, rotated numbers paired by halves and with their neighbours; inputs stay."""
        for spec in self._latent_specs():
            rotated, value_dim, kept = spec.head_dim - spec.out_dim, spec.out_dim, list[Tensor]()
            for num_tokens, plain_dim, interleaved in ((1, 24, True), (5, 16, False), (21, 24, True), (70, 16, False)):
                num_q, num_latent = spec.num_heads * (plain_dim + rotated), value_dim + rotated
                x_TC, plain = self.random(spec, num_tokens, num_q + num_latent + 8), PlainKernels(None, exact(spec))
                q_THC = x_TC[:, :num_q].view(num_tokens, spec.num_heads, -1)
                latent_TE = x_TC[:, num_q : num_q + num_latent]
                up_HOL = self._matrices(spec, plain_dim + 8, value_dim)
                kept += [up_HOL, weight_L := 1 + 0.3 * self.random(spec, value_dim).roll(num_tokens)]
                given, others = (q_THC, latent_TE, up_HOL[:, :plain_dim]), (weight_L, EPS, interleaved)
                q64_THC, latent64_TE, keys64_HPL = (one.double() for one in given)
                expected_TC = plain.latent_queries_keys(q64_THC, latent64_TE, keys64_HPL, *others)
                before_TC = x_TC.clone()
                with PoisonedMemory():
                    actual_TC = self.make(spec).latent_queries_keys(*given, *others)
                what = f"latent_queries_keys of {num_tokens} tokens, interleaved={interleaved} ({describe(spec)})"
                check_form(what, actual_TC, expected_TC.shape, spec.dtype)
                check_close(what, actual_TC, expected_TC, self.tolerance(spec, "latent_queries_keys"))
                check_unchanged("what latent_queries_keys was given", before_TC, x_TC)

    def test_heads_linear(self) -> None:
        """Heads one behind the other, and apart; each has its own matrix, a part of a larger one."""
        for spec in self._latent_specs():
            for num_tokens, num_out, is_apart in ((1, 24, False), (5, 16, True), (21, 24, False), (70, 40, True)):
                wide_THI = self.random(spec, num_tokens, spec.num_heads, spec.out_dim + 8)
                x_THI = wide_THI[..., 8:] if is_apart else wide_THI[..., 8:].contiguous()
                weight_HOI = self._matrices(spec, num_out + 8, spec.out_dim)[:, 8:]
                expected_TC = PlainKernels(None, exact(spec)).heads_linear(x_THI.double(), weight_HOI.double())
                before_THI = x_THI.clone()
                with PoisonedMemory():
                    actual_TC = self.make(spec).heads_linear(x_THI, weight_HOI)
                what = f"heads_linear of {num_tokens} tokens to {num_out} features ({describe(spec)})"
                check_form(what, actual_TC, expected_TC.shape, spec.dtype)
                check_close(what, actual_TC, expected_TC, self.tolerance(spec, "heads_linear"))
                check_unchanged("what heads_linear was given", before_THI, x_THI)

    def _matrices(self, spec: AttentionSpec, num_rows: int, num_columns: int) -> Tensor:
        """A matrix for each head, of numbers that leave products about as large as what is multiplied."""
        return self.random(spec, spec.num_heads, num_rows, num_columns) / math.sqrt(num_columns)

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
