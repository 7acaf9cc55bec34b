"""The report as a single HTML page with its styles, script and charts.

Jinja2 fills in the templates and escapes everything that comes from a configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hookline.core.report.curves import curves, knob, spread_out
from hookline.core.report.distributions import distributions
from hookline.core.report.drawing import draw
from hookline.core.report.figures import LATENCIES, Figure, seconds
from hookline.core.report.jobs import Job
from hookline.core.report.shared import common, own
from hookline.core.report.tags import tag_tables
from hookline.core.report.timelines import timelines
from hookline.core.report.view import Group, Report

TEMPLATES = Path(__file__).resolve().parent / "templates"
LOW = 150.0
"""Height of the charts that stand below another with the same time axis."""
HIGHLIGHTS = ("output_tok_s", "goodput_s", "ttft_s.p99", "itl_s.p99")
PERCENTILES = ("mean", "p50", "p90", "p99", "max")


def page(report: Report) -> str:
    """The whole page."""
    shared = common([job.config for job in report.jobs if job.config])
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        report=report,
        facts=_facts(report),
        sections=[_section(report, group) for group in report.groups],
        latencies=LATENCIES,
        percentiles=PERCENTILES,
        across=[draw(chart) for chart in curves(report, report.jobs, of_load=True)],
        load_knob=knob(report, of_load=True),
        knob=knob(report, of_load=False),
        best_titles=[_superlative(figure) for figure in _choosing(report)],
        shared=_text(shared),
        own_text=lambda job: _text(own(job.config, shared)),
        seconds=seconds,
    )


def _facts(report: Report) -> Mapping[str, str]:
    """The facts that all jobs of the sweep have in common, and when it ran."""
    done = [job for job in report.jobs if job.is_done]
    model = sorted({str((job.config.get("model") or {}).get("checkpoint") or "") for job in done} - {""})
    facts = {
        "Asked of all jobs": " ".join(_asked_of_all(report.jobs)),
        "Jobs": f"{len(report.jobs)}, of which {len(done)} done and {len(report.failed)} failed",
        "Checkpoint": ", ".join(model),
        "Device": _common(done, "device"),
        "Kernels": _common(done, "kernels"),
        "Hookline": ", ".join(sorted({_version(job) for job in done})),
        "Started": min((str(job.record.get("started_at") or "") for job in report.jobs), default=""),
        "Took, all jobs": seconds(sum(float(job.record.get("wall_s") or 0) for job in report.jobs)),
    }
    return {name: text for name, text in facts.items() if text}


def _asked_of_all(jobs: Sequence[Job]) -> list[str]:
    first, *others = (job.record.get("overrides") or [] for job in jobs)
    return [str(one) for one in first if others and all(one in other for other in others)]


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=1)


def _common(jobs: Sequence[Job], key: str) -> str:
    return ", ".join(sorted({str(job.record.get(key)) for job in jobs if job.record.get(key)}))


def _version(job: Job) -> str:
    versions, revision = job.record.get("versions") or {}, job.record.get("revision")
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    at = f" at {revision[:10]}{'-dirty' if revision.endswith('-dirty') else ''}" if revision else ""
    return f"{versions.get('hookline', '')}{at}{torch}"


def _section(report: Report, group: Group) -> Mapping[str, Any]:
    """Everything the template shows of one load."""
    return {
        "group": group,
        "columns": [one for one in report.columns if not one.is_load or len(report.groups) == 1],
        "best": _best(report, group),
        "is_flat": len(group.done) > 1 and not spread_out(group.done),
        "curves": [draw(chart) for chart in curves(report, group.jobs, of_load=False)],
        "distributions": [draw(chart) for chart in distributions(report, group)],
        "tags": [(table, [draw(chart) for chart in table.charts]) for table in tag_tables(report, group)],
        "timelines": [
            (job, [draw(top), *(draw(one, LOW) for one in below)]) for job, (top, *below) in timelines(report, group)
        ],
    }


def _choosing(report: Report) -> list[Figure]:
    """The figures by which people choose a job."""
    return [figure for name in HIGHLIGHTS for figure in report.figures if figure.name == name]


def _superlative(figure: Figure) -> str:
    return f"{'most' if figure.better > 0 else 'shortest'} {figure.title}"


def _best(report: Report, group: Group) -> Mapping[str, tuple[Figure, Job]]:
    """The row with the best value of each of those figures."""
    found = ((figure, group.best(figure)) for figure in _choosing(report))
    return {_superlative(figure): (figure, job) for figure, job in found if job is not None}
