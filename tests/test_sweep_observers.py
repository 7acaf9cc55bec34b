"""A sweep with an observer and a load of two tenants: where an observer's files go, and what each job's figures say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.config.job_folder import JOB_FOLDER, job_folder
from hookline.core.sweep.results import read_results

ROOT = Path(__file__).parents[1]
NOTES = """
import json
from hookline.core.contracts import Observer, hookimpl

API_VERSION = 2

class Notes(Observer):
    def __init__(self, config): self.tags = []
    def on_request_begin(self, info): self.tags.append(dict(info.tags))
    def on_engine_stop(self, engine):
        with open(engine.job_folder / "notes.json", "w") as file: json.dump(self.tags, file)

@hookimpl
def register_observers(register):
    register("notes", "notes_of_a_test:Notes")
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "notes_of_a_test.py").write_text(NOTES)
    environ = {
        **os.environ,
        "HOOKLINE_PLUGINS": "notes_of_a_test",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    load = ["workload=two_tenants", "workload.num_prompts=40", "repeats=1", "observers=[notes]"]
    objective = ["objective=by_tag.class.chat.ttft_s.p99"]
    jobs = ["workload.classes.0.share=95", "hydra.sweep.dir=sweep", *objective]
    command = [sys.executable, "-m", "core.simulate", "-m", *load, *jobs]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "sweep"


@pytest.mark.slow
def test_an_observer_is_told_the_folder_of_its_job(sweep):
    [record] = read_results(sweep)
    lines = (sweep / record["folder"] / "requests.jsonl").read_text().splitlines()
    noted = json.loads((sweep / record["folder"] / "notes.json").read_text())
    assert sorted(map(str, noted)) == sorted(str(json.loads(line)["tags"]) for line in lines)


@pytest.mark.slow
def test_a_jobs_figures_are_by_its_classes_and_one_of_them_can_be_the_objective(sweep):
    [record] = read_results(sweep)
    chat = record["metrics"]["by_tag"]["class"]["chat"]
    assert 35 <= chat["requests"] <= 40 and record["config"]["workload"]["classes"][0]["share"] == 95
    assert record["objective"]["value"] == chat["ttft_s"]["p99"]


def test_outside_of_a_sweep_there_is_no_job_folder(monkeypatch):
    monkeypatch.delenv(JOB_FOLDER, raising=False)
    assert job_folder() is None
