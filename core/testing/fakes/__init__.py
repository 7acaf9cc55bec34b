"""An engine without a model and what belongs to it, for tests of policies, observers and engines; no torch."""

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
