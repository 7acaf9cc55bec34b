"""Tensors between the stages of a model, from a rank to the rank of the same number in another stage's group.

The residual stream goes from each stage to the next, drawn tokens from the last stage to the first. Each link is a
group of two ranks, so that tokens do not queue behind streams.

A send does not wait for its receiver, only for sends of some steps before; a receive is waited for when its tensor is
needed. So ranks that send and receive the same tensors in the same order on each link cannot block each other: a tensor
that a stage waits for depends only on tensors that it sent before. Device: no host sync on a GPU; on a CPU the host
waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.core.distributed.aborts import Aborts, losing_others
from hookline.core.distributed.heartbeat import Heartbeat
from hookline.core.distributed.ranks import LocalRanks

LINK = "a link between stages"
"""The words for a link in errors."""
SENDER, RECEIVER = 0, 1
"""The two ranks of a link."""
STEPS_AHEAD = 3
"""A send waits for the send of this many steps before, which is over: the host launches at most two steps ahead."""


class StageLinks:
    """The links of one rank. before, after: to the neighbouring stages. back: from the last stage to the first.

    Raises: RankError from any method if another rank is gone.
    """

    def __init__(
        self,
        ranks: LocalRanks,
        before: Any,
        after: Any,
        back: Any,
        device: torch.device,
        heartbeat: Heartbeat,
        aborts: Aborts,
    ) -> None:
        self.stage, self.num_stages = ranks.stage, ranks.num_stages
        self.device, self.heartbeat = device, heartbeat
        self._before, self._after, self._back = before, after, back
        self._aborts = aborts
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.num_stages - 1

    def send(self, x: Tensor) -> None:
        """Send x to the next stage. It must not be written to afterwards."""
        self._send(self._after, x)

    def receive(self, x: Tensor) -> None:
        """Receive x from the stage before; work that is launched from now on can read it."""
        self._receive(self._before, x)()

    def send_back(self, x: Tensor) -> None:
        """Send x from the last stage to the first. It must not be written to afterwards."""
        self._send(self._back, x)

    def receive_back(self, x: Tensor) -> Callable[[], None]:
        """Receive x from the last stage; returns a call that makes the current stream, or on a CPU the host, wait."""
        return self._receive(self._back, x)

    def on_host(self, x: Tensor) -> Tensor:
        """Wait for a tensor that was received; returns it on the host."""
        with losing_others(LINK), self.heartbeat.waiting():
            return x.cpu()

    def end_part(self) -> None:
        """Count in the heartbeat that a micro-batch was launched, and by a mark when the device has computed it."""
        self.heartbeat.reach_collective()

    def smallest(self, value: int) -> int:
        """The smallest of the stages' values, on the host of each: down the stages, back, and down again."""
        lowest_1 = torch.full((1,), value, dtype=torch.int64, device=self.device)
        theirs_1 = torch.empty_like(lowest_1)
        for is_known in (False, True):
            if self.stage:
                self.receive(theirs_1)
                lowest_1 = torch.minimum(lowest_1, theirs_1)
            elif is_known:
                self.receive_back(theirs_1)()
                lowest_1 = theirs_1
            if not self.is_last:
                self.send(lowest_1)
            elif not is_known:
                self.send_back(lowest_1)
        return int(lowest_1.item())

    @property
    def groups(self) -> list[Any]:
        """The groups of the links."""
        return [group for group in (self._before, self._after, self._back) if group is not None]

    def close(self) -> None:
        """Drop the links, once their groups are aborted; a second call does nothing."""
        self._sent.clear()
        self._before = self._after = self._back = None

    def _send(self, group: Any, x: Tensor) -> None:
        sent = self._sent.setdefault(id(group), deque())
        with losing_others(LINK):
            with self._aborts.starting():
                sent.append((group.send([x], RECEIVER, 0), x))
            if len(sent) > STEPS_AHEAD * self.num_stages:
                self._wait(sent.popleft()[0])

    def _receive(self, group: Any, x: Tensor) -> Callable[[], None]:
        with losing_others(LINK), self._aborts.starting():
            work = group.recv([x], SENDER, 0)
        return lambda: self._wait(work)

    def _wait(self, work: Any) -> None:
        with losing_others(LINK), self.heartbeat.waiting():
            work.wait()


def connect_stages(
    pair: Callable[[str, int], Any], ranks: LocalRanks, device: torch.device, heartbeat: Heartbeat, aborts: Aborts
) -> StageLinks:
    """Connect with the ranks of the same number in the other stages' groups. pair(name, rank): makes a group of two.

    All ranks make their links in the same order, so no two wait for each other.
    """
    stage, last = ranks.stage, ranks.num_stages - 1
    before = pair(f"link{stage - 1}.{ranks.rank}", RECEIVER) if stage > 0 else None
    after = pair(f"link{stage}.{ranks.rank}", SENDER) if stage < last else None
    back = None
    if stage in (0, last):
        back = pair(f"back.{ranks.rank}", SENDER if stage == last else RECEIVER)
    return StageLinks(ranks, before, after, back, device, heartbeat, aborts)
