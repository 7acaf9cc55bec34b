"""The engine. Import it as `hookline.core`; the names that users need are in `hookline`.

In a clone of the repository this folder is also found as `core`. Under that name it has the commands
(`python -m core.run` runs commands/run.py) and the names of `hookline` (`from core import LLM`), and nothing else:
every other module has one name, so that no class exists twice. Wheels carry `hookline` only, without commands/.
"""

COMMANDS = ("run", "chat", "serve", "batch", "bench", "report", "simulate", "warm", "quantize", "info", "new")

if __name__ != "hookline.core":
    from pathlib import Path
    from typing import Any

    __path__ = [str(Path(__file__).with_name("commands"))]

    def __getattr__(name: str) -> Any:
        import hookline

        return getattr(hookline, name)
