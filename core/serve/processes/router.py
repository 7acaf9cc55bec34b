"""Prefix-aware routing: a request goes to the replica that has its prefix in its cache, unless that is too busy.

Uses only the replicas' numbers, loads and hashes of prefixes; messages and processes are `replica_client`'s.
Each front end has a router of its own; they agree on where new prefixes go without talking to each other.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

SPAN = 64
"""Tokens, or characters of a text, by which a hashed prefix is longer than the next shorter one."""
MAX_KEYS = 64
"""Most prefixes of a prompt that are hashed; tokens behind the longest do not influence the choice."""
MAX_REMEMBERED = 32_768
"""Prefixes whose replica is remembered; the least recently used one is dropped first."""
FACTOR, SLACK = 1.5, 8
"""A replica with more than FACTOR times the least busy one's requests, and SLACK more, is passed over."""


def prefix_keys(prompt: object, salt: str | None, session: str | None) -> list[int]:
    """Hashes of a prompt's prefixes, the shortest first; none if it is shorter than SPAN, or neither text nor ids.

    salt: requests with different salts share no cache. session: if given, its hash is the only key.
    """
    seed = (salt or "").encode()
    if session is not None:
        return [xxhash.xxh64_intdigest(b"session\0" + seed + b"\0" + session.encode())]
    data, width = _spelt(prompt)
    span = SPAN * width
    hash_, found = xxhash.xxh64(seed + b"\0"), []
    for start in range(0, min(len(data) - span + 1, MAX_KEYS * span), span):
        hash_.update(data[start : start + span])
        found.append(hash_.intdigest())
    return found


def _spelt(prompt: object) -> tuple[bytes, int]:
    """The first SPAN * MAX_KEYS tokens or characters of a prompt as bytes, and the bytes of each token or character."""
    most = SPAN * MAX_KEYS
    if isinstance(prompt, str):
        return prompt[:most].encode("utf-32-le", "surrogatepass"), 4
    if isinstance(prompt, Sequence):
        try:
            return array("q", prompt[:most]).tobytes(), 8
        except (TypeError, OverflowError):
            pass  # a chat's messages, or what will be refused
    return b"", 1


class Router:
    """Chooses one of several replicas for each request.

    capacity: requests that a replica takes; with as many it is passed over while another has room.
    """

    def __init__(self, num_replicas: int, capacity: int) -> None:
        self._num_replicas, self._capacity = num_replicas, capacity
        self._remembered: OrderedDict[int, int] = OrderedDict()
        self._turn = 0

    def choose(self, keys: Sequence[int], loads: Sequence[int | None]) -> int | None:
        """Choose, and remember, the replica of a request with these prefixes; None if all are dead.

        keys: of `prefix_keys`. loads: each replica's requests, running and waiting; None if it is dead.
        """
        living = [load for load in loads if load is not None]
        if not living:
            return None
        most = min(min(living) * FACTOR + SLACK, self._capacity - 1)
        fits = [load is not None and load <= most for load in loads]
        chosen = self._of_prefix(keys, fits) if any(fits) else None
        if chosen is None:
            chosen = self._least(loads)
        self._remember(keys, chosen)
        return chosen

    def _of_prefix(self, keys: Sequence[int], fits: Sequence[bool]) -> int | None:
        """The replica that computed the longest known prefix, None if it is too busy.

        If all prefixes are new, the replica with the highest hash score, which is the same in every front end.
        """
        if not keys:
            return None
        for key in reversed(keys):
            replica = self._remembered.get(key)
            if replica is not None:
                return replica if fits[replica] else None
        return max((one for one in range(self._num_replicas) if fits[one]), key=lambda one: _score(keys[0], one))

    def _least(self, loads: Sequence[int | None]) -> int:
        """The least busy replica; equally busy ones take turns."""
        self._turn += 1
        known = [
            (load, (one + self._turn) % self._num_replicas, one) for one, load in enumerate(loads) if load is not None
        ]
        return min(known)[2]

    def _remember(self, keys: Sequence[int], replica: int) -> None:
        for key in keys:
            self._remembered[key] = replica
            self._remembered.move_to_end(key)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def _score(key: int, replica: int) -> int:
    """Rendezvous hashing: when a replica is lost, only its own prefixes go to other replicas."""
    return xxhash.xxh64_intdigest(key.to_bytes(8, "little") + replica.to_bytes(4, "little"))
