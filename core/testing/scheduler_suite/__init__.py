"""The conformance suite of scheduler policies, and loads for tests of your own."""

from hookline.core.testing.scheduler_suite.suite import (
    JOININGS,
    MAX_STEPS,
    Gaps,
    RandomLoad,
    SchedulerSuite,
    drain,
    endless_steps,
    look,
)

__all__ = ["JOININGS", "MAX_STEPS", "Gaps", "RandomLoad", "SchedulerSuite", "drain", "endless_steps", "look"]
