"""The section of a report by tag: who is in it, what it says, and that a load without tags has none."""

import pytest

from hookline.core.report.command import main
from hookline.core.report.jobs import read_jobs
from hookline.core.report.markdown import markdown
from hookline.core.report.page import page
from hookline.core.report.tags import tag_tables
from hookline.core.report.view import Report
from tests.report_data import make_job, make_recording

TAGS = [{"class": "chat"}, {"class": "batch", "tenant": "a.b"}, {}, {"class": "chat"}]
HOSTILE = '<script>alert("x")</script>|`[a](b)'


@pytest.fixture
def sweep(tmp_path):
    """Two policies, the second one half as fast, and a third whose requests say nothing."""
    for number, (policy, tags) in enumerate([("first", TAGS), ("second", TAGS), ("third", [{}])]):
        recording = make_recording(0, pace_s=0.01 * (number + 1), tags=tags)
        make_job(tmp_path, number, [f"scheduler={policy}"], {"scheduler": {"name": policy}}, recording)
    return tmp_path


def report_of(folder):
    return Report.of(read_jobs([folder]))


def tables_of(folder):
    report = report_of(folder)
    return {table.key: table for table in tag_tables(report, report.groups[0])}


def cell(row, name):
    return next(figure.text(row.job) for figure in row.figures if figure.name.endswith(f".{name}"))


def test_each_key_has_a_row_for_each_value_and_each_job_that_has_it(sweep):
    tables = tables_of(sweep)
    assert list(tables) == ["class", "tenant"]
    rows = [(row.value, row.job.id) for row in tables["class"].rows]
    assert rows == [("batch", "0"), ("batch", "1"), ("chat", "0"), ("chat", "1")]
    assert [(row.value, row.job.id) for row in tables["tenant"].rows] == [("a.b", "0"), ("a.b", "1")]


def test_figures_are_of_the_tags_own_requests(sweep):
    tables = tables_of(sweep)
    batch, *_, chat = tables["class"].rows
    assert (cell(batch, "requests"), cell(batch, "output_share")) == ("3", "25")
    assert (cell(chat, "requests"), cell(chat, "output_share")) == ("6", "50")
    assert cell(tables["tenant"].rows[0], "requests") == "3"  # a value with a dot in it
    assert "refused" not in [figure.name for figure in tables["class"].figures]
    assert "deadlines_met" not in [figure.name for figure in tables["class"].figures]


def test_a_tag_is_compared_with_the_same_tag_of_the_baseline(sweep):
    report = report_of(sweep)
    [group] = report.groups
    table = tag_tables(report, group)[0]
    output = next(place for place, figure in enumerate(table.figures) if figure.name == "output_tok_s")
    ratios = [group.ratio(row.figures[output], row.job) for row in table.rows]
    assert ratios[0] is None and ratios[1].text == "0.50×" and ratios[1].verdict == "worse"


def test_charts_show_each_tag_in_a_colour_and_each_job_in_dashes(sweep):
    charts = tables_of(sweep)["class"].charts
    assert [chart.title for chart in charts] == [
        "Time to first token, by class",
        "Time per token, by class",
        "Time in the queue, by class",
    ]
    assert [line.label for line in charts[0].lines] == [
        "batch, job 0: first",
        "batch, job 1: second",
        "chat, job 0: first",
        "chat, job 1: second",
    ]
    assert [line.style for line in charts[0].lines] == [0, 8, 1, 9]
    assert all(line.steps and line.ys[-1] == 100 for line in charts[0].lines)


def test_a_job_without_records_is_drawn_by_what_its_result_line_states(sweep):
    (sweep / "1" / "steps.npz").unlink()
    lines = tables_of(sweep)["class"].charts[0].lines
    assert [line.steps for line in lines] == [True, False, True, False]
    assert len(lines[1].xs) == 4


def test_the_page_and_the_tables_have_a_section_by_tag(sweep):
    report = report_of(sweep)
    html, text = page(report), markdown(report)
    assert "<h3>By tag</h3>" in html and 'data-tag="a.b"' in html
    assert "### By `class`" in text and "| `batch` | 1 | 3 | " in text


def test_a_load_without_tags_has_no_such_section(tmp_path):
    make_job(tmp_path, 0, [], {"scheduler": {"name": "first"}}, make_recording())
    report = report_of(tmp_path)
    assert "By tag" not in page(report) and "### By" not in markdown(report)
    assert tables_of(tmp_path) == {}


def test_a_hostile_tag_is_text(tmp_path):
    config = {"scheduler": {"name": "first"}}
    make_job(tmp_path, 0, [], config, make_recording(tags=[{"tenant": HOSTILE}]))
    html, text = page(report_of(tmp_path)), markdown(report_of(tmp_path))
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
    assert '`<script>alert("x")</script>\\|\'[a](b)`' in text


@pytest.mark.slow
def test_plots_by_tag_are_png_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    make_job(tmp_path, 0, [], {"scheduler": {"name": "$x$"}}, make_recording(tags=[{"tenant": "$x$"}]))
    assert main([str(tmp_path), "png=true"]) == 0
    assert (tmp_path / "by_tenant.png").read_bytes().startswith(b"\x89PNG")
