"""Where jobs of a sweep write what its own process sums up."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hookline.core.run import main
from hookline.core.sweep import sweep


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


@pytest.mark.parametrize("sweeper", ["study", "optuna", "nevergrad"])
def test_a_study_of_jobs_that_measure_nothing_is_refused_before_one_runs(sweeper, capsys):
    assert main(["-m", f"hydra/sweeper={sweeper}", "prompt=a", "sampling.max_tokens=2,3"]) == 2
    assert capsys.readouterr().err == (
        f"hookline: error: hydra/sweeper={sweeper} looks for the best figure, and the jobs of `hookline run` measure "
        "none; use `hookline bench -m`, or leave it out\n"
    )
