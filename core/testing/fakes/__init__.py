"""An engine without a model, and its parts, for tests of policies, observers and engines; without torch."""

from hookline.core.testing.fakes.engine import (
    FakeClock,
    FakeExecutor,
    FakeHandle,
    check_engine,
    completion,
    fake_engine,
    watched_by,
)

__all__ = ["FakeClock", "FakeExecutor", "FakeHandle", "check_engine", "completion", "fake_engine", "watched_by"]
