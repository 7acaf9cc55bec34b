"""One rank of tests/plugins/test_triton_exchange.py: a process, since the interpreter runs one kernel at a time.

python -m tests.plugins.exchange_rank RANK SIZE FD: runs the same exchanges as the other ranks over shared memory, and
ends with code 0 if every result is the sum, norm or winner of all ranks' inputs, bit for bit.
"""

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch

from core.peer_memory import NUM_AREAS, PeerMemory, block_bytes
from core.shared_words import WORD, SharedWords
from plugins.kernels import triton_exchange
from plugins.kernels.triton_exchange import TritonExchange

WIDTH, SLOTS, SLOT_BYTES = 24, 12, 2048
ROWS = [1, 6, 3, 7, 2]
"""Of consecutive sums; up to four are summed up at once, the others by their owners."""


def num_words(size):
    return size * block_bytes(size, SLOTS, SLOT_BYTES) // WORD


def inputs(rank, step, rows):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if step % 2:  # sums that bfloat16 holds: the interpreter rounds to it in a way of its own
        return torch.randint(-31, 32, (rows, WIDTH), generator=generator).div(8).bfloat16()
    return torch.randn(rows, WIDTH, generator=generator)


def main(rank, size, fd):
    triton_exchange.MOST_ROWS_AT_ONCE, triton_exchange.FEW_ROWS_AT_ONCE = {}, 4
    words = SharedWords.attach(fd, num_words(size)).words
    first, step_bytes = words.ctypes.data, block_bytes(size, SLOTS, SLOT_BYTES)
    addresses = torch.tensor([first + peer * step_bytes for peer in range(size)])
    counts = torch.zeros(NUM_AREAS, SLOTS, dtype=torch.int64)
    exchange = TritonExchange(PeerMemory(rank, size, SLOTS, SLOT_BYTES, addresses, counts))
    for step, rows in enumerate(ROWS):
        parts = [inputs(peer, step, rows) for peer in range(size)]
        dtype = parts[0].dtype
        weight = torch.linspace(0.5, 1.5, WIDTH).to(dtype)
        total = torch.zeros(rows, WIDTH)
        for part in parts:
            total += part.float()  # in order of rank
        total = total.to(dtype)
        mine = parts[rank].clone()
        assert exchange.fits(mine)
        assert exchange.all_reduce(mine) is mine
        assert torch.equal(mine, total), (step, rows)

        residual = inputs(9, step, rows)
        out, new_residual = exchange.add_rms_norm(parts[rank].clone(), residual.clone(), weight, 1e-6)
        whole = total.float() + residual.float()
        assert torch.equal(new_residual, whole.to(dtype))
        expected = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        torch.testing.assert_close(out.float(), expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)

        scores = torch.stack([part[:, 0].float().round() for part in parts])  # rounded, so that some are equal
        tokens = torch.arange(size)[:, None] * 100 + torch.arange(rows)
        best = exchange.best_tokens(scores[rank].contiguous(), tokens[rank].contiguous())
        assert torch.equal(best, tokens.gather(0, scores.argmax(0, keepdim=True))[0])
    assert not exchange.fits(torch.zeros(SLOTS + 1, WIDTH)) and not exchange.fits(torch.zeros(2, 2 * WIDTH)[:, ::2])
    assert not exchange.fits(torch.zeros(1, SLOT_BYTES)) and not exchange.fits(torch.zeros(0, WIDTH))
    assert np.count_nonzero(words) > 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
