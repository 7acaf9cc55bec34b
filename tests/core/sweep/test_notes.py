"""Where jobs of a sweep write what its own process sums up."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

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
