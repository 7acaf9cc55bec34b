"""The command line of `hookline report FOLDER [baseline=JOB|first] [out=FOLDER] [png=auto|true|false]`.

Reads what a sweep left, writes index.html, report.md and, if matplotlib is there, PNG plots. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hookline.core.cli.output import say
from hookline.core.errors import ConfigError
from hookline.core.util.process import called_as
from hookline.core.util.text import near_miss

USAGE = """\
{report} FOLDER [FOLDER ...] [baseline=JOB|first] [out=FOLDER] [png=auto|true|false]

FOLDER    a sweep's folder, with results.jsonl in it; several are shown side by side
baseline  the job that the others are compared with; first: the first that is done, of each load
out       where index.html, report.md and the plots go; the (first) sweep's folder if left out
png       plots as PNG, which take matplotlib (pip install "hookline[report]"); auto: if it is there"""
KEYS = ("baseline", "out", "png")
PAGE, TABLE = "index.html", "report.md"
INSTALL = 'install it with: pip install "hookline[report]"'


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    folders: tuple[Path, ...]
    baseline: str
    out: Path
    png: bool | None
    """Whether to draw plots; None: they would be drawn if matplotlib were there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and return the exit code: 0, or 2 after an error of one line."""
    from hookline.core.cli.command import guarded

    return guarded(_run, arguments)


def _run(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(USAGE.format(report=called_as("report")))
        return 0
    options = parse(arguments)
    for path in write_report(options):
        print(path)
    if options.png is None:
        say(f"no PNG plots, since matplotlib is not installed; {INSTALL}")
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Parse the arguments; `name=value` sets a key, anything else is a folder.

    Raises: ConfigError for an unknown key, an invalid value, or no folder.
    """
    folders, values = [], {"baseline": "first", "png": "auto"}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not re.fullmatch(r"\w+", key):
            folders.append(Path(argument))
        elif key in KEYS:
            values[key] = value
        else:
            raise ConfigError(f"unknown key '{key}'.{near_miss(key, KEYS)} Available: {', '.join(KEYS)}")
    if not folders:
        raise ConfigError(f"the report needs the folder of a sweep: {called_as('report')} outputs/DATE")
    return Options(tuple(folders), values["baseline"], Path(values.get("out", folders[0])), _wants_png(values["png"]))


def _wants_png(value: str) -> bool | None:
    there = importlib.util.find_spec("matplotlib") is not None
    if value not in ("auto", "true", "false"):
        raise ConfigError(f"png={value} must be auto, true or false")
    if value == "true" and not there:
        raise ConfigError(f"png=true needs matplotlib, which is not installed; {INSTALL}")
    return None if value == "auto" and not there else value != "false"


def write_report(options: Options) -> list[Path]:
    """Write all files of a report and return their paths, the page first.

    Raises: ConfigError if there are no results, the baseline is not among them, or a file cannot be written.
    """
    from hookline.core.report.jobs import read_jobs
    from hookline.core.report.markdown import markdown
    from hookline.core.report.page import page
    from hookline.core.report.view import Report

    report = Report.of(read_jobs(options.folders), options.baseline)
    files = {options.out / PAGE: page(report), options.out / TABLE: markdown(report)}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={options.out} cannot be written: {error.strerror or error}") from error
    if not options.png:
        return list(files)
    from hookline.core.report.plots import write_plots

    return [*files, *write_plots(report, options.out)]
