"""A thread inside a compiler is seen from another one, however deep it is and whatever it calls."""

import threading

import pytest
import torch

from hookline.core.distributed.heartbeat import COMPILERS, is_compiling

CODE = """
def compile(then):
    then()
"""


def call_from(module, then):
    """Call `then` from a function of a module of this name."""
    names = {"__name__": module}
    exec(CODE, names)
    names["compile"](then)


def seen_from_outside(module):
    inside, leave, seen = threading.Event(), threading.Event(), []

    def wait():
        inside.set()
        leave.wait(60)

    thread = threading.Thread(target=call_from, args=(module, wait))
    thread.start()
    inside.wait(60)
    seen.append(is_compiling())
    leave.set()
    thread.join()
    return [*seen, is_compiling()]


def test_a_compiler_is_seen_while_it_runs_and_no_longer():
    for module in COMPILERS:
        assert seen_from_outside(module) == [True, False]
        assert seen_from_outside(f"{module}.deeper") == [True, False]


def test_other_modules_of_the_same_beginning_are_none():
    assert seen_from_outside(f"{COMPILERS[0]}s") == [False, False]
    assert seen_from_outside("hookline.plugins.kernels.slow") == [False, False]


@pytest.mark.slow
def test_torch_compiles_once_and_what_it_compiled_then_runs_uncounted():
    compiling, running = [], []

    def backend(module, inputs):
        compiling.append(is_compiling())
        return module.forward

    @torch._dynamo.disable
    def look(x):
        running.append(is_compiling())
        return x

    @torch.compile(backend=backend)
    def double(x):
        return look(x * 2) + 1

    for _ in range(2):
        assert double(torch.ones(2)).tolist() == [3, 3]
    assert compiling and all(compiling)
    assert running == [False, False]


def test_a_pool_of_compilers_that_waits_for_work_is_none():
    assert seen_from_outside("torch._inductor.compile_worker.subproc_pool") == [False, False]


def test_code_whose_module_has_no_proper_name_is_looked_at_like_any():
    assert seen_from_outside(None) == [False, False]
    assert seen_from_outside(3) == [False, False]
