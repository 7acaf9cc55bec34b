"""Runs a conformance suite without pytest, and returns the failed tests and their messages.

For testing the suites themselves against deliberately broken plugins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def failures(suite_class: type) -> list[str]:
    """A line for each test of a suite that fails: see `each_failure`."""
    return list(each_failure(suite_class))


def each_failure(suite_class: type) -> Iterator[str]:
    """Run the test methods of a suite one by one, each on a fresh instance; yields `test_name: message` for failures.

    A skipped test counts as passed; any exception counts as a failure.
    """
    names = [name for name in dir(suite_class) if name.startswith("test_")]
    assert names, f"{suite_class.__name__} has no tests"
    for name in names:
        if message := _failure(suite_class, name):
            yield f"{name}: {message}"


def _failure(suite_class: type, name: str) -> str:
    suite: Any = suite_class()
    try:
        getattr(suite, name)()
    except pytest.skip.Exception:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
