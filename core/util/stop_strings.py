"""Finds stop strings in text that comes in pieces, and keeps back text that may be the beginning of a stop string."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence


class StopStrings:
    """Stop strings as an automaton (Aho and Corasick 1975): a node for each of their prefixes, 0 for the empty prefix.

    Built in time linear in their characters, with 16 bytes for each. Searches do not change it and may share it.
    Most nodes are children of the node numbered before them, so codes[node] is the character that leads there from
    node - 1, or -1 if none does, and only other children are in a dict.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._codes = array("i", [-1, -1])
        self._branches: dict[int, dict[int, int]] = {}
        self.depths = array("i", [0])
        """Characters of each node's prefix."""
        self.ends = array("i", [0])
        """For each node, characters of the longest stop string that its prefix ends with; 0 if there is none."""
        for stop in stops:
            node = 0
            for code in map(ord, stop):
                node = self._child(node, code) or self._grow(node, code)
            self.ends[node] = len(stop)
        self._links = array("i", bytes(4 * len(self.depths)))
        """For each node, the node of the longest proper suffix of its prefix that is a prefix itself."""
        self._link()

    def _grow(self, node: int, code: int) -> int:
        new = len(self.depths)
        if new == node + 1:
            self._codes[new] = code
        else:
            self._branches.setdefault(node, {})[code] = new
        self._codes.append(-1)
        self.depths.append(self.depths[node] + 1)
        self.ends.append(0)
        return new

    def _link(self) -> None:
        nodes = deque([0])
        while nodes:
            node = nodes.popleft()
            for code, child in self._children(node):
                link = self._links[child] = self.after(self._links[node], code) if node else 0
                self.ends[child] = self.ends[child] or self.ends[link]
                nodes.append(child)

    def _children(self, node: int) -> Iterator[tuple[int, int]]:
        if self._codes[node + 1] >= 0:
            yield self._codes[node + 1], node + 1
        yield from self._branches.get(node, {}).items()

    def _child(self, node: int, code: int) -> int:
        if self._codes[node + 1] == code:
            return node + 1
        return self._branches[node].get(code, 0) if node in self._branches else 0

    def after(self, node: int, code: int) -> int:
        """The node of the longest prefix that a text ends with, if this character follows the prefix of `node`.

        Takes at most two look-ups a character on average over a text; for one character, at most as many as the longest
        stop string has characters.
        """
        while not (child := self._child(node, code)) and node:
            node = self._links[node]
        return child

    def unfinished(self, node: int) -> int:
        """The node of the longest prefix that the text ends with and that more text can complete to a stop string."""
        while node and self._codes[node + 1] < 0 and node not in self._branches:
            node = self._links[node]
        return node


class StopSearch:
    """Looks for the stop string that is complete first; of two that end together, the longer one counts.

    stops: the stop strings, or their automaton.
    include: the stop string stays in the text. Then nothing needs to be kept back.
    A piece takes time linear in its length and in the text kept back before it, which is shorter than the longest stop
    string.
    """

    def __init__(self, stops: StopStrings | Sequence[str], *, include: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._node = 0
        self._tail = ""
        """The longest end of the text so far that is a prefix of a stop string: the node's prefix."""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string that ends it, if one is complete.

        may_stop: False lets stop strings pass that are completed by this piece.
        """
        stops, node, seen = self._stops, self._node, len(self._tail)
        first, joined = seen if self._include else 0, self._tail + text
        for end, code in enumerate(map(ord, text), start=seen + 1):
            node = stops.after(node, code)
            if may_stop and stops.ends[node]:
                start = end - stops.ends[node]
                self._node, self._tail = 0, ""
                return joined[first : end if self._include else start], joined[start:end]
        self._node = stops.unfinished(node)
        shown = len(joined) - stops.depths[self._node]
        self._tail = joined[shown:]
        return joined[first : len(joined) if self._include else shown], None

    def flush(self) -> str:
        """The text that was kept back, at the end of the text."""
        tail, self._tail, self._node = self._tail, "", 0
        return "" if self._include else tail
