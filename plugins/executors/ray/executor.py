"""Actors of Ray that are to be ranks: placed, asked where they are, started, watched and given back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hookline.core.contracts import RankExecutor, RankPlace, RankStart, StartedRank, WantedRanks
from hookline.core.errors import ConfigError, RankError
from hookline.core.launching import connected_ray, free_resources, last_line, within
from hookline.plugins.executors.ray.actor import RankActor

logger = logging.getLogger("hookline")
KEEP_GPUS_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Ranks of one host read each other's memory, so each sees all of its GPUs."""
START_KEY = "(engine.start_timeout_s)"
RELEASE_S = 5.0
"""For the cluster to take back what it gave."""
SETTLE_S = 3.0
"""For the head node to hear what has just become free."""
LOOK_S = 0.2
"""Between two looks at what is free."""
MOST_NODES = 16
"""Most nodes that an error names."""
CAUSE_S = 1.5
"""For Ray to say why an actor is gone."""


class RayRank(StartedRank):
    """A rank that is an actor. running: the call of it that is the rank."""

    def __init__(self, ray: Any, actor: Any, running: Any, place: RankPlace) -> None:
        self._ray, self._actor, self._running, self._place = ray, actor, running, place

    def how_it_ended(self) -> str:
        """See StartedRank."""
        ray = self._ray
        with suppress(Exception):
            nodes = within(CAUSE_S, ray.nodes)
            if any(node["NodeID"] == self._place.node and not node["Alive"] for node in nodes):
                return "was lost with its node"
        try:
            ray.get(self._running, timeout=CAUSE_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            return "closed its connection, perhaps as its node was lost"
        except Exception as error:
            return cause_of(error)
        return "ended"

    def kill(self) -> None:
        """See StartedRank: in a thread of its own, since a head node that is gone is waited for."""
        with suppress(Exception):
            within(0.0, partial(self._ray.kill, self._actor, no_restart=True))

    def wait(self, timeout_s: float) -> bool:
        """See StartedRank."""
        try:
            return bool(self._ray.wait([self._running], timeout=timeout_s)[0])
        except Exception:  # of a cluster that is no more
            return True


class RayExecutor(RankExecutor):
    """Actors in a placement group, which wait to become ranks."""

    def __init__(self, config: None, wanted: WantedRanks) -> None:
        self.ray, self.wanted = connected_ray("engine.executor=ray"), wanted
        self.uses_gpus = self._uses_gpus()
        self._group: Any = None
        self.actors: list[Any] = []
        try:
            self._reserve()
            told = self._ask(self.uses_gpus)
            order = in_rank_order(told, self._bundle_size)
            self.actors, self.places = [self.actors[one] for one in order], [told[one] for one in order]
            self.host = self.ray.util.get_node_ip_address()
        except BaseException:
            self.release()
            raise

    def start(self, starts: Sequence[RankStart]) -> list[RayRank]:
        """See RankExecutor."""
        running = [actor.run.remote(start) for actor, start in zip(self.actors, starts, strict=True)]
        return [RayRank(self.ray, *one) for one in zip(self.actors, running, self.places, strict=True)]

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _uses_gpus(self) -> bool:
        has_gpus = any(node.get("GPU", 0) >= 1 for node in self._nodes())
        device = self.wanted.device
        if device.startswith("cuda:"):
            raise ConfigError(f"device={device} names a GPU of one host; with engine.executor=ray give device=cuda")
        if device == "cuda" and not has_gpus:
            raise ConfigError("device=cuda: no node of this Ray cluster has a GPU; use device=cpu")
        return has_gpus if device == "auto" else device == "cuda"

    def _reserve(self) -> None:
        ray, wanted = self.ray, self.wanted
        kind, each = ("GPU", 1) if self.uses_gpus else ("CPU", wanted.num_cpu_threads)
        self._bundle_size = self._ranks_a_bundle(kind, each)
        bundles = [{kind: self._bundle_size * each}] * (wanted.num_ranks // self._bundle_size)
        there, needed = sum(int(node.get(kind, 0)) for node in self._nodes()), wanted.num_ranks * each
        if there < needed:
            logger.warning("engine.executor=ray waits for %d %ss; this Ray cluster has %d now", needed, kind, there)
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(wanted.patience_s):
            raise RankError(
                f"engine.executor=ray: {wanted.num_ranks} ranks need {needed} free {kind}s, and this Ray cluster, "
                f"which has {there}, did not have them within {wanted.patience_s:g} s {START_KEY}"
                f"{self._free_now(kind, self._bundle_size * each)}"
            )
        actor_class = ray.remote(RankActor)
        for rank in range(wanted.num_ranks):
            placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, rank // self._bundle_size
            )
            needs = {"num_gpus": 1, "num_cpus": 0, "runtime_env": {"env_vars": KEEP_GPUS_VISIBLE}}
            options = needs if self.uses_gpus else {"num_cpus": each}
            self.actors.append(actor_class.options(scheduling_strategy=placed, max_restarts=0, **options).remote())

    def _free_now(self, kind: str, piece: int) -> str:
        """The end of an error: what each node has free, most first. piece: how much of it has to be on one node."""

        def _found() -> list[tuple[float, float, str]]:
            nodes = [node for node in self.ray.nodes() if node["Alive"]]
            free = free_resources(self.ray)
            return [
                (rest.get(kind, 0), node["Resources"][kind], node["NodeManagerAddress"])
                for node, rest in zip(nodes, free, strict=False)  # asked one after the other: a node may have gone
                if node["Resources"].get(kind, 0)
            ]

        try:
            found = sorted(within(RELEASE_S, _found), key=lambda one: -one[0])
        except Exception:  # the head node is gone; the error is told without it
            return ""
        told = [f"{free:g} of {size:g} on {address}" for free, size, address in found[:MOST_NODES]]
        if len(found) > MOST_NODES:
            told.append(f"and {len(found) - MOST_NODES} more nodes")
        together = f"; {piece} have to be on one node" if piece > 1 else ""
        return f"; free now: {', '.join(told)}{together}" if told else ""

    def _ranks_a_bundle(self, kind: str, each: int) -> int:
        """How many ranks are reserved in one piece, and so on one node: a whole group, or one.

        A group where nodes are large enough, unless they are taken now and several nodes have room for single ranks.
        """
        group, size = self.wanted.group_size, self.wanted.num_ranks
        nodes = [node.get(kind, 0) for node in self._nodes()]
        if num_pieces(nodes, group * each) < size // group:
            has_large_one = any(node >= group * each for node in nodes)  # more of its kind may come
            return group if has_large_one and num_pieces(nodes, each) < size else 1
        until = time.monotonic() + SETTLE_S
        while True:
            free = [node.get(kind, 0) for node in free_resources(self.ray)]
            if num_pieces(free, group * each) >= size // group or num_pieces(free, each) < size:
                return group
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_S)
        told = "engine.executor=ray: no node has %d free %ss for tp=%d now, so that its ranks go on several nodes"
        logger.warning(told, group * each, kind, group)
        return 1

    def _ask(self, uses_gpus: bool) -> list[RankPlace]:
        """What each actor says of itself."""
        size, deadline = self.wanted.num_ranks, time.monotonic() + self.wanted.patience_s
        told: dict[int, RankPlace] = {}
        awaited = {actor.describe.remote(uses_gpus): rank for rank, actor in enumerate(self.actors)}
        while awaited:
            said, _ = self.ray.wait(list(awaited), timeout=max(0.0, deadline - time.monotonic()))
            if not said:
                who = " and ".join(f"rank {rank}" for rank in sorted(awaited.values()))
                raise RankError(f"{who} of {size} did not start within {self.wanted.patience_s:g} s {START_KEY}")
            rank = awaited.pop(said[0])
            try:
                told[rank] = self.ray.get(said[0])
            except self.ray.exceptions.RayError as error:
                raise RankError(f"rank {rank} of {size} {cause_of(error)} while starting") from None
        return [told[rank] for rank in range(size)]

    def release(self) -> None:
        """See RankExecutor. A head node that is gone is not waited for long."""
        group, self._group = self._group, None
        if not self.ray.is_initialized():
            return

        def _release() -> None:
            for actor in self.actors:
                with suppress(Exception):
                    self.ray.kill(actor, no_restart=True)
            if group is not None:
                with suppress(Exception):
                    self.ray.util.remove_placement_group(group)

        with suppress(TimeoutError):
            within(RELEASE_S, _release)


def num_pieces(nodes: Sequence[float], piece: float) -> int:
    """How many pieces of this size fit on nodes of these sizes, none of which is cut."""
    return sum(int(node // piece) for node in nodes)


def in_rank_order(places: Sequence[RankPlace], bundle_size: int) -> list[int]:
    """The actors' indices in the order of their ranks: node by node, within a node bundle by bundle, and within a
    bundle by the index of the GPU.
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    return sorted(
        range(len(places)),
        key=lambda one: (
            nodes.index(places[one].node),
            one // bundle_size if bundle_size > 1 else 0,
            int(places[one].device.partition(":")[2] or 0),
        ),
    )


def cause_of(error: Exception) -> str:
    """Why an actor is gone, in one line."""
    return f"ended: {last_line(str(error)).partition(' Worker exit detail')[0][:200]}"
