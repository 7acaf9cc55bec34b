"""Checks that a chosen class keeps its contract: its methods exist, are spelt right and take core's arguments.

Looks at signatures and calls nothing. Imports no torch.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from hookline.core import contracts
from hookline.core.contracts import Needs, is_offered
from hookline.core.util.text import near_miss

_CONTRACTS: dict[str, type] = {
    "model": contracts.Model,
    "kernels": contracts.Kernels,
    "sampler": contracts.Sampler,
    "scheduler": contracts.Scheduler,
    "processor": contracts.LogitsProcessor,
    "extension": contracts.StepExtension,
    "observer": contracts.Observer,
    "reasoning_parser": contracts.OutputParser,
    "tool_parser": contracts.OutputParser,
    "grammars": contracts.GrammarBackend,
    "pooler": contracts.Pooler,
    "quantization": contracts.Quantization,
    "api": contracts.ApiSurface,
    "drafter": contracts.Drafter,
    "executor": contracts.RankExecutor,
}
_BESIDES: dict[str, tuple[type, ...]] = {
    "model": (
        contracts.OpensCheckpoint,
        contracts.RenamesTensors,
        contracts.FitsTargets,
        contracts.NormsStreams,
        contracts.HasDraftHead,
    ),
    "quantization": (contracts.OpensCheckpoint,),
    "scheduler": (contracts.RemembersSteps,),
}
"""Contracts that a class of a kind may keep as well, without extending them."""
POOLER_TASKS = ("embed", "classify", "score")
"""Values of a pooler's `task`."""
WORKING_METHODS = ("after_layer", "before_draw", "after_draw", "on_token")
"""Methods of a step extension; a class must have at least one of them."""
_EXTENSIONS = (contracts.StepExtension, contracts.LogitsProcessor)
_PACKAGE = contracts.__name__
_ALMOST = 0.83
"""How similar a name must be to a name of the contract to count as misspelt: `num_draw` is, `num_rows` is not."""


def contract_fault(kind: str, target: Any, needs: Needs) -> str | None:
    """The first fault of a class against the contract of its kind, in one line; None if it keeps the contract."""
    contract = _CONTRACTS.get(kind)
    if contract is None:
        return None
    if not isinstance(target, type):
        return f"it is a {type(target).__name__}, not a class; {_where(contract)}"
    fault = _call_fault(target, "its constructor", _arguments(contract.__init__))  # type: ignore[misc]
    if fault is not None:
        return f"{fault}; {_where(contract)}"
    return class_fault(kind, target, needs)


def class_fault(kind: str, target: type, needs: Needs) -> str | None:
    """`contract_fault` without the check of the constructor."""
    contract = _CONTRACTS[kind]
    if kind == "sampler" and needs.vocabulary_shards and not _has_own(target, contract, "sample_shard"):
        arguments = ", ".join(_arguments(contracts.Sampler.sample_shard))
        return f"it has no method sample_shard({arguments}); {_where(contract)}"
    if kind == "kernels" and set(needs.attention).difference({"window"}):
        for name in ("attend", "qkv_attend"):
            taken = _arguments(getattr(contract, name), all_of_them=True)
            fault = _call_fault(getattr(target, name, None), f"its {name}", taken, is_bound=False)
            if fault is not None:
                return f"{fault}, though it declares attention={needs.attention}; {_where(contract)}"
    unneeded = () if needs.vocabulary_shards else ("sample_shard",)
    fault = methods_fault(target, contract, besides=_BESIDES.get(kind, ()), unneeded=unneeded)
    if fault is None and contract in _EXTENSIONS:
        return _extension_fault(contract, target, needs)
    task = getattr(target, "task", None)
    if fault is None and kind == "pooler" and isinstance(task, str) and task not in POOLER_TASKS:
        return f"its task is {task!r} and must be one of {', '.join(POOLER_TASKS)}; {_where(contract)}"
    return _observer_fault(target) if fault is None and kind == "observer" else fault


def methods_fault(
    target: type, contract: type, *, besides: tuple[type, ...] = (), unneeded: tuple[str, ...] = ()
) -> str | None:
    """The first method that a class lacks of a contract, or has under a name that is almost right.

    besides: further contracts whose names it may have. unneeded: methods it may lack.
    """
    fault = _misspelt(target, contract, {name for one in (contract, *besides) for name in _public(one)})
    if fault is not None:
        return f"{fault} {_where(contract)}"
    for name, method in _members(contract).items():
        if fault is None and name not in unneeded:
            fault = _member_fault(target, contract, name, method)
    for other in besides:
        for name in _public(other):
            if fault is None and hasattr(target, name):
                fault, contract = _member_fault(target, other, name, _members(other)[name]), other
    return f"{fault}; {_where(contract)}" if fault else None


