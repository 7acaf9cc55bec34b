"""An engine that does not start keeps nothing, even while its error is kept."""

import weakref

import pytest

from hookline import LLM
from hookline.core.assembly import worker as assembly
from hookline.core.errors import CapacityError, PluginError
from hookline.core.worker.worker import Worker


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the cache", "the worker"])
def test_a_kept_error_of_a_start_keeps_no_model(where, monkeypatch):
    models, load = [], assembly.load_model

    def loaded(*args):
        model = load(*args)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(assembly, "load_model", loaded)
    engine = {"max_num_seqs": 2}
    if where == "the cache":
        engine["cpu_cache_gib"] = 1e-6
    else:
        monkeypatch.setattr(assembly.LateWork, "end", lambda self: 1 / 0)
    with pytest.raises((CapacityError, ZeroDivisionError)) as caught:
        LLM(engine=engine)
    kept = caught.value
    assert len(models) == 1 and models[0]() is None
    assert kept.__traceback__ is not None


@pytest.mark.parametrize("is_blamed", [False, True], ids=["as it is", "as a plugin's error"])
def test_a_kernel_that_is_too_large_for_the_card_is_told_in_a_line(is_blamed, monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")

    def refused(*arguments):
        try:
            raise errors.OutOfResources(172_032, 101_376, "shared memory")
        except errors.OutOfResources as error:
            if is_blamed:
                raise PluginError("model 'qwen3' fails in forward") from error
            raise

    monkeypatch.setattr(assembly, "_make_ready", refused)
    with pytest.raises(CapacityError) as caught:
        LLM(engine={"max_num_seqs": 2}, device="cpu")
    needed = "a kernel needs 172,032 bytes of shared memory for a program, and this card has 101,376"
    assert str(caught.value) == f"kernels=torch: {needed}; choose kernels=torch"


def test_a_worker_that_does_not_get_ready_is_closed_whoever_refers_to_it(monkeypatch):
    workers, closed = [], []

    def not_ready(resolved, worker, *others):
        workers.append(worker)
        raise ZeroDivisionError

    close = Worker.close
    monkeypatch.setattr(assembly, "_make_ready", not_ready)
    monkeypatch.setattr(Worker, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(ZeroDivisionError):
        LLM(engine={"max_num_seqs": 2})
    assert len(workers) == 1 and closed == workers and not hasattr(workers[0].runner, "model")
