"""What is compiled or captured after an engine was ready is counted and named; before that, and after its end, not."""

import logging
import subprocess
import sys

import pytest

from hookline.core.worker.startup.late_work import CAPTURED, COMPILED, FETCHED, KINDS, LateWork, not_late, note


@pytest.fixture
def late():
    work = LateWork()
    yield work
    work.end()


def test_nothing_is_counted_before_ready_nor_after_the_end(late):
    note(COMPILED, "kernel", 1.0)
    assert late.counts == dict.fromkeys(KINDS, 0)
    late.begin()
    note(COMPILED, "kernel", 1.0)
    late.end()
    note(COMPILED, "kernel", 1.0)
    assert late.counts[COMPILED] == 1 and late.seconds[COMPILED] == 1.0


def test_each_late_piece_of_work_is_a_warning_with_its_name_and_seconds(late, caplog):
    late.begin()
    with caplog.at_level(logging.WARNING, logger="hookline"):
        note(CAPTURED, "of cuda:0", 0.25)
    assert caplog.messages == ["a CUDA graph was captured after the engine was ready: of cuda:0, 0.250 s"]


def test_what_a_start_does_behind_its_worker_is_not_late(late):
    late.begin()
    with pytest.raises(ValueError, match="it fails"), not_late():
        note(CAPTURED, "of cuda:0", 0.25)
        raise ValueError("it fails")
    assert not any(late.counts.values())
    note(CAPTURED, "of cuda:0", 0.25)
    assert late.counts[CAPTURED] == 1


def test_every_engine_that_is_ready_counts(late):
    other = LateWork()
    late.begin()
    other.begin()
    note(COMPILED, "kernel", 1.0)
    other.end()
    note(COMPILED, "kernel", 1.0)
    assert (late.counts[COMPILED], other.counts[COMPILED]) == (2, 1)


def test_a_start_tells_which_kernels_it_compiled_although_they_were_compiled_ahead():
    work = LateWork(is_late=False, ahead={"_decode-1", "_decode-2", "_norm-3"})
    work.begin()
    note(FETCHED, "_norm", 0.1)
    note(COMPILED, "_new", 1.0, "_new-4")
    assert work.compiled_twice is None
    note(COMPILED, "_decode", 1.0, "_decode-1")
    note(COMPILED, "_decode", 0.5, "_decode-2")
    work.end()
    assert work.compiled_twice.startswith("compiled again although compiled ahead, 1.5 s: _decode 2; Triton's cache")


COMPILES = """
import triton, triton.language as tl
from hookline.core.prebuild.pretended import CARDS, target_of
from hookline.core.worker.startup.late_work import LateWork

@triton.jit
def nothing(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), 0.0)

def build(block):
    with target_of(CARDS["h200"]):
        source = triton.compiler.ASTSource(nothing, {"out_ptr": "*fp32", "BLOCK": "constexpr"}, {(1,): block})
        triton.compile(source, target=triton.runtime.driver.active.get_current_target())

late = LateWork()
build(16)
late.begin()
build(32)
build(32)
print(late.counts)
"""


@pytest.mark.slow
def test_tritons_compilations_are_heard_of_and_told_from_what_its_cache_had(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "compiles.py"  # Triton reads the source of its kernels
    script.write_text(COMPILES)
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert "'kernel_compiled': 1, 'kernel_fetched': 1, 'kernel_loaded': 0" in found.stdout, found.stderr
    told = "a kernel was compiled after the engine was ready: nothing(BLOCK=32, out_ptr not a multiple of 16)"
    assert told in found.stderr
