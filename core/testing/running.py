"""Runs a conformance suite without pytest: which of its tests fail, and with what message.

For testing the suites themselves against deliberately broken plugins. Knows no plugin kind.
"""

from __future__ import annotations

from typing import Any

import pytest


def failures(suite_class: type) -> list[str]:
    """Run every test method of a suite on a fresh instance; one line per failing test, `test_name: message`.

    A skipped test counts as passed; any exception counts as a failure.
    """
    names = [name for name in dir(suite_class) if name.startswith("test_")]
    assert names, f"{suite_class.__name__} has no tests"
    return [f"{name}: {message}" for name in names if (message := _failure(suite_class, name))]


def _failure(suite_class: type, name: str) -> str:
    suite: Any = suite_class()
    try:
        getattr(suite, name)()
    except pytest.skip.Exception:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
