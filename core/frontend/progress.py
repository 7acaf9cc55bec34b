"""A progress bar with live prefill and decode tokens/s. Knows counts, no engine."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH_S = 0.5


class Progress:
    """Counts finished requests; the rates are those of the last half second."""

    def __init__(self, num_requests: int) -> None:
        from tqdm.auto import tqdm  # a notebook gets a bar of its own

        self._bar: Any = tqdm(total=num_requests, unit="request", dynamic_ncols=True, leave=False, file=sys.stderr)
        self._since_s = time.monotonic()
        self._num_prefill = self._num_decode = 0

    def update(self, num_finished: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Add what one step did."""
        self._num_prefill += num_prefill_tokens
        self._num_decode += num_decode_tokens
        elapsed_s = time.monotonic() - self._since_s
        if elapsed_s >= REFRESH_S:
            self._bar.set_postfix_str(
                f"prefill {self._num_prefill / elapsed_s:.0f} tok/s, decode {self._num_decode / elapsed_s:.0f} tok/s",
                refresh=not num_finished,
            )
            self._since_s, self._num_prefill, self._num_decode = time.monotonic(), 0, 0
        if num_finished:
            self._bar.update(num_finished)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()


def progress_bar(num_requests: int) -> Progress | None:
    """A bar on standard error, or None if that is not a terminal."""
    return Progress(num_requests) if sys.stderr is not None and sys.stderr.isatty() else None
