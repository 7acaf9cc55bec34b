"""Values of hydra.* keys that a sweep cannot use: one line with the key, whoever would have refused them."""

import os
from itertools import product

import pytest

from hookline.core.errors import ConfigError
from hookline.core.simulate.command import main as simulate
from hookline.core.sweep import sweep
from hookline.core.sweep.hydra_settings import check_settings, explain, quiet_controllers
from hookline.core.util.process import called_as

STUDY = ["-m", "hydra/sweeper=study"]


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("hydra.sweeper.direction=minimise", " must be minimize or maximize"),
        ("hydra.sweeper.direction=[minimize,maximize]", " must be minimize or maximize"),
        ("hydra.sweeper.n_trials=0", " must be at least 1"),
        ("hydra.sweeper.n_jobs=0", " must be at least 1"),
        ("hydra.sweeper.max_batch_size=0", " must be at least 1"),
        ("hydra.sweeper.max_failure_rate=2", " must be from 0 to 1"),
        ("hydra.launcher.n_jobs=0", " must be at least 1, or -1: as many as there are cores"),
        ("engine.max_num_seqs=range(8,1)", " holds no value: no step of 1 leads from 8 to 1"),
        ("engine.max_num_seqs=range(1,8,0)", " holds no value: no step of 0 leads from 1 to 8"),
        ("engine.max_num_seqs=range(8,1,-1)", " goes down, which a study cannot; write range(1,8,1)"),
        ("engine.memory_fraction=interval(0.9,0.1)", " holds no value: 0.9 is above 0.1"),
    ],
)
def test_a_value_that_no_study_or_launcher_can_use_is_named_with_its_key(argument, rule):
    with pytest.raises(ConfigError) as caught:
        check_settings([*STUDY, argument])
    assert str(caught.value) == argument + rule


def test_what_is_right_or_hydras_own_to_refuse_passes():
    check_settings(
        [
            *STUDY,
            "hydra.sweeper.direction=minimize",
            "hydra.sweeper.direction=${oc.env:DIRECTION}",
            "hydra.sweeper.n_trials=many",
            "hydra.launcher.n_jobs=-1",
            "engine.max_num_seqs=range(3,3)",  # one value, since Optuna's ranges include the end
            "engine.block_size=range(8,",
            "prompt=range(8,1)",
        ]
    )
    check_settings(["-m", "engine.max_num_seqs=range(8,1,-1)"])


def test_a_range_without_a_value_is_refused_of_a_plain_sweep_too(capsys):
    assert simulate(["-m", "engine.max_num_seqs=range(3,3)"]) == 2
    said = "hookline: error: engine.max_num_seqs=range(3,3) holds no value: no step of 1 leads from 3 to 3\n"
    assert capsys.readouterr().err == said


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """The arguments of the jobs that a sweep of simulations starts, none of which runs."""
    started = []

    def run_child(command, *rest):
        started.append([one for one in command if one.startswith(("scheduler", "engine", "workload"))])
        return {"status": "failed", "error": "not run", "exit_code": 2}

    monkeypatch.setattr(sweep, "run_child", run_child)
    monkeypatch.chdir(tmp_path)
    return started


@pytest.mark.slow
@pytest.mark.parametrize("options", ["scheduler=deadline,fair_share", "scheduler=choice(deadline,fair_share)"])
def test_a_key_of_the_options_that_a_sweep_goes_over_is_theirs_and_not_the_default_options(options, jobs):
    assert simulate(["-m", options, "scheduler.watermark=0.5", "engine.max_num_seqs=4"]) == 1
    names = ["deadline", "fair_share"]
    rest = ["scheduler.watermark=0.5", "engine.max_num_seqs=4"]
    assert jobs == [[f"scheduler={name}", *rest] for name in names]
    jobs.clear()
    assert simulate(["-m", "scheduler=fair_share,fair_share", "scheduler.weights={acme:3}", "scheduler.key=tag"]) == 1
    assert {tuple(job) for job in jobs} == {("scheduler=fair_share", "scheduler.weights={acme:3}", "scheduler.key=tag")}


@pytest.mark.slow
@pytest.mark.parametrize("sweeper", [[], ["hydra/sweeper=study", "hydra.sweeper.n_trials=4"]])
def test_a_key_that_one_of_the_options_does_not_have_is_refused_before_a_job_runs(sweeper, jobs, capsys):
    if sweeper:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra: hookline[optuna]")
    for key in ("late_share", "nonsense"):
        assert simulate(["-m", *sweeper, "scheduler=deadline,chunked", f"scheduler.{key}=0.5"]) == 2
        assert f"hookline: error: unknown key 'scheduler.{key}'." in capsys.readouterr().err
    assert jobs == []


