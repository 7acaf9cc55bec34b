"""A command composes its configuration once, whatever the command line asks for; sweeps compose each job."""

from __future__ import annotations

from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode

from hookline.core.config.compose import ComposedJob, compose
from hookline.core.errors import ConfigError, HooklineError
from hookline.core.plugin.host import PluginHost
from hookline.core.run.settings import RunKeys


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[RunMode]:
    """The mode of each configuration that Hydra composes."""
    modes: list[RunMode] = []
    before = ConfigLoaderImpl._load_configuration_impl

    def count(self: Any, *given: Any, run_mode: RunMode, **how: Any) -> Any:
        modes.append(run_mode)
        return before(self, *given, run_mode=run_mode, **how)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", count)
    return modes


@pytest.mark.parametrize("arguments", [[], ["seed=3", "engine.block_size=32"], ["hydra.mode=RUN"]])
def test_a_run_is_composed_once(composed: list[RunMode], arguments: list[str]) -> None:
    [job] = compose(arguments, PluginHost.load(), RunKeys)
    assert composed == [RunMode.RUN]
    assert job.tree["seed"] == (3 if "seed=3" in arguments else 0) and job.number == 0


def test_a_help_copies_the_schemas_once_for_all_lists_of_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies: list[str | None] = []
    before = ConfigLoaderImpl._parse_overrides_and_create_caching_repo

    def count(self: Any, config_name: str | None, overrides: list[str]) -> Any:
        copies.append(config_name)
        return before(self, config_name, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "_parse_overrides_and_create_caching_repo", count)
    assert compose(["--help"], PluginHost.load(), RunKeys) == []
    shown = capsys.readouterr().out
    assert "scheduler: chunked, " in shown and "workload: batch32, " in shown
    assert copies.count(None) == 1 and len(copies) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("how", [["-m"], ["hydra.mode=MULTIRUN"]])
def test_jobs_of_a_sweep_have_their_own_configurations_and_numbers(how: list[str], tmp_path: Any) -> None:
    jobs: list[ComposedJob] = []
    where = f"hydra.sweep.dir={tmp_path}"
    host = PluginHost.load()
    compose([*how, where, "seed=3,4"], host, RunKeys, run_job=lambda job: jobs.append(job))
    compose([*how, where, "seed=5"], host, RunKeys, run_job=lambda job: jobs.append(job))
    assert [(job.tree["seed"], job.number) for job in jobs] == [(3, 0), (4, 1), (5, 0)]
    assert all(job.sweep_folder == tmp_path for job in jobs)


@pytest.mark.parametrize("argument", ["model=nope", "sed=1"])
def test_a_mistake_is_composed_once(composed: list[RunMode], argument: str) -> None:
    """It was composed three times: to read the mode as a run, as a sweep, and to be run."""
    with pytest.raises(HooklineError):
        compose([argument], PluginHost.load(), RunKeys)
    assert composed == [RunMode.RUN]


def test_an_error_is_told_as_before() -> None:
    host = PluginHost.load()
    for argument, message in (("seed=1,2", "seed=1,2 has several values; add -m"), ("sed=1", "unknown key 'sed'")):
        with pytest.raises(ConfigError) as error:
            compose([argument], host, RunKeys)
        assert str(error.value).startswith(message)
