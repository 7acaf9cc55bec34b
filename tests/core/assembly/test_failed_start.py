"""An engine that does not start keeps nothing, even while its error is kept."""

import weakref

import pytest

from hookline import LLM
from hookline.core.assembly import worker as assembly
from hookline.core.errors import CapacityError
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
