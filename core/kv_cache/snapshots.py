"""Copies of recurrent states at the ends of full blocks, without which a cached prefix cannot be gone on from.

Slots are numbers here; the memory behind them is the worker's. A step first copies slots into the rows of the requests
that it admits and, when it is computed, rows into slots, so a slot that is read in a step may be written in it, too.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_MOVING_PART = 2
"""Running requests, each of which moves one slot along with its newest full block, have one in so many slots."""


class Snapshots:
    """Slots 0 .. num_slots - 1, the prefix whose states each holds, and the copies of the next step.

    A prefix is named by a key: the serial of its last block, or the hash of all its tokens where layers have windows.
    A request has two kinds of snapshots. Lasting ones are saved at its stops (the last full block of its prompt, and
    the point where it leaves other prompts) and, while slots are empty, at the ends of chunks. One moves along with its
    newest full block. A new snapshot takes the least recently used slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.version = 0
        """Changes whenever the outcome of `find` can change."""
        self._slots: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self._index: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._moving: dict[int, int] = {}
        """The slot that moves along with a request, by the request's id; `_owners` is the other way round."""
        self._owners: dict[int, int] = {}
        self._due: dict[int, int] = {}
        """By request: the block whose end its moving slot was copied at, while not all tokens of it are known."""
        self._stops: dict[int, list[int]] = {}
        self._claimed: dict[int, int] = {}
        self._restored: dict[int, int] = {}
        self._saved: dict[int, int] = {}

    def find(self, key: int) -> int | None:
        """The slot that holds the states after the prefix of this key, or None."""
        return self._index.get(key)

    # ------------------------------------------------------------------------------------------------------- requests

    def begin(self, request_id: int, key: int | None, stops: list[int]) -> None:
        """Note the prefix that a request goes on from, if any, and the numbers of tokens at which its chunks end."""
        self._stops[request_id] = stops
        if key is not None:
            self._claimed[request_id] = slot = self._index[key]
            self._slots.move_to_end(slot)

    def restore(self, request_id: int, row: int) -> None:
        """Copy the states that the request goes on from into its row, before the step is computed."""
        slot = self._claimed.pop(request_id, None)
        if slot is not None:
            self._restored[row] = slot

    def next_stop(self, request_id: int, start: int, end: int) -> int:
        """Where a chunk ends that was planned to compute the tokens from `start` to `end`."""
        return next((stop for stop in self._stops.get(request_id, ()) if start < stop < end), end)

    def save(self, request_id: int, row: int, num_tokens: int, key: int) -> None:
        """Keep the states that a prompt's chunk leaves in this row, after so many tokens; they can be found at once."""
        if key in self._index:
            self._slots.move_to_end(self._index[key])
            return
        stays = num_tokens in self._stops.get(request_id, ()) or self._has_empty
        slot = self._take() if stays else self._moving_slot(request_id)
        if slot is not None:
            self._saved[slot] = row
            self._name(slot, key)

    def move(self, request_id: int, row: int, index: int) -> None:
        """Keep the states after block `index`, which a decode fills; they can be found once its tokens are known."""
        slot = self._moving_slot(request_id)
        if slot is not None:
            self._saved[slot] = row
            self._due[request_id] = index

    def name_due(self, request_id: int, index: int, key: int) -> None:
        """Make a request's moving slot findable, if it was copied at the end of block `index`, by that block's key."""
        if self._due.get(request_id) == index:
            del self._due[request_id]
            if key not in self._index:
                self._name(self._moving[request_id], key)

    def end(self, request_id: int) -> None:
        """Leave what the request saved to others; its last snapshot remains findable."""
        self._stops.pop(request_id, None)
        self._claimed.pop(request_id, None)
        slot = self._moving.pop(request_id, None)
        if slot is not None:
            del self._owners[slot]
            self._due.pop(request_id, None)
            if slot not in self._keys:
                self._slots.move_to_end(slot, last=False)

    def drop(self, key: int) -> None:
        """Empty the slot of a prefix whose last block cannot be found any more, if it has one."""
        slot = self._index.get(key)
        if slot is not None:
            self._unname(slot)
            if slot not in self._owners:
                self._slots.move_to_end(slot, last=False)

    def clear(self) -> None:
        """Make all snapshots unfindable; no request has a slot any more."""
        self._index.clear()
        self._keys.clear()
        self._moving.clear()
        self._owners.clear()
        self._due.clear()
        self._claimed.clear()
        self.version += 1

    # ---------------------------------------------------------------------------------------------------------- steps

    def pop_restored(self) -> list[tuple[int, int]]:
        """The copies before the step that is written now: (row, slot)."""
        restored, self._restored = self._restored, {}
        return [*restored.items()]

    def pop_saved(self) -> list[tuple[int, int]]:
        """The copies after the step that is written now: (row, slot), each slot once."""
        saved, self._saved = self._saved, {}
        return [(row, slot) for slot, row in saved.items()]

    def check(self) -> None:
        """Assert that the index, the keys and the owners agree."""
        assert {slot: key for key, slot in self._index.items()} == self._keys, "the index and the keys disagree"
        assert {slot: owner for owner, slot in self._moving.items()} == self._owners, "slots and owners disagree"
        assert set(self._due) <= set(self._moving), "a slot is due that moves with no request"
        assert sorted(self._slots) == list(range(self.num_slots)), "a slot was lost"

    def _moving_slot(self, request_id: int) -> int | None:
        """The request's moving slot, emptied; None if other requests have all slots that may move."""
        slot = self._moving.get(request_id)
        if slot is None:
            if len(self._moving) >= max(1, self.num_slots // MAX_MOVING_PART):
                return None
            slot = self._take()
            self._moving[request_id], self._owners[slot] = slot, request_id
            return slot
        self._unname(slot)
        self._due.pop(request_id, None)
        self._slots.move_to_end(slot)
        return slot

    @property
    def _has_empty(self) -> bool:
        """Whether some slot has neither key nor owner; such slots come first in the order."""
        first = next(iter(self._slots))
        return first not in self._keys and first not in self._owners

    def _take(self) -> int:
        """The least recently used slot, emptied and taken from its owner."""
        slot = next(iter(self._slots))
        self._slots.move_to_end(slot)
        self._unname(slot)
        owner = self._owners.pop(slot, None)
        if owner is not None:
            del self._moving[owner]
            self._due.pop(owner, None)
        return slot

    def _name(self, slot: int, key: int) -> None:
        self._index[key], self._keys[slot] = slot, key
        self.version += 1

    def _unname(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is not None:
            del self._index[key]
            self.version += 1
