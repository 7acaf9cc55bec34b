"""Runs the jobs of a sweep, each in a process of its own, so that a job that fails or leaks memory affects no other.

Hydra's sweeper chooses the jobs, and its launcher chooses when and where they run: here, or in worker processes,
possibly side by side. This module knows command lines, folders and results; the job's command knows what a job does.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookline.core.cli.output import say
from hookline.core.cli.stdin import SOURCES, piped_text
from hookline.core.config.compose import CHOICES, ComposedJob, compose
from hookline.core.config.job_folder import JOB_FOLDER
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.sweep.hydra_settings import (
    STUDIES,
    check_settings,
    each_choice,
    explain,
    is_study,
    keys_of_each_job,
    let_join_ray,
    quiet_controllers,
)
from hookline.core.sweep.job_process import run_child
from hookline.core.sweep.job_status import DONE, FAILED
from hookline.core.sweep.ray_gpus import on_gpus
from hookline.core.sweep.results import FORMAT, RESULTS, append_line, read_all, read_lines
from hookline.core.util.child_python import python_command
from hookline.core.util.process import called_as

LOG = "log.txt"
"""The file in a job's folder with its output."""
BENCHES = {"bench": "bench", "simulate": "simulate"}
"""Commands that measure a load and write a result line, and their configurations."""
ON_DEVICES = ("run", "bench")
"""Commands whose jobs have an engine of their own."""
WITHOUT_EFFECT = ("objective", "job_timeout_s", "output", "result", "records")
"""Keys that do not change what a job computes."""


