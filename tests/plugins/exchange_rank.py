"""One rank of tests/plugins/test_triton_exchange.py: a process, since the interpreter runs one kernel at a time.

python -m tests.plugins.exchange_rank RANK SIZE FD: runs the same exchanges as the other ranks over shared memory, and
ends with code 0 if every result is the sum, norm or winner of all ranks' inputs, bit for bit. Alone, with the others
missing, it ends only if it was let go.
"""

import os
import sys

if __name__ == "__main__":  # where a test imports it, the kernels of the tests behind it would be interpreted too
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch
from triton.runtime import interpreter

from hookline.core.contracts import HEADER_BYTES, NO_TOKEN, PeerMemory
from hookline.core.distributed.peer_memory import block_bytes
from hookline.core.util.shared_memory import WORD, SharedWords
from hookline.plugins.kernels.peer_memory import triton_slots
from hookline.plugins.kernels.peer_memory.triton_slots import Way
from hookline.plugins.kernels.products import triton_wide
from hookline.plugins.kernels.products.triton_wide import WideScratch
from hookline.plugins.kernels.triton_exchange import TritonExchange
from tests.interpreted import interpret_quickly

SLOTS, SLOT_BYTES = 12, 2048
STEPS = [(1, 24), (6, 24), (3, 6), (7, 26), (2, 4), (12, 24), (4, 26), (5, 6)]
"""Rows and columns of consecutive sums; up to AT_ONCE rows are summed up at once, more by parts."""
AT_ONCE, BY_ROWS = 3, 6
PRODUCTS = [(1, 128, 1), (3, 128, 1), (7, 128, 1), (4, 256, 1), (5, 2048, 4), (12, 128, 1)]
"""Rows, input features and fewest programs of a product; up to four rows are a thin one."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_ONES = {torch.float32: (torch.int32, -1), torch.bfloat16: (torch.int16, -1), torch.float16: (torch.int16, -1)}


def num_words(size):
    return size * block_bytes(size, SLOTS, SLOT_BYTES) // WORD


def fill(words, size):
    """As core.distributed.peer_memory does it: all ones but for the header."""
    words[:] = -1
    for block in words.reshape(size, -1):
        block[: HEADER_BYTES // WORD] = 0


def let_go(words, size, rank):
    """As core.distributed.peer_memory does it."""
    words.reshape(size, -1)[rank, : HEADER_BYTES // WORD] = 1


def make(rank, size, words):
    first, step_bytes = words.ctypes.data, block_bytes(size, SLOTS, SLOT_BYTES)
    addresses = torch.tensor([first + peer * step_bytes for peer in range(size)])
    counts = torch.zeros(SLOTS, dtype=torch.int64)
    peers = PeerMemory(rank, size, SLOTS, SLOT_BYTES, addresses, counts)
    return TritonExchange(peers, WideScratch.make(torch.device("cpu")))


def inputs(rank, step):
    rows, width = STEPS[step]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if DTYPES[step % 3] is torch.bfloat16:  # sums that it holds: the interpreter rounds to it in a way of its own
        return torch.randint(-31, 32, (rows, width), generator=generator).div(8).bfloat16()
    return torch.randn(rows, width, generator=generator).to(DTYPES[step % 3])


def check_step(exchange, rank, size, step):
    parts = [inputs(peer, step) for peer in range(size)]
    (rows, width), dtype = STEPS[step], parts[0].dtype
    weight = torch.linspace(0.5, 1.5, width).to(dtype)
    total = torch.zeros(rows, width)
    for part in parts:
        total += part.float()  # in order of rank
    total = total.to(dtype)
    mine = parts[rank].clone()
    assert exchange.fits(mine)
    assert exchange.way(rows) is (Way.AT_ONCE if rows <= AT_ONCE else Way.BY_PARTS)
    assert exchange.all_reduce(mine) is mine
    assert torch.equal(mine, total), (step, rows)

    residual = inputs(9, step)
    out, new_residual = exchange.add_rms_norm(parts[rank].clone(), residual.clone(), weight, 1e-6)
    whole = total.float() + residual.float()
    assert torch.equal(new_residual, whole.to(dtype))
    expected = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]  # of a rounding
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=1e-6)

    own, kept = parts[rank].clone(), residual.clone()
    others = torch.arange(rows) % size != rank
    kept[others] = torch.nan  # what other ranks keep
    assert exchange.keeps_own_rows(kept) is (rows >= BY_ROWS)
    assert torch.equal(exchange.add_rms_norm_own(own, kept, weight, 1e-6), out)
    assert torch.equal(kept[~others], new_residual[~others]) and kept[others].isnan().all()

    scores = torch.stack([part[:, 0].float().round() for part in parts])  # rounded, so that some are equal
    tokens = torch.arange(size)[:, None] * 100 + torch.arange(rows)
    best = exchange.best_tokens(scores[rank].contiguous(), tokens[rank].contiguous())
    assert torch.equal(best, tokens.gather(0, scores.argmax(0, keepdim=True))[0])
    scores[size - 1, ::2], tokens[size - 1, ::2] = torch.nan, NO_TOKEN
    drawn = exchange.best_tokens(scores[rank].contiguous(), tokens[rank].contiguous())
    assert drawn[::2].eq(NO_TOKEN).all() and torch.equal(drawn[1::2], best[1::2]), (step, rows)


def check_what_looks_like_nothing(exchange, rank, size):
    """The NaN whose bits are all ones stands for 'not there yet': a sum of it must end, and be a NaN there alone."""
    for dtype, (bits, ones) in ALL_ONES.items():
        for rows in (1, 5):
            x = torch.ones(rows, 8, dtype=dtype)
            if rank == size - 1:
                x.view(bits)[:, 2:4] = ones
            own, residual = x.clone(), torch.zeros_like(x)
            exchange.all_reduce(x)
            assert x.isnan()[:, 2:4].all() and (x[:, [0, 1, 4, 5, 6, 7]] == size).all()
            # By rows: in what is sent to a row's owner, then in the norm that it sends.
            normed = exchange.add_rms_norm_own(own, residual, torch.ones(8, dtype=dtype), 1e-6)
            mine = residual[rank::size]
            assert mine.isnan()[:, 2:4].all() and (mine[:, [0, 1, 4, 5, 6, 7]] == size).all() and normed.isnan().all()
            weight = torch.ones(8, dtype=dtype)
            weight.view(bits)[2:4] = ones
            normed = exchange.add_rms_norm_own(torch.ones_like(x), residual.zero_(), weight, 0.0)
            assert normed.isnan()[:, 2:4].all() and (normed[:, [0, 1, 4, 5, 6, 7]] == 1).all()


def check_what_is_not_all_of_a_kind(exchange, rank, size):
    """Weights or a residual in another dtype, or with gaps, give the norm all the same."""
    x = torch.randint(-31, 32, (3, 24), generator=torch.Generator().manual_seed(7)).div(8)
    weight, residual = torch.linspace(0.5, 1.5, 24), x.flip(0) * 2
    for dtype, of_weight, of_residual in ((torch.float16, torch.float32, torch.float16), (*[torch.float32] * 3,)):
        part, base = x.to(dtype) * (rank + 1), residual.to(of_residual)
        if of_weight == dtype:
            base = base.T.contiguous().T
        whole = residual + x * (size * (size + 1) // 2)
        expected = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6) * weight
        out, new_residual = exchange.add_rms_norm(part, base, weight.to(of_weight), 1e-6)
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=1e-5)
        torch.testing.assert_close(new_residual.float(), whole, rtol=2e-3, atol=1e-5)


def check_products(exchange, rank, size):
    """Tiles sent from within a product give the sum of all ranks' products, and its norm; small integers are exact."""
    for number, (rows, width, few) in enumerate(PRODUCTS):
        triton_slots.MOST_ROWS_AT_ONCE = SLOTS if number % 2 else AT_ONCE
        triton_wide.MIN_PROGRAMS = few  # more than there are tiles: they are cut along the input too
        num_out, dtype = 64 * size, torch.float16
        generators = [torch.Generator().manual_seed(100 * number + peer) for peer in range(size)]
        xs = [torch.randint(-2, 3, (rows, width), generator=one).to(dtype) for one in generators]
        weights = [torch.randint(-1, 2, (num_out, width), generator=one).to(dtype) for one in generators]
        bias = torch.arange(num_out).to(dtype) / 8
        residual = torch.randint(-9, 9, (rows, num_out), generator=generators[0]).to(dtype)
        norm_weight = torch.linspace(0.5, 1.5, num_out).to(dtype)
        products = [x.float() @ weight.float().T for x, weight in zip(xs, weights, strict=True)]
        whole = (sum(products) + bias.float() + residual.float()).to(dtype)
        results = exchange.linear_add_rms_norm(
            xs[rank], weights[rank], bias if rank == 0 else None, residual.clone(), norm_weight, 1e-6
        )
        assert results is not None and torch.equal(results[1], whole), number
        expected = whole.float() * torch.rsqrt(whole.float().square().mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(results[0].float(), expected * norm_weight.float(), rtol=1e-3, atol=1e-6)
        parts = [x[:, :num_out].contiguous() for x in xs]
        assert torch.equal(exchange.all_reduce(parts[rank].clone()), sum(parts))  # through the same slots
        mixed = norm_weight.float()
        assert exchange.linear_add_rms_norm(xs[rank], weights[rank], None, residual, mixed, 1e-6) is None
        odd = weights[rank][: num_out - 8].contiguous(), residual[:, : num_out - 8].contiguous(), norm_weight[:-8]
        if rows > 4 and number % 2 == 0:
            assert exchange.linear_add_rms_norm(xs[rank], odd[0], None, odd[1], odd[2], 1e-6) is None, (
                "tiles would part"
            )


def check_what_fits(exchange):
    assert not exchange.fits(torch.zeros(SLOTS + 1, 24)) and not exchange.fits(torch.zeros(2, 48)[:, ::2])
    assert not exchange.fits(torch.zeros(1, SLOT_BYTES)) and not exchange.fits(torch.zeros(0, 24))
    assert not exchange.fits(torch.zeros(1, 23).half()) and exchange.fits(torch.zeros(1, 23))


def main(rank, size, fd):
    triton_slots.RANKS_AT_ONCE, triton_slots.MOST_ROWS_AT_ONCE = size, AT_ONCE
    triton_slots.LEAST_ROWS_BY_ROWS = {size: BY_ROWS}
    triton_wide.MAX_WEIGHT = 0
    words = SharedWords(fd, num_words(size)).words
    exchange = make(rank, size, words)
    if words[0] != 0:  # let go from the start
        exchange.all_reduce(inputs(rank, 0))
        exchange.all_reduce(inputs(rank, 1))
        residual = torch.zeros(4, 8)
        exchange.add_rms_norm_own(torch.ones(4, 8), residual, torch.ones(8), 1e-6)
        exchange.best_tokens(torch.zeros(3), torch.arange(3))
        return
    for step in range(len(STEPS)):
        check_step(exchange, rank, size, step)
    check_what_looks_like_nothing(exchange, rank, size)
    check_what_is_not_all_of_a_kind(exchange, rank, size)
    check_products(exchange, rank, size)
    check_what_fits(exchange)
    mine = words.reshape(size, -1)[rank]
    assert np.count_nonzero(mine) > 0


if __name__ == "__main__":
    interpret_quickly(interpreter)
    main(*map(int, sys.argv[1:]))
