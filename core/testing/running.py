"""Runs a conformance suite without pytest, and returns the failed tests and their messages.

For testing the suites themselves against deliberately broken plugins.
"""

from __future__ import annotations

from typing import Any

import pytest


def failures(suite_class: type) -> list[str]:
    """Run the test methods of a suite one by one; returns `test_name: message` for each that fails: see `failure`."""
    names = [name for name in dir(suite_class) if name.startswith("test_")]
    assert names, f"{suite_class.__name__} has no tests"
    return [f"{name}: {message}" for name in names if (message := failure(suite_class, name))]


def failure(suite_class: type, name: str) -> str:
    """Run the test method of this name on a fresh instance of a suite; returns its message, empty if it does not fail.

    A skipped test counts as passed; any exception counts as a failure.
    """
    suite: Any = suite_class()
    test = getattr(suite, name)
    try:
        test()
    except pytest.skip.Exception:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
