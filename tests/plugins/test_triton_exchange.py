"""The Triton exchange: every rank gets the sum over ranks in order of rank, its norm, and the best token."""

import subprocess
import sys

import pytest
import torch

from core.shared_words import SharedWords
from tests.plugins.exchange_rank import num_words


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/test_gpu_ranks.py does this for real")
def test_sums_norms_and_winners_are_those_of_all_ranks_in_order():
    size = 3  # not a power of two, and each rank owns some rows
    memory = SharedWords.create(num_words(size))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.plugins.exchange_rank", str(rank), str(size), str(memory.fd)],
            pass_fds=(memory.fd,),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=250)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
        memory.close()
