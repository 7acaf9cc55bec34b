"""What stands between an engine and its executor passes on what it does not note."""

from hookline.core.bench.recorder import StepRecorder
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler


def test_who_asks_to_hear_of_a_stuck_step_is_heard_while_steps_are_recorded():
    engine, told = fake_engine(PlainScheduler()), []
    engine.executor.tell_if_stuck = told.append
    with StepRecorder(engine, lambda: 0.0):
        engine.tell_if_stuck(print)
    assert told == [print]
