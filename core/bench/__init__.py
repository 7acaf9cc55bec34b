"""`hookline bench workload=NAME`: the speed of a configuration under a load, as a table and one JSON line.

Bare at import. Start-up and a warm-up request are measured apart; the best of the timed repetitions counts. A prompt
is a list of token ids and no text is made, so the engine alone is timed.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.bench.command import main

    return main(arguments)
