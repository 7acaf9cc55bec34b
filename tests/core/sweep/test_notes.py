"""Where jobs of a sweep write what its own process sums up."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hookline.core.run.command import main
from hookline.core.simulate.command import main as simulate
from hookline.core.sweep import sweep
from hookline.core.sweep.hydra_settings import fixed_arguments
from hookline.core.sweep.results import read_all


@pytest.mark.parametrize(("arguments", "is_shared"), [(["hydra/launcher=ray"], True), (["tp=1,2"], False)])
def test_jobs_on_other_nodes_write_notes_where_the_results_are_too(arguments, is_shared, tmp_path, monkeypatch):
    places = []

    def compose(own, host, keys, name, run):
        run.notes.touch()
        places.append(run.notes.parent.parent)

    monkeypatch.setattr(sweep, "compose", compose)
    monkeypatch.chdir(tmp_path)
    assert sweep.run_sweep(arguments, SimpleNamespace(for_children=dict), object, "bench") == 0
    assert places == [tmp_path if is_shared else Path(tempfile.gettempdir())]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_sweep_into_the_folder_of_a_single_run_adds_its_jobs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert simulate(["records=mine", "result=mine/results.jsonl"]) == 0
    assert simulate(["-m", "engine.max_num_seqs=4", "hydra.sweep.dir=mine"]) == 0
    assert [one["folder"] for one in read_all(tmp_path / "mine")] == [".", "0"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["objective=ttft_s.p77"], "no metric named objective=ttft_s.p77. Did you mean 'ttft_s.p99'? Available: "),
        (["objective=goodput_s"], "objective=goodput_s needs an objective of service; set slo.ttft_s, slo.tpot_s or "),
        (["objective=goodput_s", "workload=poisson"], "objective=goodput_s needs an objective of service; set "),
    ],
)
def test_a_study_of_an_objective_that_no_trial_has_is_refused_before_one_runs(arguments, message, tmp_path, capsys):
    study = ["-m", "hydra/sweeper=study", "engine.max_num_seqs=choice(1,2)", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert simulate([*study, *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hookline: error: {message}")
    assert not (tmp_path / "sweep").exists()


def test_what_all_jobs_share_is_known_unless_a_key_that_counts_is_swept():
    study = ["-m", "hydra/sweeper=study", "hydra.sweeper.n_trials=2", "engine.max_num_seqs=choice(1,2)"]
    fixed = ["objective=goodput_s", "prompt=a,b"]
    assert fixed_arguments([*study, *fixed], ["slo"]) == fixed
    assert fixed_arguments([*study, "slo.ttft_s=choice(0.1,0.2)"], ["slo"]) is None
    assert fixed_arguments([*study, "--help"], ["slo"]) is None


@pytest.mark.parametrize("sweeper", ["study", "optuna", "nevergrad"])
def test_a_study_of_jobs_that_measure_nothing_is_refused_before_one_runs(sweeper, capsys):
    assert main(["-m", f"hydra/sweeper={sweeper}", "prompt=a", "sampling.max_tokens=2,3"]) == 2
    assert capsys.readouterr().err == (
        f"hookline: error: hydra/sweeper={sweeper} looks for the best figure, and the jobs of `hookline run` measure "
        "none; use `hookline bench -m`, or leave it out\n"
    )
