"""Windows, scale, softcap, sinks and head dims of the fast kernels on a GPU, beside the plain kernels in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    QKNorm,
    Rope,
)
from hookline.core.testing.batches import Row, make_batch, random_cache, scatter_rows
from hookline.core.testing.plain_kernels import PlainKernels

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
MAX_LEN = 4096
RELATIVE_ERROR = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 5e-6}
"""Weights and results are rounded once each."""
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 224, 256)


def kernels_of(name: str, spec: AttentionSpec):
    if name == "triton":
        from hookline.plugins.kernels.triton_backend import TritonKernels

        return TritonKernels(None, spec)
    pytest.importorskip("flash_attn")
    from hookline.plugins.kernels.flash_attn_backend import FlashAttnKernels

    return FlashAttnKernels(None, spec)


def spec_of(head_dim: int, dtype: torch.dtype = torch.bfloat16, heads: int = 8, kv_heads: int = 2, size: int = 64):
    return AttentionSpec(heads, kv_heads, head_dim, size, 256, 1 << 14, MAX_LEN, DEVICE, dtype)


def form_of(spec: AttentionSpec, *features: str) -> AttentionForm:
    sinks_H = torch.linspace(-2, 5, spec.num_heads, device=DEVICE, dtype=spec.dtype)
    return AttentionForm(
        scale=0.11 if "scale" in features else None,
        softcap=3.0 if "softcap" in features else None,
        sinks_H=sinks_H if "sinks" in features else None,
    )


class Case:
    """Rows over a cache full of numbers, and what attention must give, a row at a time in float64."""

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: list[tuple[int, int]],
        num_decodes: int,
        window: int | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> None:
        num_blocks = sum(-(-context // spec.block_size) for context, _ in lengths) + 1
        rows = scatter_rows(lengths, spec.block_size, num_blocks, seed=len(lengths))
        self.spec, self.form, self.rows = spec, form, rows
        self.kv = random_cache(spec, num_blocks, seed=1)[:, 0]
        self.batch = self.seen(rows, num_decodes, window, num_blocks)
        generator = torch.Generator().manual_seed(2)
        shape = (self.batch.num_tokens, spec.num_heads, spec.head_dim)
        self.q = 2 * torch.randn(shape, generator=generator).to(DEVICE, spec.dtype)
        plain = PlainKernels(None, replace(spec, dtype=torch.float64))
        self.expected = plain.attend(self.q.double(), self.kv, self.batch, form)

    def seen(self, rows: list[Row], num_decodes: int, window: int | None, scratch: int) -> Batch:
        """The batch, whose table names the scratch block wherever no query sees anything."""
        batch = make_batch(rows, self.spec, num_decodes=num_decodes, filler=scratch)
        batch.window = window
        for row, table_M in zip(rows, batch.block_table_BM, strict=True):
            if window is not None:
                table_M[: max(0, row.context - row.num_queries - window + 1) // self.spec.block_size] = scratch
        return batch

    def check(self, kernels) -> None:
        batch = replace(self.batch, scratch={})
        kernels.prepare(batch)
        check(kernels.attend(self.q, self.kv, batch, self.form), self.expected)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < RELATIVE_ERROR[out.dtype], f"relative error {error:.2g}"


FORMS = {
    "plain": ((), None),
    "window": ((), 128),
    "scale": (("scale",), None),
    "softcap": (("softcap",), None),
    "softcap_window": (("scale", "softcap"), 300),
    "sinks": (("sinks",), None),
    "sinks_window": (("sinks",), 128),
    "all": (("scale", "softcap", "sinks"), 65),
}


@pytest.mark.parametrize(
    ("head_dim", "form"), [*((head_dim, "all") for head_dim in HEAD_DIMS), *((128, form) for form in FORMS)]
)
def test_a_mixed_step_equals_the_plain_kernels(head_dim, form):
    features, window = FORMS[form]
    spec = spec_of(head_dim)
    lengths = [(1500, 1), (1, 1), (64, 1), (129, 1), (700, 700), (900, 65), (33, 33), (400, 1)]
    Case(spec, lengths, 4, window, form_of(spec, *features)).check(kernels_of("triton", spec))


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "form"),
    [(64, 64, 8, "sinks_window"), (256, 8, 4, "plain"), (256, 8, 4, "window"), (256, 16, 1, "softcap_window")],
)
def test_decode_of_256_rows_equals_the_plain_kernels(head_dim, heads, kv_heads, form):
    features, window = FORMS[form]
    spec = spec_of(head_dim, heads=heads, kv_heads=kv_heads)
    lengths = [(100 + 7 * ((37 * row) % 256), 1) for row in range(256)]
    Case(spec, lengths, 256, window, form_of(spec, *features)).check(kernels_of("triton", spec))


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "form"),
    [(64, 64, 8, "sinks_window"), (256, 8, 4, "plain"), (256, 8, 4, "softcap_window"), (80, 8, 8, "plain")],
)
def test_prefill_of_2k_tokens_equals_the_plain_kernels(head_dim, heads, kv_heads, form):
    features, window = FORMS[form]
    spec = spec_of(head_dim, heads=heads, kv_heads=kv_heads)
    lengths = [(2048, 2048), (2500, 300)]
    Case(spec, lengths, 0, window, form_of(spec, *features)).check(kernels_of("triton", spec))


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float32), (256, torch.float32), (128, torch.float16)], ids=str
)
def test_other_dtypes_equal_the_plain_kernels(head_dim, dtype):
    spec = spec_of(head_dim, dtype)
    form = form_of(spec, "scale", "softcap", "sinks")
    Case(spec, [(1500, 1), (1, 1), (300, 300), (400, 65)], 2, 128, form).check(kernels_of("triton", spec))


@pytest.mark.parametrize("size", [16, 48])
def test_block_sizes_equal_the_plain_kernels(size):
    spec = spec_of(256, size=size)
    Case(spec, [(1500, 1), (1, 1), (300, 300), (400, 65)], 2, 100, form_of(spec, "sinks")).check(
        kernels_of("triton", spec)
    )


@pytest.mark.parametrize("form", ["plain", "window", "softcap_window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_flash_attn_equals_the_plain_kernels(head_dim, form):
    features, window = FORMS[form]
    spec = spec_of(head_dim, size=256)
    lengths = [(1500, 1), (1, 1), (129, 1), (700, 700), (900, 65), (33, 33)]
    Case(spec, lengths, 3, window, form_of(spec, *features)).check(kernels_of("flash_attn", spec))


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
@pytest.mark.parametrize("window", [None, 1, 128])
def test_a_captured_decode_follows_the_lengths_on_the_device(name, window):
    spec = spec_of(128, size=256)
    form = form_of(spec, "sinks") if name == "triton" else form_of(spec, "scale")
    case = Case(spec, [(600, 1), (1, 1), (130, 1), (2000, 1)], 4, window, form)
    kernels = kernels_of(name, spec)
    lengths = case.batch.context_lens_B.clone()
    captured = replace(case.batch, context_lens_host=None, max_context_len=MAX_LEN, scratch={})

    def step() -> torch.Tensor:
        kernels.prepare(captured)
        return kernels.attend(case.q, case.kv, captured, form)

    captured.context_lens_B.fill_(1)
    check_replayed(step, lambda: captured.context_lens_B.copy_(lengths), case.expected)


@pytest.mark.parametrize("window", [None, 128])
def test_a_captured_step_with_prompts_follows_the_lengths_on_the_device(window):
    spec = spec_of(64, heads=16, kv_heads=2)
    form = form_of(spec, "scale", "softcap", "sinks")
    case = Case(spec, [(600, 1), (77, 1), (300, 300), (900, 65)], 2, window, form)
    kernels = kernels_of("triton", spec)
    lengths = case.batch.context_lens_B.clone()
    captured = replace(
        case.batch,
        context_lens_host=None,
        query_starts_host=None,
        max_context_len=MAX_LEN,
        max_query_len=365,
        scratch={},
    )

    def step() -> torch.Tensor:
        kernels.prepare(captured)
        return kernels.attend(case.q, case.kv, captured, form)

    captured.context_lens_B.copy_(torch.tensor([1, 1, 300, 65], device=DEVICE))
    check_replayed(step, lambda: captured.context_lens_B.copy_(lengths), case.expected)


def check_replayed(step, follow, expected: torch.Tensor) -> None:
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    follow()
    graph.replay()
    check(out, expected)


@pytest.mark.parametrize(
    ("head_dim", "num_rotated", "form"),
    [(64, 64, "sinks_window"), (64, 32, "plain"), (256, 64, "all"), (80, 32, "softcap_window"), (128, 128, "sinks")],
)
def test_the_fused_decode_equals_its_parts(head_dim, num_rotated, form):
    features, window = FORMS[form]
    spec = spec_of(head_dim)
    case = Case(spec, [(600, 1), (1, 1), (130, 1), (2000, 1), (65, 1)], 5, window)
    angle = 7 * torch.rand(MAX_LEN, num_rotated // 2, device=DEVICE)
    rope = Rope(torch.cat((angle.cos(), angle.sin()), -1))
    norm = QKNorm(*(torch.rand(head_dim, device=DEVICE, dtype=spec.dtype) + 0.5 for _ in range(2)), 1e-6)
    qkv = torch.randn(5, (spec.num_heads + 2 * spec.num_kv_heads) * head_dim, device=DEVICE, dtype=spec.dtype)
    results = []
    for kernels in (kernels_of("triton", spec), PlainKernels(None, spec)):
        kv, batch = case.kv.clone(), replace(case.batch, scratch={})
        kernels.prepare(batch)
        out = kernels.qkv_attend(qkv.clone(), kv, batch, rope, norm, form_of(spec, *features))
        results.append((out, kv))
    check(results[0][0], results[1][0])
    check(results[0][1], results[1][1])
