"""Which code this is: the commit of the clone it runs from, if it runs from one."""

from __future__ import annotations

import subprocess
from pathlib import Path


def revision() -> str | None:
    """The commit's hash, with "-dirty" if files were changed since; None without a clone or without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
