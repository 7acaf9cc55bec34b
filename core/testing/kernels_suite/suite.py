"""The conformance suite of kernels: subclass it in your tests and return your kernels from `make`.

Everything is compared with core/testing/plain_kernels, in float64, on inputs rounded to the dtype under test. It says
nothing about speed. Legend: T tokens, D hidden, O output features, F half of gate and up, H heads, K kv heads,
E head dim, N blocks, S block size, C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from hookline.core.contracts import (
    ATTENTION_FEATURES,
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    Kernels,
    Needs,
    QKNorm,
    Rope,
    is_offered,
)
from hookline.core.testing.batches import make_batch, random_cache, scatter_rows
from hookline.core.testing.checks import (
    PoisonedMemory,
    check,
    check_close,
    check_contract,
    check_form,
    check_unchanged,
)
from hookline.core.testing.kernels_suite.attention import AttentionSuite
from hookline.core.testing.kernels_suite.attention_forms import AttentionFormSuite, named
from hookline.core.testing.kernels_suite.cache_dtypes import CacheDtypeCases
from hookline.core.testing.kernels_suite.cases import (
    blocks_of,
    describe,
    exact,
    forms,
    largest_step,
    longest_decodes,
    num_decodes_of,
    with_window,
)
from hookline.core.testing.kernels_suite.experts import ExpertCases
from hookline.core.testing.kernels_suite.gates import GateCases
from hookline.core.testing.kernels_suite.graphs import GraphSuite
from hookline.core.testing.kernels_suite.invariance import InvarianceCases
from hookline.core.testing.kernels_suite.latents import LatentCases
from hookline.core.testing.kernels_suite.lifetimes import LifetimeCases
from hookline.core.testing.kernels_suite.recurrent import RecurrentCases
from hookline.core.testing.kernels_suite.request_rows import RequestRowCases
from hookline.core.testing.plain_kernels import PlainKernels

EPS = 1e-5
NUM_BLOCKS = 12
WIDTHS = (64, 96, 1024)
NUM_ROWS = (1, 5, 33)
FEW_ROWS = (1, 2, 3, 4, 5, 33)
LINEAR_SHAPES = ((64, 102), (96, 16), (1024, 66), (3072, 10))
"""Input and output features."""
TRANSPOSED_SHAPE = LINEAR_SHAPES[0]
"""The shape that is also tested with a weight stored transposed."""


class KernelsSuite(
    InvarianceCases,
    LatentCases,
    GraphSuite,
    GateCases,
    RequestRowCases,
    LifetimeCases,
    ExpertCases,
    RecurrentCases,
    CacheDtypeCases,
    AttentionFormSuite,
    AttentionSuite,
):
    """`class TestMyKernels(KernelsSuite): def make(self, spec): return MyKernels(MyConfig(), spec)`.

    Class attributes narrow the tests to the sizes that the kernels support: dtypes, block_sizes, head_dims, groups
    (query heads per kv head), kv_heads (the first in all cases, the others in one of each operation), device;
    max_num_seqs, max_num_batched_tokens and max_model_len, the limits in specs, at which each operation is tested (at
    least 36, 64 and 400, since other cases are that large);
    graph_safe, graph_prefill, sizes_alike, batch_invariant, attention and kv_dtypes (torch dtypes) as in the entry's
    Needs; and captured_decodes (False if decodes need their lengths on the host).
    tolerances: dtype -> largest error relative to 1 + |expected|;
    widen it only with a reason. operation_tolerances: the same for single operations, by their methods' names, as
    {"linear": {torch.bfloat16: 0.05}}; other operations keep theirs. latent_dims, latent_heads: see LatentCases.
    Operations for experts and recurrent states are tested, too, if the kernels have them.
    """

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        spec = next(iter(self.specs()))
        check_contract("kernels", type(self.make(spec)), Needs(attention=tuple(self.attention)))

    def test_tolerances_are_of_operations(self) -> None:
        """The author's `operation_tolerances` name methods of Kernels."""
        for name in self.operation_tolerances:
            known = callable(getattr(Kernels, name, None)) and not name.startswith("_")
            check(known, f"operation_tolerances has {name!r}, which is no operation of Kernels")

    def test_rms_norm(self) -> None:
        """Also for rows so small that eps matters, with weights other than one, of rows not adjacent in memory."""
        for spec, kernels, x_TD, weight_D in self._norm_inputs():
            expected = PlainKernels(None, exact(spec)).rms_norm(x_TD.double(), weight_D, EPS)
            with PoisonedMemory():
                actual = kernels.rms_norm(x_TD.clone(), weight_D, EPS)
            self._check("rms_norm", f"rms_norm of {tuple(x_TD.shape)}", spec, actual, expected)
            if len(x_TD) == NUM_ROWS[1]:
                with PoisonedMemory():
                    actual = kernels.rms_norm(torch.cat((x_TD, x_TD), 1)[:, : x_TD.shape[1]], weight_D, EPS)
                what = f"rms_norm of {tuple(x_TD.shape)} that are not adjacent in memory"
                self._check("rms_norm", what, spec, actual, expected)

    def test_add_rms_norm(self) -> None:
        """Returns (normalised sum, sum), in this order."""
        for spec, kernels, x_TD, weight_D in self._norm_inputs():
            residual_TD = x_TD.flip(0).flip(1) * 0.5
            expected = PlainKernels(None, exact(spec)).add_rms_norm(x_TD.double(), residual_TD.double(), weight_D, EPS)
            with PoisonedMemory():
                actual = kernels.add_rms_norm(x_TD.clone(), residual_TD.clone(), weight_D, EPS)
            check(len(actual) == 2, "add_rms_norm must return (normalised, residual)")
            for part, found, wanted in zip(("norm", "sum"), actual, expected, strict=True):
                what = f"the {part} that add_rms_norm of {tuple(x_TD.shape)} returns"
                self._check("add_rms_norm", what, spec, found, wanted)

    def test_silu_mul(self) -> None:
        """The first half is the gate."""
        for spec, kernels, gate_up_TF, _ in self._norm_inputs():
            expected = PlainKernels(None, exact(spec)).silu_mul(gate_up_TF.double() * 4)
            with PoisonedMemory():
                actual = kernels.silu_mul(gate_up_TF * 4)
            self._check("silu_mul", f"silu_mul of {tuple(gate_up_TF.shape)}", spec, actual, expected)

    def test_gelu_tanh_mul(self) -> None:
        """As silu_mul; kernels without it pass."""
        for spec, kernels, gate_up_TF, _ in self._norm_inputs():
            if is_offered(kernels.gelu_tanh_mul):
                expected = PlainKernels(None, exact(spec)).gelu_tanh_mul(gate_up_TF.double() * 2)
                with PoisonedMemory():
                    actual = kernels.gelu_tanh_mul(gate_up_TF * 2)
                self._check("gelu_tanh_mul", f"gelu_tanh_mul of {tuple(gate_up_TF.shape)}", spec, actual, expected)

    def test_norms_take_weights_of_float32(self) -> None:
        """A norm's weight may be float32 whatever the dtype of its input is."""
        for spec, kernels, x_TD, weight_D in self._norm_inputs(of_float32=True):
            plain = PlainKernels(None, exact(spec))
            actual = kernels.rms_norm(x_TD.clone(), weight_D, EPS)
            what = f"rms_norm of {tuple(x_TD.shape)} with a weight of float32"
            self._check("rms_norm", what, spec, actual, plain.rms_norm(x_TD.double(), weight_D, EPS))
            added_TD, _ = kernels.add_rms_norm(x_TD.clone(), x_TD.clone(), weight_D, EPS)
            expected_TD, _ = plain.add_rms_norm(x_TD.double(), x_TD.double(), weight_D, EPS)
            self._check("add_rms_norm", f"the norm of add_rms_norm, as {what}", spec, added_TD, expected_TD)

    def test_linear(self) -> None:
        """For one row, a few and many, with and without a bias, with rows of x that are not adjacent in memory."""
        for spec, kernels, stored, x_TD, weight_OD, bias_O in self._linear_inputs():
            for bias in (None, bias_O):
                expected = PlainKernels(None, exact(spec)).linear(x_TD.double(), weight_OD, bias)
                with PoisonedMemory():
                    actual = _unchanged("linear", kernels.linear, x_TD, weight_OD, bias)
                what = f"linear of {tuple(x_TD.shape)} {'without' if bias is None else 'with'} bias{stored}"
                self._check("linear", what, spec, actual, expected)

    def test_linear_silu_mul(self) -> None:
        """The first half of the weight's rows is the gate; with linear_gelu_tanh_mul, that too."""
        for spec, kernels, stored, x_TD, weight_OD, _ in self._linear_inputs():
            for operation in ("linear_silu_mul", "linear_gelu_tanh_mul"):
                if not is_offered(getattr(kernels, operation)):
                    continue
                expected = getattr(PlainKernels(None, exact(spec)), operation)(x_TD.double(), weight_OD)
                with PoisonedMemory():
                    actual = _unchanged(operation, getattr(kernels, operation), x_TD, weight_OD)
                what = f"{operation} of {tuple(x_TD.shape)}{stored}"
                self._check(operation, what, spec, actual, expected)

    def test_linear_add_rms_norm(self) -> None:
        """Returns (normalised sum, sum), in this order, with and without a bias."""
        kept = []
        for spec, kernels, stored, x_TD, weight_OD, bias_O in self._linear_inputs():
            residual_TO = self.random(spec, len(x_TD), len(weight_OD)) * 2
            kept.append(norm_weight_O := 1.5 - bias_O.flip(0) * 0.2)
            for bias in (None, bias_O):
                plain = PlainKernels(None, exact(spec))
                product_TO = plain.linear(x_TD.double(), weight_OD, bias)
                expected = plain.add_rms_norm(product_TO, residual_TO.double(), norm_weight_O, EPS)
                given = x_TD.clone(), weight_OD, bias, residual_TO.clone(), norm_weight_O, EPS
                with PoisonedMemory():
                    actual = kernels.linear_add_rms_norm(*given)
                what = (
                    f"linear_add_rms_norm of {tuple(x_TD.shape)} {'without' if bias is None else 'with'} bias{stored}"
                )
                check(len(actual) == 2, "linear_add_rms_norm must return (normalised, residual)")
                for part, found, wanted in zip(("norm", "sum"), actual, expected, strict=True):
                    self._check("linear_add_rms_norm", f"the {part} that {what} returns", spec, found, wanted)

    def test_add_parts_rms_norm(self) -> None:
        """Writes the norm to out_TD and the sum to the residual, from parts that are not adjacent in memory."""
        for spec in self.specs():
            kernels, kept = self.make_poisoned(spec), []
            most = ((2, num_tokens, 64) for num_tokens in self.most_tokens(spec))
            shapes = ((2, 5, 48), (4, 1, 256), (3, 33, 64), *most)
            for num_parts, num_rows, width in shapes:
                apart_PTD = self.random(spec, num_parts, num_rows + 2, width)
                parts_PTD, residual_TD = apart_PTD[:, :num_rows], self.random(spec, num_rows, width) * 2
                kept.append(weight_D := (self.random(spec, width) * 0.1 + 1).roll(num_rows))
                expected = PlainKernels(None, exact(spec)).add_rms_norm(
                    parts_PTD.double().sum(0), residual_TD.double(), weight_D, EPS
                )
                out_TD = torch.full_like(residual_TD, torch.nan)
                with PoisonedMemory():
                    kernels.add_parts_rms_norm(parts_PTD, residual_TD, weight_D, EPS, out_TD)
                what = f"add_parts_rms_norm of {tuple(parts_PTD.shape)}"
                self._check("add_parts_rms_norm", f"the norm that {what} writes", spec, out_TD, expected[0])
                left = f"the sum that {what} leaves in the residual"
                self._check("add_parts_rms_norm", left, spec, residual_TD, expected[1])

    def test_qk_norm_rope(self) -> None:
        """With and without norm and rotation, at positions in any order, for layers that differ in both."""
        for spec in self.specs():
            kernels, variants = self.make_poisoned(spec), list(self._variants(spec))
            for variant in variants:
                self._check_qk_norm_rope(spec, kernels, 9, *variant)
            for num_tokens in self.most_tokens(spec):
                self._check_qk_norm_rope(spec, kernels, num_tokens, *variants[0])
        for spec in self.specs_of_other_heads():
            self._check_qk_norm_rope(spec, self.make_poisoned(spec), 9, *next(self._variants(spec)))

    def _check_qk_norm_rope(
        self, spec: AttentionSpec, kernels: Kernels, num_tokens: int, what: str, rope: Rope | None, norm: QKNorm | None
    ) -> None:
        positions_T = self._positions(spec, num_tokens)
        q_THE = self.random(spec, num_tokens, spec.num_heads, spec.head_dim)
        k_TKE = self.random(spec, num_tokens, spec.num_kv_heads, spec.head_dim) * 2
        expected = PlainKernels(None, exact(spec)).qk_norm_rope(q_THE.double(), k_TKE.double(), positions_T, rope, norm)
        with PoisonedMemory():
            actual = kernels.qk_norm_rope(q_THE.clone(), k_TKE.clone(), positions_T, rope, norm)
        for part, found, wanted in zip("qk", actual, expected, strict=True):
            self._check("qk_norm_rope", f"{part} of qk_norm_rope {what} of {num_tokens} tokens", spec, found, wanted)

    def test_write_kv_writes_its_slots_and_nothing_else(self) -> None:
        """Exactly the given values, keys first, in exactly the given slots of one layer."""
        for spec in self.specs():
            for num_tokens in (11, *self.most_tokens(spec)):
                self._check_write_kv(spec, num_tokens)
        for spec in self.specs_of_other_heads():
            self._check_write_kv(spec, 11)

    def _check_write_kv(self, spec: AttentionSpec, num_tokens: int) -> None:
        num_blocks = max(NUM_BLOCKS, num_tokens // spec.block_size + 2)
        cache = random_cache(spec, num_blocks, seed=4, num_layers=3)
        slot_mapping_T = self._positions(spec, num_tokens, below=num_blocks * spec.block_size)
        k_TKE = self.random(spec, num_tokens, spec.num_kv_heads, spec.head_dim)
        v_TKE = k_TKE.flip(0) + 1
        expected = cache.clone()
        PlainKernels(None, spec).write_kv(k_TKE, v_TKE, expected[:, 1], slot_mapping_T)
        self.make(spec).write_kv(k_TKE, v_TKE, cache[:, 1], slot_mapping_T)
        self._check_cache(f"write_kv of {num_tokens} tokens", spec, cache, expected, 0.0)

    def test_qk_norm_rope_write(self) -> None:
        """The fused operation has the results of its two parts, over decodes and chunks."""
        for spec in self.specs():
            lengths = [(5, 1), (spec.block_size + 1, 1), (spec.block_size + 4, 4)]
            kernels, variants = self.make_poisoned(spec), list(self._variants(spec))
            for variant in variants:
                self._check_qk_norm_rope_write(spec, kernels, lengths, *variant)
            if self.most_tokens(spec):
                self._check_qk_norm_rope_write(spec, kernels, largest_step(spec), *variants[0])
        for spec in self.specs_of_other_heads():
            lengths = [(5, 1), (spec.block_size + 4, 4)]
            self._check_qk_norm_rope_write(spec, self.make_poisoned(spec), lengths, *next(self._variants(spec)))

    def _check_qk_norm_rope_write(
        self,
        spec: AttentionSpec,
        kernels: Kernels,
        lengths: Sequence[tuple[int, int]],
        what: str,
        rope: Rope | None,
        norm: QKNorm | None,
    ) -> None:
        num_blocks = max(NUM_BLOCKS, blocks_of(spec, lengths))
        rows = scatter_rows(lengths, spec.block_size, num_blocks, seed=0)
        batch = make_batch(rows, spec, num_decodes=num_decodes_of(lengths))
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv_TC = self.random(spec, batch.num_tokens, num_heads * spec.head_dim)
        cache = random_cache(spec, num_blocks, seed=4, num_layers=3)
        exact_cache, reference = cache.double(), PlainKernels(None, exact(spec))
        expected = reference.qk_norm_rope_write(qkv_TC.double(), exact_cache[:, 1], batch, rope, norm)
        kernels.prepare(batch)
        with PoisonedMemory():
            actual = kernels.qk_norm_rope_write(qkv_TC.clone(), cache[:, 1], batch, rope, norm)
        what = f"qk_norm_rope_write {what} of {batch.num_tokens} tokens"
        self._check("qk_norm_rope_write", f"q of {what}", spec, actual, expected)
        self._check_cache(what, spec, cache, exact_cache, self.tolerance(spec, "qk_norm_rope_write"))

    def test_qkv_attend(self) -> None:
        """Attends and writes as the two parts would, over decodes alone and with chunks."""
        for spec in self.specs():
            decodes = [(1, 1), (5, 1), (spec.block_size + 1, 1), (2 * spec.block_size, 1)]
            kernels, variants = self.make_poisoned(spec), list(self._variants(spec))
            for lengths in (decodes, [*decodes[1:3], (spec.block_size + 4, 4)]):
                for what, rope, norm in variants:
                    batch = _batch(spec, lengths)
                    self._check_qkv_attend(f"qkv_attend {what}", spec, kernels, batch, rope, norm)
            for lengths in (longest_decodes(spec), largest_step(spec)) if self.most_tokens(spec) else ():
                batch, (what, rope, norm) = _batch(spec, lengths), variants[0]
                self._check_qkv_attend(f"qkv_attend {what}", spec, kernels, batch, rope, norm)
        for spec in self.specs_of_other_heads():
            kernels, (what, rope, norm) = self.make_poisoned(spec), next(self._variants(spec))
            for lengths in ([(5, 1), (spec.block_size + 1, 1)], [(5, 1), (spec.block_size + 4, 4)]):
                batch = _batch(spec, lengths)
                self._check_qkv_attend(f"qkv_attend {what}", spec, kernels, batch, rope, norm)

    def test_qkv_attend_in_every_form(self) -> None:
        """The same with all ATTENTION_FEATURES that the kernels declare, down to windows of the newest token alone."""
        for spec in self.specs() if self.attention else ():
            size = spec.block_size
            form, (_, rope, norm) = self.form(spec, *ATTENTION_FEATURES), next(self._variants(spec))
            decodes = [(1, 1), (5, 1), (size + 1, 1), (2 * size - 1, 1)]
            for lengths in (decodes, [*decodes[1:3], (size + 4, 4)]):
                rows = scatter_rows(lengths, size, NUM_BLOCKS, seed=1)
                batch = make_batch(rows, spec, num_decodes=sum(row.num_queries == 1 for row in rows))
                for window in {self.window(1), self.window(size + 1), self.window(2 * size)}:
                    seen = batch if window is None else with_window(batch, rows, spec, window, scratch=NUM_BLOCKS)
                    what = f"qkv_attend within a window of {window} with {named(form)}"
                    self._check_qkv_attend(what, spec, self.make(spec), replace(seen, scratch={}), rope, norm, form)

    def _check_qkv_attend(
        self,
        what: str,
        spec: AttentionSpec,
        kernels: Kernels,
        batch: Batch,
        rope: Rope | None,
        norm: QKNorm | None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> None:
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv_TC = self.random(spec, batch.num_tokens, num_heads * spec.head_dim)
        num_blocks = max(NUM_BLOCKS, int(batch.block_table_BM.max()))
        cache = random_cache(spec, num_blocks, seed=4, num_layers=3)
        exact_cache, reference = cache.double(), PlainKernels(None, exact(spec))
        q_THE = reference.qk_norm_rope_write(qkv_TC.double(), exact_cache[:, 1], batch, rope, norm)
        expected = reference.attend(q_THE, exact_cache[:, 1], batch, form)
        kernels.prepare(batch)
        with PoisonedMemory():
            actual = kernels.qkv_attend(qkv_TC.clone(), cache[:, 1], batch, rope, norm, *forms(form))
        self._check("qkv_attend", f"what {what} of {batch.num_requests} rows returns", spec, actual, expected)
        self._check_cache(what, spec, cache, exact_cache, self.tolerance(spec, "qkv_attend"))

    def _norm_inputs(self, of_float32: bool = False) -> Iterator[tuple[AttentionSpec, Kernels, Tensor, Tensor]]:
        """One kernels object, with rows of very different size, some of them zeros, and different weights around 1."""
        for spec in self.specs(self.groups[:1]):
            kernels, kept = self.make_poisoned(spec), []
            for num_rows, width in (*product(NUM_ROWS, WIDTHS), *product(self.most_tokens(spec), WIDTHS[:1])):
                size_T1 = torch.logspace(-4, 0.5, num_rows, device=spec.device).unsqueeze(1)
                x_TD = self.random(spec, num_rows, width) * size_T1.to(spec.dtype)
                weight_D = 1 + 0.5 * self.random(spec, width).roll(num_rows)
                kept.append(weight_D.float() + 1 / 512 if of_float32 else weight_D)  # kernels may know it by address
                yield spec, kernels, x_TD, kept[-1]

    def _linear_inputs(self) -> Iterator[tuple[AttentionSpec, Kernels, str, Tensor, Tensor, Tensor]]:
        """Inputs of products with results around 1, of each number of rows that may have its own kernel, one object.

        All weights are different. The string says whether a weight is stored transposed.
        """
        for spec in self.specs(self.groups[:1]):
            kernels, kept = self.make_poisoned(spec), []
            most = product(self.most_tokens(spec), LINEAR_SHAPES[:1])
            for num_rows, (width, num_out) in (*product(FEW_ROWS, LINEAR_SHAPES), *most):
                x_TD = self.random(spec, num_rows, 2 * width)[:, :width]
                weight_OD = self.random(spec, num_out, width, seed=num_rows) * width**-0.5  # inputs have another
                bias_O = self.random(spec, num_out, seed=num_rows)
                kept += [weight_OD, bias_O]  # kernels may know it by address
                yield spec, kernels, "", x_TD, weight_OD, bias_O
                if (width, num_out) == TRANSPOSED_SHAPE:
                    kept.append(transposed_OD := -weight_OD.t().contiguous().t())
                    yield spec, kernels, " and a transposed weight", x_TD, transposed_OD, bias_O

    def _variants(self, spec: AttentionSpec) -> Iterator[tuple[str, Rope | None, QKNorm | None]]:
        rope = _rope(spec, spec.head_dim)
        q_weight_E = 1 + 0.3 * self.random(spec, spec.head_dim)
        norm = QKNorm(q_weight_E, 1.5 - q_weight_E.flip(0), EPS)
        yield "with norm and rope", rope, norm
        yield "without norm", rope, None
        yield "without rope", None, norm
        yield "without norm and rope", None, None
        yield "with norm and rope of a quarter of each head", _rope(spec, spec.head_dim // 8 * 2), norm
        other = QKNorm(norm.k_weight_E.flip(0), norm.q_weight_E + 0.5, 0.1)
        yield "with another layer's norm", rope, other
        yield "with another layer's rope", _rope(spec, spec.head_dim, base=1000.0), norm

    def _positions(self, spec: AttentionSpec, num_tokens: int, below: int | None = None) -> Tensor:
        """Numbers in random order, different ones as far as there are."""
        below = spec.max_model_len if below is None else below
        order_T = torch.randperm(max(below, num_tokens), generator=torch.Generator().manual_seed(1))
        return (order_T[:num_tokens] % below).to(spec.device)

    def _check(self, operation: str, what: str, spec: AttentionSpec, actual: Tensor, expected: Tensor) -> None:
        check_form(f"{what} ({describe(spec)})", actual, expected.shape, spec.dtype)
        check_close(f"{what} ({describe(spec)})", actual, expected, self.tolerance(spec, operation))

    def _check_cache(self, what: str, spec: AttentionSpec, cache: Tensor, expected: Tensor, tolerance: float) -> None:
        """Keys and values of the layer that was written (1), and the untouched others."""
        for part, index in (("keys", 0), ("values", 1)):
            name = f"the {part} that {what} leaves in the cache ({describe(spec)})"
            check_close(name, cache[index, 1], expected[index, 1], tolerance)
        others = [0, 2]
        check_unchanged(f"another layer's cache, by {what},", expected[:, others].to(cache.dtype), cache[:, others])


def _unchanged(name: str, product: Callable[..., Tensor], *given: Tensor | None) -> Tensor:
    """The result of a product, after a check that it did not change its inputs, which are needed again."""
    copies = [tensor if tensor is None else tensor.clone() for tensor in given]
    found = product(*given)
    for what, before, after in zip(("the rows", "the weight", "the bias"), copies, given, strict=False):
        if before is not None and after is not None:
            check_unchanged(f"{what} that {name} was given", before, after)
    return found


def _batch(spec: AttentionSpec, lengths: Sequence[tuple[int, int]]) -> Batch:
    rows = scatter_rows(lengths, spec.block_size, max(NUM_BLOCKS, blocks_of(spec, lengths)), seed=1)
    return make_batch(rows, spec, num_decodes=num_decodes_of(lengths))


def _rope(spec: AttentionSpec, num_rotated: int, base: float = 100.0) -> Rope:
    """Rotation of the first values of a head."""
    frequency_F = base ** -torch.linspace(0, 1, num_rotated // 2)
    angle_PF = torch.outer(torch.arange(float(spec.max_model_len)), frequency_F)
    return Rope(torch.cat((angle_PF.cos(), angle_PF.sin()), -1).to(spec.device))
