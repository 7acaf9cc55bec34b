"""What a plugin may do wrong, as values that Hypothesis chooses: in its how-many-eth call, and then never again."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from hypothesis import strategies as st


class Own(BaseException):
    """An error that is no Exception."""


def _raises(error: BaseException) -> Any:
    def act(result: Any, *arguments: Any) -> Any:
        raise error

    return act


def _recurses(result: Any, *arguments: Any) -> Any:
    return _recurses(result, *arguments)


def _exits(result: Any, *arguments: Any) -> Any:
    sys.exit(0)


def _returns(value: Any) -> Any:
    return lambda result, *arguments: value


def _empties(result: Any, *arguments: Any) -> Any:
    """Changes what it was given, as far as that can be changed, and then returns what it should."""
    for one in arguments:
        for change in ("clear", "zero_", "fill"):
            try:
                getattr(one, change)(*([0] * (change == "fill")))
            except Exception:
                continue
    return result


ACTS = {
    "raise": _raises(ValueError("on purpose")),
    "raise ours": _raises(KeyError("\x1b[31m" + "x" * 5000 + "\n")),
    "raise no Exception": _raises(Own("on purpose")),
    "GeneratorExit": _raises(GeneratorExit()),
    "StopIteration": _raises(StopIteration()),
    "exit": _exits,
    "recurse": _recurses,
    "None": _returns(None),
    "text": _returns("nonsense"),
    "-1": _returns(-1),
    "huge": _returns(10**400),
    "nan": _returns(math.nan),
    "list": _returns([None, "x"]),
    "object": _returns(object()),
    "change its input": _empties,
}
"""What happens in place of the call's result, from that result and the arguments."""


@dataclass
class Misbehaviour:
    """One act in one call of one method. count: calls so far. acts: by name."""

    act: str
    call: int
    count: int = 0
    acts: Mapping[str, Any] = field(default_factory=lambda: ACTS)

    def around(self, method: Any) -> Any:
        """The method, with the act in its place once."""

        def misbehaving(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            result = method(*arguments, **named)
            return self.acts[self.act](result, *arguments) if self.count == self.call + 1 else result

        return misbehaving

    def within(self, part: Any, name: str) -> Any:
        """The method of an object, with the act in its place once; in a traceback it is a method of that object."""
        around = self.around(getattr(part, name))

        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            return around(*arguments, **named)

        method.__code__ = method.__code__.replace(co_name=name)
        return MethodType(method, part)


def misbehaviours(acts: Any = ACTS, most_calls: int = 6) -> st.SearchStrategy[Misbehaviour]:
    """Any act in one of the first calls."""
    return st.builds(Misbehaviour, st.sampled_from(sorted(acts)), st.integers(0, most_calls))
