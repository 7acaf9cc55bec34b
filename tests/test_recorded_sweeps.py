"""The sweeps under docs/reports: their files can be read, and their figures follow from their records."""

from pathlib import Path

import pytest

from hookline.core.bench.files import STEPS, read_recording
from hookline.core.bench.metrics import NUMBERS, summarise
from hookline.core.bench.slo import Slo
from hookline.core.sweep.results import RESULTS, read_results

REPORTS = sorted(path.parent for path in (Path(__file__).parents[1] / "docs/reports").glob(f"*/{RESULTS}"))
RECORDED = [folder for folder in REPORTS if list(folder.glob(f"*/{STEPS}"))]
"""Those with records; of the others the results alone were kept."""


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_every_figure_of_a_recorded_sweep_follows_from_its_records(folder):
    done = [record for record in read_results(folder) if record["status"] == "done"]
    assert len(done) >= 4
    recorded = [record for record in done if (folder / record["folder"]).exists()]
    assert recorded
    for record in recorded:
        recording = read_recording(folder / record["folder"])
        again, stated = summarise(recording, Slo(**record["config"]["slo"])), record["metrics"]
        assert {name: again[name] for name in NUMBERS} == {name: stated[name] for name in NUMBERS}
        for name in ("ttft_s", "itl_s", "e2e_s", "busy_s"):
            assert again[name] == pytest.approx(stated[name], abs=2e-6)
        assert again["step_times"]["decode"]["steps"] == stated["step_times"]["decode"]["steps"]


def test_there_is_a_recorded_sweep():
    assert RECORDED
