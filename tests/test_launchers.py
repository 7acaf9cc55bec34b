"""Sweeps through the launchers and the sweeper of Hydra's ecosystem, small, on the bundled checkpoint.

Each needs its extra: pip install "hookline[joblib,submitit,ray,optuna]". Without it the test is skipped and says so.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from hookline.core.config.hydra_errors import explain
from hookline.core.plugin.host import PluginHost
from hookline.core.simulate.command import main as simulate
from hookline.core.sweep import hydra_settings
from hookline.core.sweep.hydra_settings import let_join_ray
from hookline.core.sweep.results import read_results
from tests.ray_folder import cluster_of, ray_folder

ROOT = Path(__file__).parents[1]
SMALL = ["workload.num_prompts=2", "workload.output_len=[1,2]", "repeats=1", "hydra.sweep.dir=sweep"]
LAUNCHERS = {"joblib": ["hydra.launcher.n_jobs=2"], "submitit_local": [], "ray": []}
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("submitit_local", "ray")]


def needs(module):
    if find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{module}") is None:
        pytest.skip(f"{module} is not installed; its extra brings it")


COMMAND = [sys.executable, "-m", "core.bench", "-m"]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def bench(folder, *arguments):
    command = [*COMMAND, *arguments, *SMALL]
    return subprocess.run(command, cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """The argument that joins a Ray cluster, which was started in another folder than the sweep is.

    It has a GPU as far as Ray is told: jobs get it, and find a CPU.
    """
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    size = dict(num_cpus=2, num_gpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
    with ray_folder():
        made = cluster_of(size)
        yield f"hydra.launcher.ray.init.address={made.address}"
        made.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("launcher", ["joblib", *NIGHTLY])
def test_jobs_run_where_a_launcher_puts_them_and_report_as_usual(launcher, tmp_path, request):
    needs(f"hydra_{launcher.removesuffix('_local')}_launcher")
    more = [request.getfixturevalue("cluster")] if launcher == "ray" else LAUNCHERS[launcher]
    done = bench(tmp_path, f"hydra/launcher={launcher}", *more, "engine.max_num_seqs=0,8")
    assert done.returncode == 1, done.stderr
    failed, finished = read_results(tmp_path / "sweep")
    assert failed["status"] == "failed" and failed["error"].startswith("engine.max_num_seqs=0 must be at least 1")
    assert finished["status"] == "done" and finished["metrics"]["output_tokens"] >= 2
    assert (tmp_path / "sweep" / finished["folder"] / "steps.npz").exists()
    assert "hookline: 1 of 2 jobs succeeded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_an_interrupt_from_the_terminal_ends_submitits_local_jobs_and_is_one_line(tmp_path):
    needs("hydra_submitit_launcher")
    command = [*COMMAND, "hydra/launcher=submitit_local", "workload=mixed256", "seed=1,2", "hydra.sweep.dir=sweep"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRON, stderr=subprocess.PIPE, text=True, process_group=0)
    logs = [tmp_path / f"sweep/{number}/log.txt" for number in range(2)]
    deadline = time.monotonic() + 120
    while not all(log.exists() for log in logs) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the controllers and the jobs, too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "hookline: interrupted" and "Traceback" not in err
    while time.monotonic() < deadline:  # until the last of them is gone
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("processes of the sweep outlive it")


@pytest.mark.slow
def test_a_study_goes_on_after_a_failed_trial_and_finds_the_largest_objective(tmp_path):
    needs("hydra_optuna_sweeper")
    # Not by the grid, whose order is random: optuna breaks off a study if the last trial of a grid fails.
    study = ["hydra/sweeper=study", "hydra.sweeper.n_trials=3", "hydra/sweeper/sampler=random"]
    study += ["hydra.sweeper.sampler.seed=1"]
    study += ["hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine"]
    done = bench(tmp_path, *study, "engine.max_num_seqs=choice(0,1,8)", "objective=running.max")
    assert done.returncode == 1, done.stderr
    statuses = {record["overrides"][0]: record["status"] for record in read_results(tmp_path / "sweep")}
    assert statuses == {
        "engine.max_num_seqs=0": "failed",
        "engine.max_num_seqs=1": "done",
        "engine.max_num_seqs=8": "done",
    }
    best = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert best["best_params"] == {"engine.max_num_seqs": 8}
    values = [record["objective"]["value"] for record in read_results(tmp_path / "sweep") if record["status"] == "done"]
    assert best["best_value"] == max(values)
    assert (tmp_path / "study.db").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_a_study_without_a_single_success_still_says_what_went_wrong(tmp_path):
    needs("hydra_optuna_sweeper")
    done = bench(tmp_path, "hydra/sweeper=study", "hydra.sweeper.n_trials=1", "engine.max_num_seqs=choice(0,-1)")
    assert done.returncode == 2
    assert "hookline: 0 of 1 jobs succeeded" in done.stderr
    assert done.stderr.splitlines()[-1] == "hookline: error: no trial gave a figure to compare, so there is no best one"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Optuna's own
@pytest.mark.parametrize(
    ("storage", "shown", "cause"),
    [
        ("sqlite:////nowhere/x.db", "sqlite:////nowhere/x.db", "unable to open database file"),
        ("nothing", "nothing", "Could not parse SQLAlchemy URL"),
        ("wrong://me:secret@host/x", "wrong://...@host/x", "wrong"),
    ],
)
def test_a_studys_storage_that_cannot_be_opened_is_one_line(storage, shown, cause, tmp_path, capsys, monkeypatch):
    needs("hydra_optuna_sweeper")
    monkeypatch.chdir(tmp_path)
    study = ["-m", "hydra/sweeper=study", "objective=output_tok_s", "engine.max_num_seqs=range(1,2)"]
    assert simulate([*study, f"hydra.sweeper.storage={storage}"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"hookline: error: hydra.sweeper.storage={shown} cannot be used: ") and cause in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("more", "is_told"),
    [
        ([], True),
        (["hydra.launcher.ray.init.address=auto"], True),
        (["hydra.launcher.ray.init.address=local"], False),
        (["+hydra.launcher.ray.init.object_store_memory=9"], False),
    ],
)
def test_a_cluster_that_runs_is_not_asked_for_memory_which_it_would_refuse(more, is_told, monkeypatch):
    monkeypatch.setattr(hydra_settings, "cluster_address", lambda asker: None)
    told = let_join_ray(["hydra/launcher=ray", *more])
    assert told[1 + len(more) :] == ["+hydra.launcher.ray.init.object_store_memory=null"] * is_told
    assert let_join_ray(["tp=1,2", *more]) == ["tp=1,2", *more]


@pytest.mark.parametrize(
    ("option", "extra"),
    [
        ("hydra/launcher/joblib", "joblib"),
        ("hydra/launcher/submitit_slurm", "submitit"),
        ("hydra/launcher/ray", "ray"),
        ("hydra/sweeper/optuna", "optuna"),
    ],
)
def test_a_missing_extra_is_named(option, extra):
    from hydra.errors import MissingConfigException

    error = explain(MissingConfigException("not there", option, ["basic"]), PluginHost.load([], {}))
    group, _, name = option.rpartition("/")
    assert str(error) == f"{group}: '{name}' is not installed; pip install \"hookline[{extra}]\" brings it"
    other = explain(MissingConfigException("not there", "hydra/launcher/cloud", ["basic"]), PluginHost.load([], {}))
    assert "pip install" not in str(other)