def _has_own(target: type, contract: type, name: str) -> bool:
    return is_offered(getattr(target, name, None) or getattr(contract, name))


def _where(contract: type) -> str:
    return f"hookline.core.contracts.{contract.__name__} says what is needed"


def _members(contract: type) -> dict[str, Any]:
    """The public members of a contract, and of the contracts that it extends, by name."""
    owners = [owner for owner in contract.__mro__ if owner.__module__.startswith(_PACKAGE)]
    return {name: vars(owner)[name] for owner in reversed(owners) for name in _own(owner)}


def _public(contract: type) -> list[str]:
    return list(_members(contract))


def _own(owner: type) -> list[str]:
    return [name for name in vars(owner) if not name.startswith("_")]


def _misspelt(target: type, contract: type, known: set[str]) -> str | None:
    """A public name of the class or its bases that looks like a misspelt name of the contract."""
    for owner in target.__mro__:
        own = [] if owner in contract.__mro__ else _own(owner)
        for name in own:
            if name not in known and (close := near_miss(name, sorted(known.difference(own)), cutoff=_ALMOST)):
                return f"its {name} is not in the contract.{close}"
    return None


def _extension_fault(contract: type, target: Any, needs: Needs) -> str | None:
    """The fault of a step extension that declares a feature without its methods, or has no working method."""
    fault = None
    if target.follows_tokens and not all(map(is_offered, (target.on_token, target.encode, target.load))):
        fault = "its follows_tokens needs on_token, encode and load"
    elif target.waits_for_host and needs.graph_safe:
        fault = "it declares both waits_for_host and Needs(graph_safe=True), and a CUDA graph waits for nothing"
    elif is_offered(target.on_result) and not is_offered(target.after_draw):
        fault = "its on_result needs after_draw, whose numbers it gets"
    elif not any(is_offered(getattr(target, name)) for name in (*WORKING_METHODS, target.draw_method)):
        fault = f"it has none of the methods {', '.join(WORKING_METHODS)}"
    return f"{fault}; {_where(contract)}" if fault else None


def _observer_fault(target: type) -> str | None:
    """A method that only looks like a hook would never be called, and an observer without hooks observes nothing."""
    hooks, where = _public(contracts.Observer), _where(contracts.Observer)
    for name in dir(target):
        if name.startswith("on_") and name not in hooks:
            return f"nothing calls its {name}; {where}"
    if not any(is_offered(getattr(target, name)) for name in hooks):
        return f"it has none of the methods {', '.join(hooks)}; {where}"
    return None


def _member_fault(target: type, contract: type, name: str, member: Any) -> str | None:
    found = getattr(target, name, None)
    if found is None and hasattr(target, "__getattr__"):
        return None  # its __getattr__ may have what the class lacks
    of_class = isinstance(member, (classmethod, staticmethod))
    if not of_class and not inspect.isfunction(member):
        return None if hasattr(target, name) else _unextended(contract, name)
    asked = getattr(contract, name)
    if found is None and not is_offered(asked):
        return _unextended(contract, name)
    arguments = _arguments(asked)
    if not callable(found) or (is_offered(asked) and _is_inherited(target, contract, name)):
        return f"it has no method {name}({', '.join(arguments)})"
    if inspect.iscoroutinefunction(found):
        return f"its {name} is an async def, and core calls it as a plain function"
    is_bound = of_class or not inspect.isfunction(inspect.getattr_static(target, name))
    return _call_fault(found, f"its {name}", arguments, is_bound=is_bound)


def _unextended(contract: type, name: str) -> str:
    return f"it does not extend hookline.core.contracts.{contract.__name__}, which has {name}"


def _is_inherited(target: type, contract: type, name: str) -> bool:
    return inspect.getattr_static(target, name) is inspect.getattr_static(contract, name)


def _arguments(method: Any, *, all_of_them: bool = False) -> list[str]:
    """Names of the arguments that core always passes; with all_of_them, also those with a default, which core passes
    only to classes that declare their use.
    """
    parameters = inspect.signature(method).parameters.values()
    return [one.name for one in parameters if one.name != "self" and (all_of_them or one.default is one.empty)]


def _call_fault(target: Any, what: str, arguments: list[str], *, is_bound: bool = True) -> str | None:
    try:
        signature = _signature(target)
    except (TypeError, ValueError):
        return None  # written in C, or otherwise without a signature
    try:
        signature.bind(*([] if is_bound else [None]), *arguments)
    except TypeError as error:
        return f"{what} cannot be called with ({', '.join(arguments)}): {error}"
    return None


def _signature(target: Any) -> inspect.Signature:
    """Its annotations stay text: from Python 3.14 on they may use names that only a type checker imports."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(target, annotation_format=Format.STRING)
    return inspect.signature(target)
