"""How many rows are in flight at once."""

import asyncio

import pytest

from hookline.core.data.admission import Admission


async def pass_through(admission, num_tokens, most):
    async with admission.room(num_tokens):
        most.append((admission.num_rows, admission.num_tokens))
        await asyncio.sleep(0)


def run(max_rows, max_tokens, sizes):
    most = []

    async def work():
        admission = Admission(max_rows, max_tokens)
        await asyncio.gather(*(pass_through(admission, size, most) for size in sizes))
        assert (admission.num_rows, admission.num_tokens) == (0, 0)

    asyncio.run(work())
    return most


def test_no_more_rows_are_let_in_than_may_be():
    assert max(rows for rows, _ in run(3, 100, [1] * 20)) == 3


def test_no_more_tokens_are_let_in_than_may_be():
    assert max(tokens for _, tokens in run(100, 10, [4] * 20)) == 8


def test_a_row_that_is_larger_than_all_that_may_be_is_let_in_alone():
    assert run(5, 10, [3, 40, 3]) == [(1, 3), (1, 40), (1, 3)]


def test_rows_are_let_in_in_their_order():
    entered = []

    async def enter(admission, number, size):
        async with admission.room(size):
            entered.append(number)
            await asyncio.sleep(0)

    async def work():
        admission = Admission(2, 10)
        await asyncio.gather(*(enter(admission, number, size) for number, size in enumerate([9, 9, 1, 1, 1])))

    asyncio.run(work())
    assert entered == [0, 1, 2, 3, 4]


def test_who_is_cancelled_while_it_waits_takes_no_room():
    async def work():
        admission = Admission(1, 10)
        async with admission.room(1):
            waiting = [asyncio.create_task(pass_through(admission, 1, [])) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        await waiting[1]
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        assert admission.num_rows == 0

    asyncio.run(work())


def test_who_is_cancelled_as_it_is_let_in_gives_its_room_back():
    async def work():
        admission = Admission(1, 10)
        async with admission.room(1):
            waiting = asyncio.create_task(pass_through(admission, 1, []))
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert admission.num_rows == 0

    asyncio.run(work())
