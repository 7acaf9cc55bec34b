"""Bursts of requests, spread over the turns of an event loop."""

import asyncio

from hookline.core.serve.http.event_loop import Turns


def test_a_burst_is_spread_over_turns_of_the_loop_in_its_order() -> None:
    async def run() -> tuple[list[int], list[int]]:
        turns, order, loop_turns, turn = Turns(4), [], [], 0

        def count() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(count)

        async def one(number: int) -> None:
            await turns.take()
            order.append(number)
            loop_turns.append(turn)

        count()
        await asyncio.gather(*(one(number) for number in range(20)))
        return order, loop_turns

    order, loop_turns = asyncio.run(run())
    assert order == list(range(20))
    assert max(loop_turns.count(turn) for turn in loop_turns) <= 4


def test_who_leaves_while_waiting_takes_no_turn() -> None:
    async def run() -> list[str]:
        turns, found = Turns(1), []

        async def one(name: str) -> None:
            await turns.take()
            found.append(name)

        tasks = [asyncio.ensure_future(one(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(tasks[0], tasks[2])
        return found

    assert asyncio.run(run()) == ["a", "c"]


def test_a_lone_request_waits_for_nothing() -> None:
    async def run() -> None:
        turns = Turns(2)
        for _ in range(3):
            take = turns.take()
            try:
                take.send(None)
            except StopIteration:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            else:
                raise AssertionError("it waited")

    asyncio.run(run())
