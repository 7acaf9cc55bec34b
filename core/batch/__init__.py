"""`hookline batch input.jsonl output.jsonl`: answers a file of requests in OpenAI's batch format, without a server.

Or a folder of such files and of parquet, here or on Ray.

Bare at import. The requests go to the endpoints of `hookline serve` in this process, so a row is answered as a server
would. Exit codes: 0 every line is answered; 2 some are not, each with its reason in the output, or a user's error.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from hookline.core.batch.command import main

    return main(arguments)
