"""The ranks of one engine as processes: gloo moves tensors between CPUs, nccl between GPUs.

Each engine has a group of its own, outside torch.distributed's global one, so several live in a process. When a
collective does not end, `core.executor.monitor` finds the rank at fault and frees this one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from hookline.core.distributed.aborts import Aborts, Releases, losing_others
from hookline.core.distributed.heartbeat import DeviceMarks, Heartbeat
from hookline.core.distributed.ranks import LocalRanks, sensible_chunks
from hookline.core.distributed.side_stream import SideStream
from hookline.core.distributed.stage_links import connect_stages

if TYPE_CHECKING:
    from hookline.core.contracts import Kernels

logger = logging.getLogger("hookline")
LOOPBACK = "127.0.0.1"
START_TIMEOUT = timedelta(seconds=120)
"""Time for ranks to connect once all of them have started."""
c10d: Any = torch._C._distributed_c10d
"""The module of torch.distributed with the backends' classes, which need no global process group."""
NO_TIMEOUT = timedelta(days=7)
"""Timeout of a collective; how long a step may take is limited by engine.step_timeout_s instead."""
CLOSE_S = 5.0
"""Seconds that `close` waits for nccl; see Aborts."""
AGAIN_S = 0.1
"""Seconds after which a device that is still busy is released again."""


@dataclass(frozen=True)
class ConnectedRanks(LocalRanks):
    """A rank that may wait for other ranks, in a group or over links between stages."""

    releases: Releases = field(default_factory=Releases, kw_only=True)
    shared: list[Callable[[], None]] = field(default_factory=list, kw_only=True)
    """Calls that free the memory that the ranks share, for `close`."""
    aborts: Aborts = field(default_factory=Aborts, kw_only=True)
    is_closed: bool = field(default=False, kw_only=True)

    def abort(self) -> None:
        """Break off whatever this rank waits for; called from another thread, more than once if that did not help."""
        self.releases()
        self.aborts.begin(self._nccl_groups)

    def close(self) -> None:
        """See Ranks."""
        if self.is_closed:
            return
        object.__setattr__(self, "is_closed", True)
        deadline = time.monotonic() + CLOSE_S
        self.abort()  # an orderly end would wait for the others
        while not (self.aborts.join(0) and self.is_free) and time.monotonic() < deadline:
            time.sleep(AGAIN_S)
            self.releases()
        if not self.is_free:
            logger.warning("the GPU does not get done, so its memory is not freed before this process ends")
        elif not self.aborts.join(0):
            logger.warning("nccl is not closed: something refers to CUDA graphs of this engine still")
        self.releases.clear()
        try:
            while self.shared and self.is_free:  # freeing memory waits for the GPU
                self.shared.pop()()
        finally:
            if self.links is not None:
                self.links.close()
            object.__setattr__(self, "group", None)  # it holds sockets, and this object may live as long as its model

    @property
    def is_free(self) -> bool:
        """See Ranks."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True
        try:
            return bool(torch.cuda.current_stream().query())
        except RuntimeError:  # of a device that computes nothing any more
            return True

    @property
    def _nccl_groups(self) -> list[Any]:
        """All groups but gloo's, whose waits end with the other ranks' sockets."""
        groups = [self.group, *(() if self.links is None else self.links.groups)]
        return [group for group in groups if group is not None and not isinstance(group, c10d.ProcessGroupGloo)]


@dataclass(frozen=True)
class ProcessRanks(ConnectedRanks):
    """A rank; `group` is its torch.distributed backend. Device: no host sync on a GPU; safe inside a CUDA graph.

    Raises: RankError from any collective if another rank is gone.
    """

    heartbeat: Heartbeat | None = None
    side_stream: SideStream | None = None
    """The stream that sums run on while this rank computes; None: they run on the current stream."""
    stage_heartbeat: Heartbeat | None = None
    """With several stages, used in place of `heartbeat`: it is told of waits, since stages' collectives differ."""

    def num_chunks(self, num_rows: int) -> int:
        """See Ranks."""
        return 1 if self.side_stream is None else sensible_chunks(num_rows)

    def add_rms_norm_each(
        self, kernels: Kernels, partials: Iterable[Tensor], residual_chunks: list[Tensor], weight_D: Tensor, eps: float
    ) -> Iterator[Tensor]:
        """See Ranks: sums run on the side stream; each chunk is normalised when its sum is there."""
        if self.side_stream is None or len(residual_chunks) == 1:
            yield from super().add_rms_norm_each(kernels, partials, residual_chunks, weight_D, eps)
            return
        under_way = deque((x_TD, self.side_stream(partial(self._sum, x_TD))) for x_TD in partials)
        for index in range(len(residual_chunks)):
            x_TD, wait = under_way.popleft()
            wait()
            normed_TD, residual_chunks[index] = kernels.add_rms_norm(x_TD, residual_chunks[index], weight_D, eps)
            yield normed_TD

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Ranks. Every rank gets the same bits: each element is summed on one rank, or everywhere in one order."""
        return self._sum(x)

    def all_gather_last(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return self._gathered(x).movedim(0, -2).flatten(-2)

    def smallest(self, value: int) -> int:
        """See Ranks."""
        number = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN
        self._run(lambda: self.group.allreduce([number], options))
        return int(number.item())

    @property
    def device(self) -> torch.device:
        """Where collectives work: the CPU, or the current GPU."""
        return torch.device("cpu" if isinstance(self.group, c10d.ProcessGroupGloo) else "cuda")

    def _sum(self, x: Tensor) -> Tensor:
        options = c10d.AllreduceOptions()
        options.asyncOp = False  # on the current stream
        self._run(lambda: self.group.allreduce([x], options))
        return x

    def _gathered(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, (size, *x.shape)."""
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        self._run(lambda: self.group._allgather_base(parts, x.contiguous(), options))
        return parts.view(self.size, *x.shape)

    def reached_collective(self) -> None:
        """Count in the heartbeat that this rank has reached its next collective."""
        if self.heartbeat is not None:
            self.heartbeat.reach_collective()

    def _run(self, start: Callable[[], Any]) -> None:
        self.reached_collective()
        with losing_others():
            with self.aborts.starting():
                work = start()
            if work is None:
                return
            if self.stage_heartbeat is None:
                work.wait()
                return
            with self.stage_heartbeat.waiting():
                work.wait()


