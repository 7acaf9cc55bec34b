"""The Triton exchange: every rank gets the sum over ranks in order of rank, its norm, and the best token."""

import subprocess
import sys
from itertools import product

import pytest
import torch

from hookline.core.contracts import HEADER_BYTES, NUM_COPIES
from hookline.core.util.shared_memory import WORD, SharedWords
from hookline.plugins.kernels.peer_memory.triton_slots import Way, sums_by_rows
from tests.plugins.exchange_rank import fill, let_go, num_words

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/test_gpu_ranks.py does this for real"
)
SIZE = 3
"""Not a power of two, and with widths of which some ranks own no part."""


def run(ranks, memory):
    """Whether each of these ranks ended well, by what it wrote to stderr otherwise."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.plugins.exchange_rank", str(rank), str(SIZE), str(memory.fd)],
            pass_fds=(memory.fd,),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        memory.close()


@pytest.mark.parametrize(
    ("num_ranks", "most_at_once", "least_by_rows"), [(2, 128, 129), (4, 0, 256), (3, 0, None), (8, 0, None)]
)
def test_rows_are_summed_up_in_the_way_that_was_measured_to_be_the_fastest(num_ranks, most_at_once, least_by_rows):
    rows = range(1, 2000)
    at_once = [count for count in rows if Way.of(num_ranks, count) is Way.AT_ONCE]
    by_rows = [count for count in rows if sums_by_rows(num_ranks, count)]
    assert at_once == list(range(1, most_at_once + 1))
    assert by_rows == ([] if least_by_rows is None else list(range(least_by_rows, 2000)))


@pytest.mark.slow
def test_sums_norms_and_winners_are_those_of_all_ranks_in_order():
    memory = SharedWords.create(num_words(SIZE))
    fill(memory.words, SIZE)
    run(range(SIZE), memory)
    # Every place is as it was before the first exchange, ready for the next.
    assert (memory.words.reshape(SIZE, -1)[:, HEADER_BYTES // WORD :] == -1).all()


@pytest.mark.slow
def test_a_rank_that_is_let_go_does_not_wait_for_the_others():
    memory = SharedWords.create(num_words(SIZE))
    fill(memory.words, SIZE)
    let_go(memory.words, SIZE, 0)
    run([0], memory)


class Model:
    """The protocol of a slot, its sends and waits in any order that the ranks' own order allows.

    `kinds` has an exchange each: "once", "parts" with as many owners of parts as the digit after it, or "rows" with the
    row's owner, whose norm lies where parts of all owners may; "sent" before the first two if the product sends the
    parts, which it does to its own rank too.
    """

    def __init__(self, size, num_copies, kinds):
        self.size, self.num_copies, self.kinds = size, num_copies, kinds

    def script(self, rank):
        """What a rank does: it sends to a place of another, and waits for places of its own, which it empties."""
        for number, kind in enumerate(self.kinds):
            copy = number % self.num_copies
            everyone, is_rows = set(range(self.size)), kind.startswith("rows")
            owners = everyone if kind.endswith("once") else {int(kind[-1])} if is_rows else set(range(int(kind[-1])))
            without = set() if kind.startswith("sent") else {rank}
            yield from (("send", peer, [(copy, "part", rank)], number) for peer in sorted(owners - without))
            if rank in owners:
                yield ("take", rank, [(copy, "part", peer) for peer in sorted(everyone - without)], number)
            if kind.endswith("once"):
                continue
            sums = {owner: [(copy, "sum", part) for part in (everyone if is_rows else {owner})] for owner in owners}
            if rank in owners:
                yield from (("send", peer, sums[rank], number) for peer in sorted(everyone - {rank}))
            yield ("take", rank, [place for owner in sorted(owners - {rank}) for place in sums[owner]], number)

    def explore(self):
        """How many states some order of steps reaches. Raises AssertionError where a send or a take goes wrong."""
        scripts = [list(self.script(rank)) for rank in range(self.size)]
        todo, seen = [((0,) * self.size, frozenset())], set()
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            at, held = state
            moves = [self.after(scripts, at, dict(held), rank) for rank in range(self.size)]
            assert any(moves) or all(len(script) == done for script, done in zip(scripts, at, strict=True)), "stuck"
            todo += [move for move in moves if move]
        return len(seen)

    def after(self, scripts, at, held, rank):
        """The state after a rank's next step; None if it has none, or waits."""
        if at[rank] == len(scripts[rank]):
            return None
        kind, owner, places, number = scripts[rank][at[rank]]
        if kind == "send":
            assert not any((owner, one) in held for one in places), "sent to a place that was not yet emptied"
            held |= {(owner, one): number for one in places}
        else:
            if not all((owner, one) in held for one in places):
                return None
            assert all(held.pop((owner, one)) == number for one in places), "took what another exchange sent"
        return (*at[:rank], at[rank] + 1, *at[rank + 1 :]), frozenset(held.items())


KINDS = ("once", "parts1", "parts2", "rows1", "sent once", "sent parts2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_exchanges"), [(2, 4), (3, 3), pytest.param(3, 4, marks=(pytest.mark.nightly, pytest.mark.slow))]
)
def test_two_copies_of_a_slot_suffice_in_any_order_of_the_ranks_steps(size, num_exchanges):
    for kinds in product((*KINDS, "parts3") if size == 3 else KINDS, repeat=num_exchanges):
        Model(size, NUM_COPIES, kinds).explore()


def test_the_model_finds_that_one_copy_is_too_few():
    for kinds in (("once", "once"), ("once", "parts2"), ("sent once", "sent parts2"), ("once", "rows1")):
        with pytest.raises(AssertionError, match="not yet emptied"):
            Model(3, 1, kinds).explore()