@dataclass(frozen=True)
class Sweep:
    """What runs each job; Hydra's launcher may send it to another process.

    command: what a job's process runs, "run" or one of BENCHES. file_name: of the result file in a job's folder.
    text: what was piped in, for every job. notes: a file that collects one line for each job of this very sweep.
    environ: variables for each job, by which it makes sure that it sees the plugins that this process sees.
    """

    command: str
    file_name: str
    text: str | None
    notes: Path
    cwd: str
    environ: Mapping[str, str]

    def __call__(self, job: ComposedJob) -> float | None:
        """Run a job, or find that an earlier sweep into this folder finished it; returns its objective, if it has one.

        Never raises for a job that fails: its record says so, here and in the sweep's results.
        """
        assert job.folder is not None and job.sweep_folder is not None
        results = job.sweep_folder / RESULTS
        key, before = self._key(job), read_all(job.sweep_folder)
        record = next((line for line in reversed(before) if line["key"] == key and line["status"] == DONE), None)
        if record is None:
            folder = _free_folder(job, key, before)
            record = {**self._head(job, key, folder), **self._run(job, folder)}
            append_line(results, record)
        else:
            say(f"job {job.number} is finished already, in {job.sweep_folder / record['folder']}")
        append_line(self.notes, {**record, "job": job.number, "sweep_folder": str(job.sweep_folder)})
        return _objective(record, job.tree.get("objective"))

    def _key(self, job: ComposedJob) -> str:
        """A name for what a job computes, independent of the order and the spelling of its arguments."""
        tree = {name: value for name, value in job.tree.items() if name not in WITHOUT_EFFECT}
        text = json.dumps([self.command, tree, self.text], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _head(self, job: ComposedJob, key: str, folder: Path) -> dict[str, Any]:
        assert job.sweep_folder is not None
        return {
            "format": FORMAT,
            "job": job.number,
            "key": key,
            "folder": os.path.relpath(folder, job.sweep_folder),
            "overrides": list(job.overrides),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _run(self, job: ComposedJob, folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        result = (folder / self.file_name).resolve()
        result.unlink(missing_ok=True)
        arguments = [*job.arguments, f"{_result_key(self.command)}={result}"]
        if self.command in BENCHES:
            arguments += [f"records={folder.resolve()}", "job_timeout_s=null"]
        say(f"job {job.number}: {' '.join(job.overrides) or '(defaults)'}")
        command = python_command(f"hookline.core.{self.command}.command:main", *arguments)
        started = time.monotonic()
        timeout_s = job.tree.get("job_timeout_s")
        if timeout_s is None or (isinstance(timeout_s, int | float) and timeout_s > 0):
            environ = {**self.environ, JOB_FOLDER: str(folder.resolve())}
            run = on_gpus(run_child, job.tree) if self.command in ON_DEVICES else run_child
            ended = run(command, self.cwd, self.text, folder / LOG, timeout_s, environ)
        else:
            error = f"job_timeout_s={timeout_s} must be a number of seconds above 0, or null"
            ended = {"status": FAILED, "error": error, "exit_code": None}
        if ended["status"] == DONE and not result.exists():  # by os._exit(0) for instance
            ended = {**ended, "status": FAILED, "error": f"exit code 0, but it wrote no {result.name}"}
        own = read_lines(result) if self.command in BENCHES else []
        record = {**ended, **(own[-1] if own else {}), "wall_s": round(time.monotonic() - started, 3)}
        say(_ending(job, record))
        return record


def run_sweep(arguments: Sequence[str], host: PluginHost, keys: type, command: str = "run") -> int:
    """Run the sweep that the arguments ask for and return the exit code: 1 if any job of it failed.

    keys: see `compose`. Where jobs take prompts, piped input is read once and given to each of them.
    Raises: ConfigError for what Hydra cannot compose, if the result's name is a folder, if the sweep's folder cannot be
    made, and for a study's storage that cannot be opened.
    """
    if command not in BENCHES:
        _refuse_studies(arguments)
    check_settings(arguments)
    config_name = BENCHES.get(command, "config")
    if is_study(arguments):  # other sweepers compose all jobs before the first one runs
        for one in each_choice(arguments, CHOICES):
            compose(one, host, keys, config_name)
    text = piped_text() if command not in BENCHES and not _gives_prompts(arguments) else None
    with tempfile.TemporaryDirectory(prefix=".hookline-", dir=_notes_place(arguments)) as scratch:
        notes = Path(scratch, "jobs.jsonl")
        sweep = Sweep(command, _file_name(arguments, command), text, notes, os.getcwd(), host.for_children())
        own = [argument for argument in arguments if not argument.startswith(f"{_result_key(command)}=")]
        try:
            compose(quiet_controllers(let_join_ray(keys_of_each_job(own, CHOICES))), host, keys, config_name, sweep)
        except Exception as error:
            explained = explain(error, own)
            if explained is None:
                raise
            raise explained from error
        finally:  # show the finished jobs even after an error or an interrupt
            records = read_lines(notes)
            if records:
                _summarise(records)
    return 0 if all(record["status"] == DONE for record in records) else 1


def _refuse_studies(arguments: Sequence[str]) -> None:
    for argument in arguments:
        key, _, name = argument.lstrip("+").partition("=")
        if key == "hydra/sweeper" and name in STUDIES:
            raise ConfigError(
                f"{argument} looks for the best figure, and the jobs of `{called_as('run')}` measure none; use "
                f"`{called_as('bench')} -m`, or leave it out"
            )


def _notes_place(arguments: Sequence[str]) -> str | None:
    """Where jobs can write notes for this process: with a launcher, which may run them on other nodes, in the folder of
    the command, as the results are; the folder for temporary files is each node's own.
    """
    has_launcher = any(argument.lstrip("+").startswith("hydra/launcher=") for argument in arguments)
    return os.getcwd() if has_launcher and os.access(os.getcwd(), os.W_OK) else None


def _summarise(records: Sequence[Mapping[str, Any]]) -> None:
    from hookline.core.sweep.table import table

    for line in table(records):
        print(line)
    failed = [record for record in records if record["status"] != DONE]
    for record in failed:
        overrides = " ".join(record["overrides"])
        say(f"job {record['job']} ({overrides}) {record['status'].replace('_', ' ')}: {record['error']}")
    folder = Path(records[0]["sweep_folder"])
    count = f"{len(records) - len(failed)} of {len(records)} jobs succeeded"
    say(f"{count}; results are in {folder / RESULTS}, and {called_as('report')} {folder} makes a page of them")


def _free_folder(job: ComposedJob, key: str, before: Sequence[Mapping[str, Any]]) -> Path:
    """The job's folder; if an earlier sweep put another job there, a folder beside it."""
    assert job.folder is not None and job.sweep_folder is not None
    name = os.path.relpath(job.folder, job.sweep_folder)
    taken = any(record["folder"] == name and record["key"] != key for record in before)
    return job.folder.with_name(f"{job.folder.name}-{key}") if taken else job.folder


def _objective(record: Mapping[str, Any], name: object) -> float | None:
    from hookline.core.sweep.results import objective_value

    return objective_value(record["metrics"], str(name)) if name and record["status"] == DONE else None


def _result_key(command: str) -> str:
    return "result" if command in BENCHES else "output"


def _file_name(arguments: Sequence[str], command: str) -> str:
    key = _result_key(command)
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    name = given[-1] if given else f"{key}.jsonl"
    if Path(name).name != name:
        raise ConfigError(f"{key}={name}: each job of a sweep has its own folder; give a file name alone")
    for argument in arguments:
        if argument.startswith(("records=", "profile=", "save=")):
            raise ConfigError(f"{argument}: all jobs of a sweep would write there; leave it out")
    return name


def _gives_prompts(arguments: Sequence[str]) -> bool:
    return any(argument.lstrip("+").partition("=")[0] in SOURCES for argument in arguments)


def _ending(job: ComposedJob, record: Mapping[str, Any]) -> str:
    if record["status"] == DONE:
        return f"job {job.number} is done, in {record['wall_s']:.1f} s"
    return f"job {job.number} {record['status'].replace('_', ' ')}: {record['error']}; the others run on"
