"""A child process that is told its task later."""

import os
import sys

from hookline.core.util.task_child import TaskChild

ECHO = "import sys; line = sys.stdin.readline(); print('no task' if not line else line.strip())"


def test_a_child_is_told_its_task_once_it_is_known():
    child = TaskChild([sys.executable, "-c", ECHO])
    child.give("compile this")
    assert child.process.stdout.read() == "compile this\n" and child.process.wait() == 0
    child.end()


def test_a_child_that_is_dismissed_learns_that_no_task_comes():
    child = TaskChild([sys.executable, "-c", ECHO])
    child.dismiss()
    assert child.process.stdout.read() == "no task\n"
    child.end()


def test_a_child_that_has_ended_takes_no_task_and_stops_nobody():
    child = TaskChild([sys.executable, "-c", "raise RuntimeError('no')"])
    child.process.wait()
    child.give("x" * 2**20)
    child.end()


def test_its_processes_end_with_it():
    code = "import os, time; print(os.fork(), flush=True); time.sleep(600)"
    child = TaskChild([sys.executable, "-c", code], {**os.environ, "HOME": "/"})
    assert child.process.stdout.readline().strip().isdigit()
    child.end()
    assert child.process.returncode == -9
