"""Waiting for one of several things."""

from __future__ import annotations

import asyncio
from typing import Any


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done; none is cancelled."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