@pytest.mark.parametrize("sweeper", [[], ["hydra/sweeper=study"], ["hydra/sweeper=optuna"]])
@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("engine={max_num_seqs:2},{max_num_seqs:4}", "engine={block_size:16},{block_size:32}", "engine"),
        ("engine={max_num_seqs:2},{max_num_seqs:4}", "engine={block_size:16}", "engine"),
        ("engine={max_num_seqs:2}", "engine={block_size:16}", "engine"),
        ("engine.max_num_seqs=2,4", "engine.max_num_seqs=8", "engine.max_num_seqs"),
        ("engine.max_num_seqs=8", "+engine.max_num_seqs=range(2,4)", "engine.max_num_seqs"),
        ("engine={max_num_seqs:2},{max_num_seqs:4}", "engine.max_num_seqs=8", "engine.max_num_seqs"),
        ("scheduler=chunked,deadline", "scheduler=fair_share", "scheduler"),
    ],
)
def test_a_key_that_is_swept_and_given_again_is_refused_by_every_sweeper(sweeper, first, second, key):
    for one, other in ((first, second), (second, first)):
        with pytest.raises(ConfigError) as caught:
            check_settings(["-m", *sweeper, one, "prompt=a", other])
        assert str(caught.value).startswith(f"{one} and {other} both set {key}, and each job of a sweep would have one")


@pytest.mark.slow
def test_all_combinations_of_keys_that_do_not_meet_are_run(jobs):
    swept = ["engine={max_num_seqs:2},{max_num_seqs:4}", "engine.block_size=16,32", "engine.prefix_caching=true"]
    assert simulate(["-m", *swept, "tp=1", "tp=1"]) == 1
    assert [job[:2] for job in jobs] == [
        [f"engine={{max_num_seqs:{seqs}}}", f"engine.block_size={size}"] for seqs, size in product((2, 4), (16, 32))
    ]


HYDRAS, OURS = "/site-packages/hydra/core/utils.py", "/site-packages/hookline/core/run/prompts.py"


def raised(error, place):
    """The error as it comes out of code in that file."""
    with pytest.raises(type(error)):
        exec(compile("raise error", place, "exec"), {"error": error})
    return error


@pytest.mark.parametrize(
    ("folder", "path", "place", "is_told"),
    [
        ("here", "here/1", HYDRAS, True),
        ("/a/b", "/a", HYDRAS, True),
        ("here", "/elsewhere/x", HYDRAS, False),
        ("here", "here/prompts.txt", OURS, False),
        ("here-${now:%H}", "here-09/1", HYDRAS, True),
        ("here-${now:%H}", "there/1", HYDRAS, False),
    ],
)
def test_of_a_missing_file_the_sweeps_folder_is_blamed_only_where_hydra_makes_it(folder, path, place, is_told):
    error = raised(FileNotFoundError(2, os.strerror(2), path), place)
    assert (explain(error, [f"hydra.sweep.dir={folder}"]) is not None) is is_told


def test_errors_of_other_files_are_not_the_sweeps_folders():
    assert explain(BrokenPipeError(32, os.strerror(32)), []) is None
    assert explain(ValueError("other"), ["hydra.sweeper.storage=sqlite:///x.db"]) is None


def test_the_processes_beside_submitits_local_jobs_say_nothing_of_an_interrupt():
    local = ["-m", "hydra/launcher=submitit_local", "tp=1,2"]
    assert quiet_controllers(local) == [*local, "+hydra.launcher.setup=['exec 2>/dev/null']"]
    own = [*local, "+hydra.launcher.setup=[module load cuda]"]
    assert quiet_controllers(own) == own
    assert quiet_controllers(["hydra/launcher=submitit_slurm"]) == ["hydra/launcher=submitit_slurm"]


def test_a_sweeps_folder_that_cannot_be_made_is_one_line_after_the_jobs_that_ran(monkeypatch, capsys):
    def compose(own, host, keys, name, run_job):
        run_job.notes.write_text(
            '{"job": 0, "status": "done", "overrides": [], "sweep_folder": "here", "metrics": {}}\n', encoding="utf-8"
        )
        exec(compile("raise error", HYDRAS, "exec"), {"error": NotADirectoryError(20, os.strerror(20), "here/1")})

    monkeypatch.setattr(sweep, "compose", compose)
    assert simulate(["-m", "hydra.sweep.dir=here"]) == 2
    report = f"{called_as('report')} here makes a page of them"
    said = [f"1 of 1 jobs succeeded; results are in here/results.jsonl, and {report}"]
    said += [f"error: hydra.sweep.dir: here/1 cannot be written: {os.strerror(20)}"]
    assert capsys.readouterr().err.splitlines() == [f"hookline: {line}" for line in said]
