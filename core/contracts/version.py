"""The version of the plugin interface."""

from __future__ import annotations

API_VERSION = 1
"""Version of everything in this file and in `core/contracts/hooks.py`; a plugin states the one it was written for."""
