"""`hookline serve`: an OpenAI-compatible HTTP server around one engine.

Bare at import. Endpoints ask an `EngineClient`, whether the engine behind it runs in this process or in one of its own.
docs/serving.md explains the command.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.serve.command import main

    return main(arguments)
