"""Whether a class that was chosen has what its contract asks: its methods, callable with what core passes them.

Looks at signatures and calls nothing. Imports no torch.
"""

from __future__ import annotations

import inspect
from typing import Any

from hookline.core import contracts
from hookline.core.contracts import Needs

_CONTRACTS: dict[str, type] = {
    "model": contracts.Model,
    "kernels": contracts.Kernels,
    "sampler": contracts.Sampler,
    "scheduler": contracts.Scheduler,
    "processor": contracts.LogitsProcessor,
}


def contract_fault(kind: str, target: Any, needs: Needs) -> str | None:
    """The first thing a target lacks of its kind's contract, in one line; None if it has everything."""
    if kind == "observer":
        return _observer_fault(target)
    contract = _CONTRACTS.get(kind)
    if contract is None:
        return None
    where = f"hookline.core.contracts.{contract.__name__} says what is needed"
    if not isinstance(target, type):
        return f"it is a {type(target).__name__}, not a class; {where}"
    fault = _call_fault(target, "its constructor", _arguments(contract.__init__))  # type: ignore[misc]
    for name, method in vars(contract).items():
        if fault is None and _is_needed(name, method, needs):
            of_class = isinstance(method, classmethod)
            fault = _method_fault(target, name, _arguments(getattr(contract, name)), of_class=of_class)
    return f"{fault}; {where}" if fault else None


def _observer_fault(target: Any) -> str | None:
    """An observer may leave methods out; but what looks like one and is none would never be called."""
    hooks = [name for name in vars(contracts.Observer) if name.startswith("on_")]
    where = "hookline.core.contracts.Observer says what is needed"
    if not isinstance(target, type):
        return f"it is a {type(target).__name__}, not a class; {where}"
    found = [name for name in dir(target) if name.startswith("on_")]
    if not set(found) & set(hooks):
        return f"it has none of the methods {', '.join(hooks)}; {where}"
    faults = [f"nothing calls its {name}" for name in found if name not in hooks]
    faults += [
        _method_fault(target, name, _arguments(getattr(contracts.Observer, name)), of_class=False) or ""
        for name in hooks
        if name in found
    ]
    fault = next(filter(None, [_call_fault(target, "its constructor", ["config"]), *faults]), None)
    return f"{fault}; {where}" if fault else None


def _is_needed(name: str, method: Any, needs: Needs) -> bool:
    if name == "sample_shard" and not needs.vocabulary_shards:
        return False
    return not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, classmethod))


def _arguments(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def _method_fault(target: type, name: str, arguments: list[str], *, of_class: bool) -> str | None:
    method = getattr(target, name, None)
    if method is None and hasattr(target, "__getattr__"):
        return None  # it hands on what it does not have itself
    if not callable(method):
        return f"it has no method {name}({', '.join(arguments)})"
    is_bound = of_class or not inspect.isfunction(inspect.getattr_static(target, name))
    return _call_fault(method, f"its {name}", arguments, is_bound=is_bound)


def _call_fault(target: Any, what: str, arguments: list[str], *, is_bound: bool = True) -> str | None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None  # written in C, or otherwise without one
    try:
        signature.bind(*([] if is_bound else [None]), *arguments)
    except TypeError as error:
        return f"{what} cannot be called with ({', '.join(arguments)}): {error}"
    return None
