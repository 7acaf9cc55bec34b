"""core.report over sweeps that are made up: what is compared with what, and what the files say."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hookline.core.bench.files import write_recording
from hookline.core.bench.metrics import summarise
from hookline.core.bench.slo import Slo
from hookline.core.report.columns import columns_of
from hookline.core.report.command import USAGE, main
from hookline.core.report.curves import curves, knob
from hookline.core.report.distributions import distributions, samples
from hookline.core.report.drawing import Axis, draw
from hookline.core.report.figures import Figure, number, seconds
from hookline.core.report.jobs import read_jobs
from hookline.core.report.markdown import code
from hookline.core.report.page import page
from hookline.core.report.shared import common, own
from hookline.core.report.timelines import NUM_MOMENTS, timelines
from hookline.core.report.view import Ratio, Report
from hookline.core.sweep.results import append_line
from tests.report_data import NO_SLO, failed, make_job, make_recording, make_sweep

ROOT = Path(__file__).parents[1]
HOSTILE = '<script>alert("x")</script>|`[a](b)'
OUTPUT = Figure("output_tok_s", "output", 1)


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path / "sweep")


def report_of(*folders, baseline="first"):
    return Report.of(read_jobs(folders), baseline)


def names(jobs):
    return [column.name for column in columns_of(jobs)]


def test_only_keys_that_differ_are_columns(sweep):
    # of_first and of_second are fields of one option each, so they say nothing that the option does not.
    assert names(read_jobs([sweep])) == ["scheduler", "engine.max_num_seqs"]


def test_a_field_that_differs_within_one_choice_is_a_column(tmp_path):
    for place, (workload, rate) in enumerate([("calm", 1), ("calm", 2), ("wild", 9)]):
        overrides = [f"workload={workload}"]
        make_job(tmp_path, place, overrides, {"workload": {"rate": rate, "wild": rate > 2}}, make_recording())
    assert names(read_jobs([tmp_path])) == ["workload", "workload.rate"]


def test_a_key_that_older_revisions_do_not_know_is_no_column(tmp_path):
    old, new = {"tp": 1, "engine": {"seqs": 4}}, {"tp": 1, "engine": {"seqs": 4, "timeout_s": 5.0}}
    make_job(tmp_path, 0, (), old, make_recording(), revision="a" * 40)
    make_job(tmp_path, 1, (), new, make_recording(), revision="b" * 40)
    assert names(read_jobs([tmp_path])) == ["revision"]
    make_job(tmp_path, 2, (), old, make_recording(), revision="b" * 40)  # left out by a job that knows it
    assert names(read_jobs([tmp_path])) == ["engine.timeout_s", "revision"]


def test_what_it_came_to_is_a_column_if_the_same_was_asked_for(tmp_path):
    make_job(tmp_path, 0, (), {"tp": 1, "device": "auto"}, make_recording(), device="cpu", revision="a" * 40)
    make_job(tmp_path, 1, (), {"tp": 1, "device": "auto"}, make_recording(), device="gpu", simulated=True)
    make_job(tmp_path, 2, (), {"tp": 1, "device": "auto"}, **failed())
    jobs = read_jobs([tmp_path])
    assert names(jobs) == ["on device", "simulated"]
    assert [column.text(jobs[1]) for column in columns_of(jobs)] == ["gpu", "true"]


def test_a_job_that_never_said_its_configuration_is_named_by_its_arguments(sweep):
    report = report_of(sweep)
    assert report.name(report.jobs[5]) == "killed, max_num_seqs=2"
    assert len(report.groups) == 1


def test_ratios_are_to_the_baseline(sweep):
    report = report_of(sweep, baseline="1")
    [group] = report.groups
    ratio = group.ratio(OUTPUT, report.jobs[0])
    assert ratio.value == report.jobs[0].figure("output_tok_s") / report.jobs[1].figure("output_tok_s") > 1.5
    assert ratio.verdict == "better"
    assert group.ratio(OUTPUT, report.jobs[1]) is None
    assert group.ratio(OUTPUT, report.jobs[4]) is None
    assert group.ratio(Figure("e2e_s.p50", "", -1), report.jobs[0]).verdict == "better"
    assert group.best(OUTPUT) is report.jobs[0]


def used_again(folder, folders=("0", "1", "1-key", "2"), keys=("a", "b", "c", "d")):
    """A sweep over 2 and 8 whose folder was used again, over 8, 4 and 16: two different jobs have the number 1."""
    for place, (job, limit) in enumerate([(0, 2), (1, 8), (1, 4), (2, 16)]):
        overrides, config = [f"engine.max_num_seqs={limit}"], {"engine": {"max_num_seqs": limit}}
        recording = make_recording(pace_s=1 / limit)
        make_job(folder, job, overrides, config, recording, folders[place], key=keys[place])
    return folder


def test_each_job_of_a_folder_that_was_used_again_has_its_own_values_under_its_own_name(tmp_path):
    sweep = used_again(tmp_path / "ext")
    report = report_of(sweep, baseline="1-key")
    [group], [column] = report.groups, report.columns
    assert [job.id for job in report.jobs] == ["0", "1", "1-key", "2"]
    assert [column.values[job.id] for job in report.jobs] == [2, 8, 4, 16]
    paces = [job.recording.seconds * column.values[job.id] for job in report.jobs]
    assert paces == pytest.approx([paces[0]] * 4)  # each has the recording of its own configuration
    assert group.baseline is report.jobs[2] and report.label(group.baseline) == "job 1-key: max_num_seqs=4"
    assert report_of(sweep, baseline="1").groups[0].baseline.config == report.jobs[1].config
    html = page(report)
    for job in report.jobs:
        assert html.count(f'<tr data-job="{job.id}">') == 1 == html.count(f'<details data-job="{job.id}">')


def test_the_tables_of_a_folder_that_was_used_again_name_each_job_by_its_folder(tmp_path):
    assert main([str(used_again(tmp_path / "ext")), "png=false", "baseline=1-key"]) == 0
    table = (tmp_path / "ext/report.md").read_text()
    assert re.findall(r"^\| (\S+) \| `(\d+)` \|", table, re.M) == [("0", "2"), ("1", "8"), ("1-key", "4"), ("2", "16")]
    assert "Ratios are to job 1-key." in table


def test_jobs_are_named_by_their_keys_if_two_have_the_same_folder_and_number(tmp_path):
    jobs = read_jobs([used_again(tmp_path, folders=("0", "1", "1", "2"))])
    assert [job.id for job in jobs] == ["a", "b", "c", "d"]


def test_a_job_that_ran_again_under_another_number_is_one_row(tmp_path):
    make_job(tmp_path, 1, ["tp=1"], {"tp": 1}, key="a", **failed())
    make_job(tmp_path, 1, ["tp=2"], {"tp": 2}, make_recording(), "1-b", key="b")
    make_job(tmp_path, 2, ["tp=1"], {"tp": 1}, make_recording(), key="a")
    jobs = read_jobs([tmp_path])
    assert [(job.id, job.config["tp"]) for job in jobs] == [("1", 2), ("2", 1)]


def test_a_folder_that_is_given_twice_is_read_once(sweep):
    assert [job.id for job in read_jobs([sweep, sweep / "../sweep"])] == [str(number) for number in range(6)]


def test_a_ratio_keeps_its_digits_however_small():
    assert [Ratio(value, "").text for value in (1.6234, 0.0036, 59.09, 0.5)] == ["1.62×", "0.0036×", "59.1×", "0.50×"]


def loads(folder):
    for place in range(4):
        rate, policy = (1, 5)[place // 2], ("first", "second")[place % 2]
        config = {"workload": {"request_rate": rate}, "scheduler": {"name": policy}}
        make_job(folder, place, [f"workload.request_rate={rate}"], config, make_recording(place))
    return report_of(folder, baseline="1")


def test_jobs_are_compared_with_those_of_the_same_load(tmp_path):
    report = loads(tmp_path)
    assert [group.name for group in report.groups] == ["request_rate=1", "request_rate=5"]
    # The baseline of the other load is the job that differs from the chosen one in its load alone.
    assert [group.baseline.id for group in report.groups] == ["1", "3"]
    assert report.style(report.jobs[1]) == report.style(report.jobs[3]) != report.style(report.jobs[0])


def test_several_loads_are_shown_at_a_glance(tmp_path):
    report = loads(tmp_path)
    text = page(report)
    glance = text[text.index("The loads at a glance") : text.index("</table>")]
    for place, group in enumerate(report.groups, start=1):
        assert f'<a href="#load{place}">{group.name}</a>' in glance
        assert report.label(group.best(OUTPUT)) in glance


def test_a_jobs_configuration_and_what_all_share_make_the_whole(sweep):
    configs = [job.config for job in read_jobs([sweep]) if job.config]
    shared = common(configs)
    assert shared == {"slo": NO_SLO, "workload": {"num_prompts": 12}, "engine": {"block_size": None}}
    assert own(configs[1], shared) == {"scheduler": {"name": "first", "of_first": 7}, "engine": {"max_num_seqs": 8}}
    assert common([]) == {}


def test_loads_are_compared_if_nothing_else_can_be(tmp_path):
    for place in range(3):
        make_job(tmp_path, place, (), {"workload": {"request_rate": place + 1}}, make_recording(place))
    report = report_of(tmp_path, baseline="2")
    [group] = report.groups
    assert group.baseline.id == "2"
    assert knob(report, of_load=True).name == "workload.request_rate"
    assert [len(line.xs) for line in curves(report, report.jobs, of_load=True)[0].lines] == [3, 3]
    assert curves(report, report.jobs, of_load=False) == []


def test_curves_join_the_jobs_that_differ_in_the_limit_alone(sweep):
    report = report_of(sweep)
    chart = curves(report, report.jobs, of_load=False)[0]
    strong = [line for line in chart.lines if not line.is_faint]
    assert [(line.label, line.notes) for line in strong] == [("first, p50", ["2", "8"]), ("second, p50", ["2", "8"])]
    assert strong[0].ys == [report.jobs[number].figure("ttft_s.p50") for number in (0, 1)]


def test_curves_over_the_rate_go_through_jobs_of_different_loads(tmp_path):
    report = loads(tmp_path)
    chart = curves(report, report.jobs, of_load=True)[0]
    strong = [line for line in chart.lines if not line.is_faint]
    assert [(line.label, line.notes) for line in strong] == [("first, p50", ["1", "5"]), ("second, p50", ["1", "5"])]


def test_no_curves_where_every_job_has_the_same_throughput(tmp_path):
    for place, limit in enumerate((2, 8)):
        make_job(tmp_path, place, (), {"engine": {"max_num_seqs": limit}}, make_recording(0))
    report = report_of(tmp_path)
    assert curves(report, report.jobs, of_load=False) == []
    assert "All jobs have the same throughput under this load" in page(report)
    assert report.groups[0].num_rivals(OUTPUT, report.jobs[0]) == 1
    assert "job 0: max_num_seqs=2 and one other within 2 %" in page(report)


def test_a_job_without_records_is_drawn_by_its_percentiles(sweep):
    (sweep / "0/steps.npz").unlink()
    report = report_of(sweep)
    line = distributions(report, report.groups[0])[0].lines[0]
    assert line.ys == [50, 90, 99, 100]
    assert line.xs == [report.jobs[0].figure(f"ttft_s.{part}") for part in ("p50", "p90", "p99", "max")]
    assert len(timelines(report, report.groups[0])) == 3


def test_distributions_agree_with_the_figures(sweep):
    report = report_of(sweep)
    ttft, itl, _ = distributions(report, report.groups[0])
    for job, line in zip(report.jobs, ttft.lines, strict=False):
        assert max(line.xs) == pytest.approx(job.figure("ttft_s.max"), abs=1e-5)
        assert (line.ys[0], line.ys[-1]) == (0, 100)
    assert len(itl.lines[0].xs) == 104  # 228 gaps, drawn as quantiles
    assert np.median(samples(report.jobs[0].recording)["itl_s"]) == pytest.approx(
        report.jobs[0].figure("itl_s.p50"), abs=1e-5
    )


def test_a_timeline_of_many_steps_keeps_its_means(tmp_path):
    make_job(tmp_path, 0, (), {}, make_recording(num_tokens=3000, num_requests=3))
    report = report_of(tmp_path)
    [(_, [requests, pool])] = timelines(report, report.groups[0])
    assert all(len(line.xs) <= NUM_MOMENTS for line in (*requests.lines, *pool.lines))
    assert set(requests.lines[0].ys) == {3.0}
    free = report.jobs[0].recording.steps["free_blocks"].mean()
    assert np.mean(pool.lines[0].ys) == pytest.approx(100 * (1 - free / 64), rel=0.02)


def test_points_lie_inside_of_the_axes(sweep):
    report = report_of(sweep)
    [group] = report.groups
    for chart in (*curves(report, report.jobs, of_load=False), *distributions(report, group)):
        drawing = draw(replace(chart, log_y=chart.title.endswith("throughput")))
        for path in drawing.paths:
            numbers = [float(one) for one in re.findall(r"[\d.]+", path.d)]
            assert 0 < min(numbers) and max(numbers) <= drawing.right
        assert len(drawing.x_ticks) >= 2
        assert all(drawing.top <= tick.at <= drawing.bottom for tick in drawing.y_ticks)


@pytest.mark.parametrize(
    ("low", "high", "is_log", "ticks"),
    [
        (0, 1, False, ["0", "0.25", "0.5", "0.75", "1"]),
        (0, 130, False, ["0", "50", "100"]),
        (0, 0.0072, False, ["0", "0.002", "0.004", "0.006"]),
        (0.001, 2, True, ["0.001", "0.01", "0.1", "1"]),
        (0.02, 0.5, True, ["0.03", "0.1", "0.3"]),
        (200, 5000, True, ["300", "1,000", "3,000"]),
    ],
)
def test_ticks_are_round(low, high, is_log, ticks):
    assert [tick.text for tick in Axis(low, high, 0, 100, is_log).ticks()] == ticks


def test_numbers_have_three_digits_and_no_exponent():
    assert [number(one) for one in (0, 12345.6, 78.94, 4.567, 0.0123, 0.00012345)] == [
        "0", "12,346", "78.9", "4.57", "0.012", "0.00012",
    ]  # fmt: skip
    assert (seconds(0.0052), seconds(2.5)) == ("5.2 ms", "2.5 s")


def test_the_page_and_the_table_show_every_job(sweep, capsys):
    assert main([str(sweep), "png=false"]) == 0
    html, table = (sweep / "index.html").read_text(), (sweep / "report.md").read_text()
    assert capsys.readouterr().out.splitlines() == [str(sweep / "index.html"), str(sweep / "report.md")]
    for job in range(6):
        assert f'data-job="{job}"' in html
        assert re.search(rf"^\| {job} \|", table, re.M)
    for cause in ("ValueError: no mind", "killed by SIGKILL"):
        assert cause in html and cause in table
    assert "/tmp" not in html and str(sweep) not in html


def test_the_page_asks_for_nothing_from_elsewhere(sweep):
    main([str(sweep), "png=false"])
    html = (sweep / "index.html").read_text()
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=[\"'](?!data:|#)|url\(|@import|https?:", html)


def test_hostile_values_are_text(tmp_path):
    for place, name in enumerate((HOSTILE, "harmless")):
        config = {"scheduler": {"name": name}, "model": {"checkpoint": HOSTILE}, "workload": {HOSTILE: place // 2}}
        make_job(tmp_path, place, [f"scheduler={name}"], config, make_recording(), device=HOSTILE, kernels=HOSTILE)
    make_job(tmp_path, 2, [f"x={HOSTILE}"], **failed(error=HOSTILE))
    make_job(tmp_path, 2, ["x=2"], own="<b>|2", key="other", **failed())  # a number twice: folders are names
    main([str(tmp_path), "png=false"])
    html, table = (tmp_path / "index.html").read_text(), (tmp_path / "report.md").read_text()
    assert html.count("<script") == 1
    assert "&lt;script&gt;alert(" in html
    for line in table.splitlines():
        assert "<" not in re.sub(r"`[^`]*`", "", line)


def test_a_code_span_holds_what_is_given_to_it():
    assert code("a|b\n`c`") == "`a\\|b 'c'`"
    assert code("") == ""


def test_a_single_run_whose_result_and_records_lie_in_the_folder_is_reported(tmp_path):
    recording = make_recording()
    write_recording(recording, tmp_path)
    line = {"status": "done", "error": None, "config": {"tp": 1}, "metrics": summarise(recording, Slo())}
    append_line(tmp_path / "results.jsonl", line)
    assert main([str(tmp_path), "png=false"]) == 0
    [job] = read_jobs([tmp_path])
    assert (job.id, job.recording.seconds) == ("0", pytest.approx(recording.seconds))
    assert re.search(r"^\| 0 \|", (tmp_path / "report.md").read_text(), re.M)


def test_several_sweeps_are_shown_side_by_side(sweep, tmp_path, capsys):
    other = make_sweep(tmp_path / "other")
    assert main([str(sweep), str(other), f"out={tmp_path / 'both'}", "baseline=other/1", "png=false"]) == 0
    table = (tmp_path / "both/report.md").read_text()
    assert "Ratios are to job other/1" in table and "| sweep/0 |" in table


def test_jobs_without_records_or_figures_are_shown_with_what_they_have(tmp_path):
    make_job(tmp_path, 0, ["engine.max_num_seqs=2"], {"engine": {"max_num_seqs": 2}})
    make_job(tmp_path, 1, ["engine.max_num_seqs=4"], {"engine": {"max_num_seqs": 4}}, make_recording())
    (tmp_path / "1/steps.npz").write_bytes(b"PK\x03\x04 cut off")
    assert main([str(tmp_path), "png=false"]) == 0
    table = (tmp_path / "report.md").read_text()
    assert re.search(r"^\| 0 \| `2` \| – \|", table, re.M)


def test_a_damaged_record_is_said_and_left_out(sweep, capsys):
    (sweep / "0/steps.npz").write_bytes(b"not a record")
    assert main([str(sweep), "png=false"]) == 0
    assert "steps.npz cannot be read: " in capsys.readouterr().err


def test_records_of_another_version_are_said_and_left_out(sweep, capsys):
    with np.load(sweep / "0/steps.npz") as file:
        arrays = {name: file[name] for name in file.files if name not in ("free_blocks", "running")}
    np.savez_compressed(sweep / "0/steps.npz", **arrays)
    (sweep / "1/requests.jsonl").write_text('{"other": 1}\n')
    assert main([str(sweep), "png=false"]) == 0
    said = capsys.readouterr().err
    assert f"{sweep}/0/steps.npz has no running, free_blocks; the report shows this job without it" in said
    assert f"{sweep}/1 holds other records than these: KeyError('arrival_s')" in said


def test_a_sweep_whose_jobs_all_failed_has_a_report(tmp_path):
    make_job(tmp_path, 0, ["a=1"], **failed())
    assert main([str(tmp_path), "png=false"]) == 0
    assert "it broke" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the report needs the folder of a sweep: hookline report outputs/DATE"),
        (["sweep", "baselin=1"], "unknown key 'baselin'. Did you mean 'baseline'? Available: baseline, out, png"),
        (["sweep", "baseline=9"], "no job is named baseline=9; give first or one of: 0, 1, 2, 3"),
        (["sweep", "baseline=5"], "baseline=5 killed and has no figures; give one of: 0, 1, 2, 3"),
        (["nowhere"], "there is no nowhere/results.jsonl; give the folder of a sweep (hookline bench -m ...)"),
        (["."], "there is no results.jsonl; give the folder of a sweep, as sweep"),
        (["sweep", "png=maybe"], "png=maybe must be auto, true or false"),
        (["sweep", "out=sweep/results.jsonl"], "out=sweep/results.jsonl cannot be written: "),
    ],
)
def test_a_mistake_costs_one_line(arguments, message, sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"hookline: error: {message}")


def test_an_empty_sweep_is_an_error(tmp_path, capsys):
    (tmp_path / "results.jsonl").touch()
    assert main([str(tmp_path), "png=false"]) == 2
    assert "results.jsonl is empty: no job of the sweep has ended yet" in capsys.readouterr().err


def test_without_matplotlib_the_report_says_how_to_get_plots(sweep, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
    )
    assert main([str(sweep)]) == 0
    fix = 'since matplotlib is not installed; install it with: pip install "hookline[report]"'
    assert f"hookline: no PNG plots, {fix}" in capsys.readouterr().err
    assert main(["nowhere"]) == 2
    assert capsys.readouterr().err.startswith("hookline: error: there is no nowhere/results.jsonl")
    assert main([str(sweep), "png=true"]) == 2
    assert "png=true needs matplotlib, which is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_plots_are_png_files(sweep, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra `report`)")
    limits = {"max_num_seqs": 2, "block_size": None}
    config = {"scheduler": {"name": "$x^"}, "engine": limits}  # not to be read as mathematics
    make_job(sweep, 6, ["scheduler=$x^", "engine.max_num_seqs=2"], config, make_recording())
    assert main([str(sweep), "png=true"]) == 0
    paths = capsys.readouterr().out.splitlines()[2:]
    assert [path.rpartition("/")[2] for path in paths] == ["distributions.png", "curves.png", "timelines.png"]
    for path in paths:
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_the_command_imports_no_torch_and_explains_itself():
    code = "import sys; from hookline.core.report.command import main; main(['-h']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == USAGE.format(report="hookline report") + "\nFalse\n"


@pytest.mark.parametrize(
    "folder", sorted(page.parent for page in ROOT.glob("docs/reports/*/index.html")), ids=lambda folder: folder.name
)
def test_a_report_in_the_documentation_is_what_its_results_give(folder, tmp_path):
    assert main([str(folder), f"out={tmp_path}", "png=false"]) == 0
    made, kept = ((one / "index.html").read_text() for one in (tmp_path, folder))
    assert (tmp_path / "report.md").read_text() == (folder / "report.md").read_text()
    for part in ("<svg", "<tr", "<h2", "data-job"):  # pixels may differ with another numpy
        assert made.count(part) == kept.count(part), "hookline report makes another page now: make it again"
