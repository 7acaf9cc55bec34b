"""On a GPU: writes that end waits are carried out however many streams wait, as long as one queue of theirs is free."""

import time
from functools import partial

import pytest
import torch

from hookline.core.distributed.aborts import on_every_queue
from hookline.core.distributed.cuda_driver import Driver
from hookline.core.distributed.ranks import ALONE
from hookline.core.distributed.signal_board import share_board

pytestmark = pytest.mark.gpu
DEFAULT_QUEUES = 8
"""See NUM_QUEUES."""


@pytest.mark.parametrize("num_waiting", range(1, DEFAULT_QUEUES))
def test_streams_that_wait_for_words_are_let_go(num_waiting):
    device, driver = torch.device("cuda", torch.cuda.current_device()), Driver()
    words_W = torch.zeros(num_waiting, dtype=torch.int32, device=device)
    addresses = [words_W.data_ptr() + 4 * word for word in range(num_waiting)]

    def write():
        for address in addresses:
            driver.signal(address, 1)

    let_go = on_every_queue(write, partial(driver.signal, words_W.data_ptr(), 0), device)
    waiting = [torch.cuda.Stream(device, priority=-1) for _ in range(num_waiting)]
    torch.cuda.synchronize()
    for stream, address in zip(waiting, addresses, strict=True):
        with torch.cuda.stream(stream):
            driver.wait(address, 1)
    deadline = time.monotonic() + 10
    while not all(stream.query() for stream in waiting) and time.monotonic() < deadline:
        let_go()
    assert all(stream.query() for stream in waiting)


@pytest.mark.parametrize("num_waiting", (1, 40))
def test_streams_that_wait_for_words_of_the_host_go_on_when_the_host_writes_them(num_waiting):
    """Whatever queues they hold up."""
    device, driver = torch.device("cuda", torch.cuda.current_device()), Driver()
    board = share_board(ALONE, num_waiting, device, driver)
    waiting = [torch.cuda.Stream(device) for _ in range(num_waiting)]
    for word, stream in enumerate(waiting):
        with torch.cuda.stream(stream):
            driver.wait(board.at(0, word), 7)
    time.sleep(0.1)
    assert not any(stream.query() for stream in waiting)
    board.words[:num_waiting] = 7
    torch.cuda.synchronize()
    board.close()
