"""What a job of a sweep asks Ray for, by a Ray that is made up; tests/test_launchers.py has a real one."""

from types import SimpleNamespace

import pytest

from hookline.core.sweep.ray_gpus import num_gpus, on_gpus


class FakeRay:
    """A cluster of nodes with so many GPUs each, seen from a task that was assigned some resources."""

    def __init__(self, *gpus, task="t", assigned=(), is_initialized=True, fault=None):
        self.asked, self.fault = [], fault
        self.exceptions = SimpleNamespace(RayError=ConnectionError)
        self.is_initialized = lambda: is_initialized
        self.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 8, **({"GPU": one} if one else {})}} for one in gpus]
        context = SimpleNamespace(get_task_id=lambda: task, get_assigned_resources=lambda: dict(assigned))
        self.get_runtime_context = lambda: context

    def remote(self, **resources):
        self.asked.append(resources)

        def task(run):
            def result():
                if self.fault is not None:
                    raise self.fault
                return run("there")

            done = SimpleNamespace(future=lambda: SimpleNamespace(result=result))
            return SimpleNamespace(remote=lambda *arguments: done)

        return task


def run(place="here"):
    return {"place": place}


def placed(monkeypatch, ray, **tree):
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    return on_gpus(run, {"device": "auto", "tp": 1, **tree})()


@pytest.mark.parametrize(("tree", "gpus"), [({}, 1), ({"tp": 4}, 4), ({"tp": 2, "pp": 2}, 4)])
def test_a_job_gets_a_gpu_for_each_of_its_ranks(monkeypatch, tree, gpus):
    ray = FakeRay(0, 4)
    assert placed(monkeypatch, ray, **tree) == {"place": "there"}
    assert ray.asked == [{"num_cpus": 0, "num_gpus": gpus, "max_retries": 0}]


@pytest.mark.parametrize(
    ("ray", "tree"),
    [
        (FakeRay(0, 0), {}),
        (FakeRay(4), {"device": "cpu"}),
        (FakeRay(4), {"engine": {"executor": "ray"}}),
        (FakeRay(4, assigned={"CPU": 1.0, "GPU": 1.0}), {}),
        (FakeRay(4, task=None), {}),
        (FakeRay(4, is_initialized=False), {}),
        (None, {}),
    ],
    ids=["no GPU", "on the CPU", "asks Ray itself", "has some", "in no task", "Ray is not in use", "no Ray"],
)
def test_a_job_runs_where_it_is_if_it_needs_no_other_place(monkeypatch, ray, tree):
    assert placed(monkeypatch, ray, **tree) == {"place": "here"} and not (ray and ray.asked)


def test_a_job_that_fits_on_no_node_fails_and_does_not_wait(monkeypatch):
    failed = placed(monkeypatch, FakeRay(2, 4), tp=8)
    assert failed["status"] == "failed" and "needs 8 GPUs (tp * pp) on one node, and no node" in failed["error"]
    assert failed["error"].endswith("has more than 4")


LOST = "Ray lost the job: ConnectionError: the node died"


def test_a_job_whose_node_is_lost_fails_and_the_sweep_goes_on(monkeypatch):
    failed = placed(monkeypatch, FakeRay(4, fault=ConnectionError("the node died")))
    assert failed == {"status": "failed", "error": LOST, "exit_code": None}


def test_values_that_are_none_are_left_to_the_job():
    assert num_gpus({"tp": "many"}) == num_gpus({"tp": 0}) == 1
