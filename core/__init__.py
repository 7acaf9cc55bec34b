"""The engine. Import it as `hookline.core`; the names that users need are in `hookline`.

Under the name `core`, as in `python -m core.run` and `from core import LLM`, this file only passes on: to the commands,
which are folders here, and to the names of `hookline`. Everything else has one name, so that no class exists twice.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

COMMANDS = ("run", "serve", "batch", "bench", "report", "simulate", "warm", "info", "new")
_PUBLIC_NOW = {
    **dict.fromkeys(("batch", "contracts", "hookspecs", "parallel", "peer_memory", "rows", "weights"), "contracts"),
    **dict.fromkeys(("expert_layers", "layers", "rope", "rope_settings", "vocab_layers"), "layers"),
    "moves": "scheduling",
    "sampling": "sampling_params",
}
"""Where the public names of plugin interface 1 are now."""


class _OneName(MetaPathFinder):
    """Refuses modules of `core` other than the commands: they are `hookline.core`'s."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """None lets the ordinary finders look.

        Raises: ImportError with the right name.
        """
        package, _, name = fullname.partition(".")
        if package == "core" and name and name.removesuffix(".__main__") not in COMMANDS:
            public = _PUBLIC_NOW.get(name.partition(".")[0], name)
            raise ImportError(f"there is no module {fullname}; import hookline.core.{public}", name=fullname)


if __name__ != "hookline.core":
    import hookline.core

    __path__ = hookline.core.__path__
    sys.meta_path.insert(0, _OneName())

    def __getattr__(name: str) -> Any:
        import hookline

        return getattr(hookline, name)
