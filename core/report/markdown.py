"""The comparison as Markdown tables: one for each load, and one of the jobs that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hookline.core.report.figures import Figure
from hookline.core.report.jobs import Job
from hookline.core.report.tags import TagTable, tag_tables
from hookline.core.report.view import Group, Report


def markdown(report: Report) -> str:
    """The whole text, with a line's end at its end."""
    num_failed = len(report.failed)
    head = f"# Sweep of {len(report.jobs)} jobs\n\n{len(report.jobs) - num_failed} done, {num_failed} failed."
    tables = [_comparison(report, group) for group in report.groups if group.done]
    failed = [f"## Failed\n\n{_failures(report)}"] if report.failed else []
    return "\n\n".join([head, *tables, *failed]) + "\n"


def _comparison(report: Report, group: Group) -> str:
    columns = [column for column in report.columns if not column.is_load or len(report.groups) == 1]
    head = ["job", *(code(column.name) for column in columns), *(figure.heading for figure in report.figures)]
    rows = [
        [
            _id(job),
            *(code(column.text(job)) for column in columns),
            *(_cell(group, figure, job) for figure in report.figures),
        ]
        for job in group.done
    ]
    title = f"## Load: {code(group.name)}\n\n" if group.name else ""
    text = f"{title}Ratios are to job {_id(group.baseline) if group.baseline else ''}.\n\n{_table(head, rows)}"
    return "\n\n".join([text, *(_by_tag(group, table) for table in tag_tables(report, group))])


def _by_tag(group: Group, table: TagTable) -> str:
    head = [code(table.key), "job", *(figure.heading for figure in table.figures)]
    rows = [
        [code(row.value), _id(row.job), *(_cell(group, figure, row.job) for figure in row.figures)]
        for row in table.rows
    ]
    return f"### By {code(table.key)}\n\n{_table(head, rows)}"


def _cell(group: Group, figure: Figure, job: Job) -> str:
    ratio = group.ratio(figure, job)
    return figure.text(job) + (f" ({ratio.text})" if ratio else "")


def _failures(report: Report) -> str:
    rows = [
        [
            _id(job),
            code(" ".join(map(str, job.record["overrides"]))),
            job.record["status"].replace("_", " "),
            code(job.record["error"]),
        ]
        for job in report.failed
    ]
    return _table(["job", "arguments", "ended", "cause"], rows)


def _id(job: Job) -> str:
    """The job's name: as it is if it is a number or a plain path, else as a code span."""
    return job.id if re.fullmatch(r"[\w./-]+", job.id) else code(job.id)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    """Text that came from outside, as a code span: nothing in it is Markdown or HTML."""
    plain = " ".join(str(text).split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""