def listen(host: str = LOOPBACK) -> Any:
    """Open the store where the ranks of an engine meet, on a free port of this address.

    With the default address, only this host can reach it.
    """
    with socket.create_server((host, 0)) as server:
        port, fd = server.getsockname()[1], server.detach()
    return c10d.TCPStore(host, port, is_master=True, timeout=START_TIMEOUT, wait_for_workers=False, master_listen_fd=fd)


def join(host: str, port: int) -> Any:
    """Open a store that another process listens for."""
    return c10d.TCPStore(host, port, is_master=False, timeout=START_TIMEOUT)


def behind_secret(store: Any, secret: str) -> Any:
    """The part of a store whose keys begin with a secret: other users of the host can reach its port, but not guess
    the keys.
    """
    return c10d.PrefixStore(secret, store)


def connect(
    store: Any, ranks: LocalRanks, device: torch.device, heartbeat: Heartbeat, host: str = LOOPBACK
) -> LocalRanks:
    """Connect with the other ranks of this rank's stage, and, if there are several stages, with ranks of other stages.

    host: the address at which they can reach this one.

    Raises: RankError if other ranks do not connect in time.
    """
    with losing_others():
        is_gpu = device.type == "cuda"
        if is_gpu:
            heartbeat.follow(DeviceMarks(device))
        side_stream = SideStream(device) if is_gpu else None
        make_group = _nccl if is_gpu else partial(_gloo, host=host)
        if ranks.num_stages == 1:
            group = make_group(store, ranks.rank, ranks.size)
            return ProcessRanks(ranks.rank, ranks.size, group, heartbeat=heartbeat, side_stream=side_stream)
        aborts = Aborts()
        links = connect_stages(partial(_pair, make_group, store), ranks, device, heartbeat, aborts)
        place: dict[str, Any] = {
            "stage": ranks.stage, "num_stages": ranks.num_stages, "links": links, "aborts": aborts,
        }  # fmt: skip
        if ranks.size == 1:
            return ConnectedRanks(**place)
        group = make_group(c10d.PrefixStore(f"stage{ranks.stage}", store), ranks.rank, ranks.size)
        return ProcessRanks(ranks.rank, ranks.size, group, side_stream=side_stream, stage_heartbeat=heartbeat, **place)


def _pair(make_group: Callable[[Any, int, int], Any], store: Any, name: str, rank: int) -> Any:
    """A group of the two ranks that call this with the same name; `rank` is 0 or 1."""
    return make_group(c10d.PrefixStore(name, store), rank, 2)


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = NO_TIMEOUT
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = NO_TIMEOUT
    # NCCL's own watchdog would end the whole process, which is the caller's, when a rank is lost.
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        return c10d.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class OrderedRanks(ProcessRanks):
    """ProcessRanks that gather all partial sums and add them in the order of the ranks, in float32 and rounded once.

    torch.distributed, exchanges and copies choose an algorithm, and with it the order of addition, by the number of
    rows; here a row's sum does not depend on it. It moves more bytes.
    """

    def _sum(self, x: Tensor) -> Tensor:
        first, *others = self._gathered(x)
        total = first.float()
        for part in others:
            total += part
        return x.copy_(total)


def in_order(ranks: LocalRanks) -> LocalRanks:
    """These ranks as OrderedRanks; a single rank, which has nothing to add, as it is."""
    if not isinstance(ranks, ProcessRanks):
        return ranks
    return OrderedRanks(**{one.name: getattr(ranks, one.name) for one in fields(ranks)})
