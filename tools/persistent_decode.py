"""An experiment: all layers of a small dense model for one token as one kernel that stays on the card.

    python tools/persistent_decode.py                    # on a GPU: times it at Qwen3-0.6B's shape, beside its floors
    python tools/persistent_decode.py --context 4096
    TRITON_INTERPRET=1 python tools/persistent_decode.py --check     # a tiny shape, against plain torch

A program on each multiprocessor goes through the layers; all meet five times a layer, where one phase needs what the
others computed in the one before. Each asks for its part of the next weight before it meets the others, so that memory
is busy while they wait; what it holds lies in registers. Not part of the engine: see docs/log for what came of it.
Legend: L layers, D hidden, F intermediate features, H heads, K kv heads, E head dim, C = (H + 2K) * E, P positions,
S splits of a context.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A dense model as Qwen3's."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


SMALL = Shape(28, 1024, 3072, 16, 8, 128)
TINY = Shape(2, 64, 96, 4, 2, 16)


@dataclass(frozen=True)
class Weights:
    """Each for all layers, and the rotary table's row of the new token: cosines, then sines."""

    qkv_LCD: Tensor
    output_LDC: Tensor
    gate_up_LFD: Tensor
    down_LDF: Tensor
    norms_L2D: Tensor
    qk_norms_L2E: Tensor
    rope_E: Tensor

    @classmethod
    def random(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> Weights:
        """Of a size that keeps activations near one."""

        def matrix(num_out: int, width: int) -> Tensor:
            return (torch.randn(shape.layers, num_out, width, device=device) * width**-0.5).to(dtype)

        queries, dim = shape.heads * shape.head_dim, shape.head_dim
        angle = torch.rand(dim // 2, device=device) * 6
        norms = [1 + 0.1 * torch.randn(shape.layers, 2, size, device=device) for size in (shape.hidden, dim)]
        return cls(
            matrix(queries + 2 * shape.kv_heads * dim, shape.hidden), matrix(shape.hidden, queries),
            matrix(2 * shape.inner, shape.hidden), matrix(shape.hidden, shape.inner),
            norms[0].to(dtype), norms[1].to(dtype), torch.cat((angle.cos(), angle.sin())),
        )  # fmt: skip


@triton.jit
def _meet(counter_ptr, target):
    """Wait until all programs are here; what they wrote before can be read after, past the L1."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while seen < target:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _weight(ptr, num_out, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's rows of a weight: ROWS of BLOCK_O, which is a power of two."""
    index, column = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_D)
    out = tl.program_id(0) * ROWS + index
    mask = ((index < ROWS) & (out < num_out))[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + out.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def _normed(x_ptr, weight_ptr, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + column, mask=column < WIDTH, other=0.0, cache_modifier=".cg")
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight


@triton.jit
def _rotated(ptr, at, norm_ptr, cos, sin, eps, HALF: tl.constexpr):
    """Heads that lie at these places, normalised and rotated, as two halves."""
    dim = tl.arange(0, HALF)
    low = tl.load(ptr + at + dim[None, :], cache_modifier=".cg")
    high = tl.load(ptr + at + HALF + dim[None, :], cache_modifier=".cg")
    scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)[:, None]
    low = low * scale * tl.load(norm_ptr + dim).to(tl.float32)[None, :]
    high = high * scale * tl.load(norm_ptr + HALF + dim).to(tl.float32)[None, :]
    return low * cos[None, :] - high * sin[None, :], high * cos[None, :] + low * sin[None, :]


@triton.jit
def _attend(
    qkv_ptr, cache_ptr, rope_ptr, qk_norm_ptr, out_ptr, most_ptr, sum_ptr, item, context, half_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One split of the context for the query heads of one kv head; the last split has the new token, and keeps it."""
    kv_head, split = item // SPLITS, item % SPLITS
    DIM: tl.constexpr = 2 * HALF
    dim, whole, member = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, GROUP)
    cos, sin = tl.load(rope_ptr + dim), tl.load(rope_ptr + HALF + dim)
    head = kv_head * GROUP + member
    q_low, q_high = _rotated(qkv_ptr, head[:, None] * DIM, qk_norm_ptr, cos, sin, eps, HALF)
    scale = DIM**-0.5
    past = context - 1
    length = (past + SPLITS - 1) // SPLITS
    first = split * length
    last = tl.minimum(first + length, past)
    most = tl.full([GROUP], -1.0e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, DIM], tl.float32)
    k_ptr = cache_ptr + kv_head * DIM
    v_ptr = k_ptr + half_stride
    for start in range(first, last, BLOCK_P):
        position = start + tl.arange(0, BLOCK_P)
        inside = position < last
        row = position.to(tl.int64)[:, None] * (KV_HEADS * DIM)
        k_low = tl.load(k_ptr + row + dim[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        k_high = tl.load(k_ptr + row + HALF + dim[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row + whole[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q_low[:, None, :] * k_low[None, :, :] + q_high[:, None, :] * k_high[None, :, :], axis=2) * scale
        score = tl.where(inside[None, :], score, -1.0e30)
        newer = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.where(inside[None, :], tl.exp(score - newer[:, None]), 0.0)
        shrink = tl.exp(most - newer)
        total = total * shrink + tl.sum(weight, axis=1)
        out = out * shrink[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], axis=1)
        most = newer
    if split == SPLITS - 1:
        k_at = (HEADS + kv_head + tl.zeros([1], tl.int32)) * DIM
        k_low, k_high = _rotated(qkv_ptr, k_at[:, None], qk_norm_ptr + DIM, cos, sin, eps, HALF)
        v = tl.load(qkv_ptr + (HEADS + KV_HEADS + kv_head) * DIM + whole, cache_modifier=".cg")
        here = past * (KV_HEADS * DIM)
        place = tl.zeros([1], tl.int32)[:, None] + dim[None, :]
        tl.store(k_ptr + here + place, k_low.to(cache_ptr.dtype.element_ty))
        tl.store(k_ptr + here + HALF + place, k_high.to(cache_ptr.dtype.element_ty))
        tl.store(v_ptr + here + whole, v.to(cache_ptr.dtype.element_ty))
        score = (tl.sum(q_low * k_low, axis=1) + tl.sum(q_high * k_high, axis=1)) * scale
        newer = tl.maximum(most, score)
        weight, shrink = tl.exp(score - newer), tl.exp(most - newer)
        total = total * shrink + weight
        out = out * shrink[:, None] + weight[:, None] * v[None, :]
        most = newer
    tl.store(out_ptr + (split * HEADS + head)[:, None] * DIM + whole[None, :], out)
    tl.store(most_ptr + split * HEADS + head, most)
    tl.store(sum_ptr + split * HEADS + head, total)


@triton.jit
def _joined(out_ptr, most_ptr, sum_ptr, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """The heads' results over all splits (HEADS * DIM,)."""
    place = tl.arange(0, HEADS * DIM)
    head = place // DIM
    most = tl.full([HEADS * DIM], -1.0e30, tl.float32)
    for split in tl.static_range(SPLITS):
        most = tl.maximum(most, tl.load(most_ptr + split * HEADS + head, cache_modifier=".cg"))
    total, out = tl.zeros([HEADS * DIM], tl.float32), tl.zeros([HEADS * DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp(tl.load(most_ptr + split * HEADS + head, cache_modifier=".cg") - most)
        total += weight * tl.load(sum_ptr + split * HEADS + head, cache_modifier=".cg")
        out += weight * tl.load(out_ptr + split * HEADS * DIM + place, cache_modifier=".cg")
    return out / total


@triton.jit
def _add_product(stream_ptr, weight, x, num_out, ROWS: tl.constexpr, BLOCK_O: tl.constexpr):
    """Add this program's outputs to the residual stream, whose rows nobody else writes."""
    index = tl.arange(0, BLOCK_O)
    out = tl.program_id(0) * ROWS + index
    mask = (index < ROWS) & (out < num_out)
    total = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    total += tl.load(stream_ptr + out, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(stream_ptr + out, total, mask=mask)


@triton.jit(do_not_specialize=["context"])
def _layers_kernel(
    stream_ptr, qkv_w, output_w, gate_up_w, down_w, norms_ptr, qk_norms_ptr, rope_ptr, cache_ptr,
    qkv_ptr, attended_ptr, most_ptr, sum_ptr, hidden_ptr, counter_ptr, context, layer_stride, half_stride, eps,
    LAYERS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS_C: tl.constexpr, ROWS_D: tl.constexpr, ROWS_F: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_F: tl.constexpr,
    IS_EMPTY: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    Q: tl.constexpr = HEADS * DIM
    program = tl.program_id(0)
    for layer in range(LAYERS):
        met = layer * 5 * PROGRAMS
        if IS_EMPTY:  # what meeting alone takes
            for index in tl.static_range(5):
                _meet(counter_ptr, met + (index + 1) * PROGRAMS)
        else:
            at = layer  # the weights of a small model have fewer than 2^31 elements
            weight = _weight(qkv_w + at * C * D, C, D, ROWS_C, BLOCK_C, WIDTH_D)
            _meet(counter_ptr, met + PROGRAMS)
            x = _normed(stream_ptr, norms_ptr + at * 2 * D, eps, D, WIDTH_D)
            index = tl.arange(0, BLOCK_C)
            out = program * ROWS_C + index
            tl.store(
                qkv_ptr + out, tl.sum(weight.to(tl.float32) * x[None, :], axis=1), mask=(index < ROWS_C) & (out < C)
            )
            _meet(counter_ptr, met + 2 * PROGRAMS)
            for item in range(program, KV_HEADS * SPLITS, PROGRAMS):
                _attend(
                    qkv_ptr, cache_ptr + at * layer_stride, rope_ptr, qk_norms_ptr + at * 2 * DIM, attended_ptr,
                    most_ptr, sum_ptr, item, context, half_stride, eps, HEADS, KV_HEADS, HEADS // KV_HEADS, DIM // 2,
                    SPLITS, BLOCK_P,
                )  # fmt: skip
            weight = _weight(output_w + at * D * Q, D, Q, ROWS_D, BLOCK_D, Q)
            _meet(counter_ptr, met + 3 * PROGRAMS)
            x = _joined(attended_ptr, most_ptr, sum_ptr, HEADS, DIM, SPLITS)
            _add_product(stream_ptr, weight, x, D, ROWS_D, BLOCK_D)
            gate_weight = _weight(gate_up_w + at * 2 * F * D, F, D, ROWS_F, BLOCK_F, WIDTH_D)
            up_weight = _weight(gate_up_w + at * 2 * F * D + F * D, F, D, ROWS_F, BLOCK_F, WIDTH_D)
            _meet(counter_ptr, met + 4 * PROGRAMS)
            x = _normed(stream_ptr, norms_ptr + at * 2 * D + D, eps, D, WIDTH_D)
            gate = tl.sum(gate_weight.to(tl.float32) * x[None, :], axis=1)
            up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
            index = tl.arange(0, BLOCK_F)
            out = program * ROWS_F + index
            tl.store(hidden_ptr + out, gate / (1.0 + tl.exp(-gate)) * up, mask=(index < ROWS_F) & (out < F))
            weight = _weight(down_w + at * D * F, D, F, ROWS_D, BLOCK_D, WIDTH_F)
            _meet(counter_ptr, met + 5 * PROGRAMS)
            column = tl.arange(0, WIDTH_F)
            x = tl.load(hidden_ptr + column, mask=column < F, other=0.0, cache_modifier=".cg")
            _add_product(stream_ptr, weight, x, D, ROWS_D, BLOCK_D)


class Persistent:
    """The kernel with its scratch. cache_L2PKE holds keys and values of the positions before the new one."""

    def __init__(self, shape: Shape, weights: Weights, cache_L2PKE: Tensor, num_programs: int, num_warps: int) -> None:
        self.shape, self.weights, self.cache = shape, weights, cache_L2PKE
        self.num_programs, self.num_warps = num_programs, num_warps
        self.splits = max(1, num_programs // shape.kv_heads) if num_programs > 1 else 3
        device, queries = cache_L2PKE.device, shape.heads * shape.head_dim
        sizes = (queries + 2 * shape.kv_heads * shape.head_dim, self.splits * queries, self.splits * shape.heads)
        self.scratch = [torch.empty(size, device=device) for size in (*sizes, sizes[-1], shape.inner)]
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, stream_D: Tensor, context: int, *, is_empty: bool = False) -> None:
        """The residual stream (D,) in float32 through all layers, in place."""
        shape, weights, programs = self.shape, self.weights, self.num_programs
        num_qkv = weights.qkv_LCD.shape[1]
        rows = {"C": num_qkv, "D": shape.hidden, "F": shape.inner}
        cut = {f"ROWS_{name}": triton.cdiv(size, programs) for name, size in rows.items()}
        cut |= {f"BLOCK_{name}": triton.next_power_of_2(cut[f"ROWS_{name}"]) for name in rows}
        self.counter.zero_()
        options = {"launch_cooperative_grid": True} if stream_D.is_cuda else {}
        _layers_kernel[(programs,)](
            stream_D, weights.qkv_LCD, weights.output_LDC, weights.gate_up_LFD, weights.down_LDF, weights.norms_L2D,
            weights.qk_norms_L2E, weights.rope_E, self.cache, *self.scratch, self.counter, context,
            self.cache.stride(0), self.cache.stride(1), EPS,
            LAYERS=shape.layers, D=shape.hidden, F=shape.inner, HEADS=shape.heads, KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim, SPLITS=self.splits, BLOCK_P=32, PROGRAMS=programs, **cut,
            WIDTH_D=triton.next_power_of_2(shape.hidden), WIDTH_F=triton.next_power_of_2(shape.inner),
            IS_EMPTY=is_empty, num_warps=self.num_warps, **options,
        )  # fmt: skip


def plain(shape: Shape, weights: Weights, cache_L2PKE: Tensor, stream_D: Tensor, context: int) -> Tensor:
    """The same by plain torch, in float32; also writes the cache."""
    dim, group = shape.head_dim, shape.heads // shape.kv_heads
    cos, sin = weights.rope_E.chunk(2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight.float(), EPS)

    def rotated(x_HE: Tensor, weight: Tensor) -> Tensor:
        low, high = norm(x_HE, weight).chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    for layer in range(shape.layers):
        qkv = weights.qkv_LCD[layer].float() @ norm(stream_D, weights.norms_L2D[layer, 0])
        heads = qkv.view(-1, dim).split([shape.heads, shape.kv_heads, shape.kv_heads])
        q_HE, k_KE = (rotated(x, weight) for x, weight in zip(heads, weights.qk_norms_L2E[layer], strict=False))
        cache_L2PKE[layer, 0, context - 1], cache_L2PKE[layer, 1, context - 1] = k_KE, heads[2]
        k, v = cache_L2PKE[layer, :, :context].float().repeat_interleave(group, 2)
        weight_HP = (torch.einsum("he,phe->hp", q_HE, k) * dim**-0.5).softmax(-1)
        attended = torch.einsum("hp,phe->he", weight_HP, v).flatten()
        stream_D = stream_D + weights.output_LDC[layer].float() @ attended
        gate, up = (weights.gate_up_LFD[layer].float() @ norm(stream_D, weights.norms_L2D[layer, 1])).chunk(2)
        stream_D = stream_D + weights.down_LDF[layer].float() @ (functional.silu(gate) * up)
    return stream_D


def make(shape: Shape, device: torch.device, dtype: torch.dtype, context: int) -> tuple[Weights, Tensor, Tensor]:
    """Weights, a cache with one place more than the context, and a stream."""
    torch.manual_seed(0)
    weights = Weights.random(shape, device, dtype)
    cache = torch.randn(shape.layers, 2, context + 1, shape.kv_heads, shape.head_dim, device=device).to(dtype)
    return weights, cache, torch.randn(shape.hidden, device=device)


def error(shape: Shape, device: torch.device, dtype: torch.dtype, context: int, programs: int, warps: int) -> float:
    """Relative error of the stream and of what is kept in the cache, whichever is larger."""
    weights, cache, stream_D = make(shape, device, dtype, context)
    expected_cache, out_D = cache.clone(), stream_D.clone()
    expected_D = plain(shape, weights, expected_cache, stream_D, context)
    Persistent(shape, weights, cache, programs, warps)(out_D, context)
    pairs = ((out_D, expected_D), (cache.float(), expected_cache.float()))
    return max(float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs)


def timed(persistent: Persistent, stream_D: Tensor, context: int, *, is_empty: bool) -> float:
    """Median microseconds of a graph's replay."""
    persistent(stream_D, context, is_empty=is_empty)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        persistent(stream_D, context, is_empty=is_empty)
    found = []
    for _ in range(50):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        found.append(events[0].elapsed_time(events[1]) * 1000)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="a tiny shape against plain torch, under the interpreter")
    parser.add_argument("--context", type=int, default=640)
    options = parser.parse_args()
    if options.check:
        print(f"error {error(TINY, torch.device('cpu'), torch.float32, 37, 1, 4):.1e}")
        return
    device, dtype = torch.device("cuda"), torch.bfloat16
    weights, cache, stream_D = make(SMALL, device, dtype, options.context)
    matrices = (weights.qkv_LCD, weights.output_LDC, weights.gate_up_LFD, weights.down_LDF)
    num_bytes = sum(one.nbytes for one in matrices) + cache.nbytes
    print(f"{num_bytes / 1e6:.0f} MB, {num_bytes / 4.2e6:.0f} us at 4.2 TB/s")
    for programs in (64, 128):
        for warps in (8, 16):
            relative = error(SMALL, device, dtype, options.context, programs, warps)
            persistent = Persistent(SMALL, weights, cache, programs, warps)
            all_us, met_us = (timed(persistent, stream_D, options.context, is_empty=one) for one in (False, True))
            what = f"{programs} programs of {warps} warps"
            print(f"{what}: {all_us:.0f} us, of it meeting {met_us:.0f}; error {relative:.1e}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
