"""The engine. Import it as `hookline.core`; the names that users need are in `hookline`.

Under the name `core`, as in `python -m core.run` and `from core import LLM`, this file only passes on: to the commands,
which are folders here, and to the names of `hookline`. Everything else has one name, so that no class exists twice.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

COMMANDS = ("run", "serve", "batch", "bench", "report", "simulate", "warm", "info", "new")
_CONTRACTS = ("hookspecs", "needs", "observers", "parallel", "peer_memory", "rows", "weights")
_MOVED = {
    **dict.fromkeys(("async_llm", "llm"), "hookline"),
    **dict.fromkeys(_CONTRACTS, "hookline.core.contracts"),
    **dict.fromkeys(("expert_layers", "rope", "rope_settings", "vocab_layers"), "hookline.core.layers"),
    "logprobs": "hookline.core.outputs",
    "moves": "hookline.core.scheduling",
    "sampling": "hookline.core.sampling_params",
}
"""Modules of `core` in plugin interface 1, and where their names are now."""


class _OneName(MetaPathFinder):
    """Refuses modules of `core` other than the commands: they are `hookline.core`'s."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """None lets the ordinary finders look.

        Raises: ImportError with the right name.
        """
        package, _, name = fullname.partition(".")
        if package == "core" and name and name.removesuffix(".__main__") not in COMMANDS:
            raise ImportError(f"there is no module {fullname}; {_instead(name)}", name=fullname)


def _instead(name: str) -> str:
    """What to do in place of importing `core.NAME`."""
    first = name.partition(".")[0]
    if first in _MOVED:
        return f"import {_MOVED[first]}"
    if PathFinder.find_spec(f"hookline.core.{first}", __path__):
        return f"import hookline.core.{name}"
    return "what plugins may import is in hookline.core.contracts, layers, scheduling, parsing and testing"


if __name__ != "hookline.core":
    import hookline.core

    __path__ = hookline.core.__path__
    sys.meta_path.insert(0, _OneName())

    def __getattr__(name: str) -> Any:
        import hookline

        return getattr(hookline, name)
