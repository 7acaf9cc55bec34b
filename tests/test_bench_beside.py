"""tools/bench_beside.py: a peer and Hookline on the same loads, and the table of both."""

from __future__ import annotations

import pytest

from tools import bench_beside
from tools.bench_beside import main, percentiles, run_side, table

SIZES = {"max_num_seqs": 8}
RUN = {"output_tok_s": 1000.0, "prompt_tok_s": 20.0, "ttft_ms": [1.0, 2.0, 3.04], "gap_ms": [0.5, 0.6, 0.7]}
FASTER = {**RUN, "output_tok_s": 1500.0}


@pytest.mark.slow
def test_a_peer_runs_each_load_twice_in_a_process_of_its_own(monkeypatch):
    found = run_side("fake", "tests.beside_peer:Peer", ["single"], "qwen3_0_6b", SIZES)
    assert set(found) == {"ready", "single"}
    single = found["single"]
    assert single["best"]["output_tok_s"] >= single["first"]["output_tok_s"] > 0
    assert len(single["first"]["gap_ms"]) == 3


@pytest.mark.slow
def test_a_peer_that_fails_has_no_results_and_says_so(capfd):
    assert run_side("fake", "tests.beside_peer:Breaks", ["single"], "qwen3_0_6b", SIZES) == {}
    told = capfd.readouterr().err
    assert "no such card" in told and "fake ended with exit code 1" in told


def test_the_table_has_first_and_best_runs_and_the_waits_of_open_loops():
    sides = {"vllm": {"single": {"first": RUN, "best": FASTER}, "40": {"first": RUN, "best": RUN}}, "hookline": {}}
    sides["hookline"] = {name: {"first": FASTER, "best": FASTER} for name in ("single", "40")}
    lines = table(["single", "40", "prefill"], sides)
    assert lines[2] == "| single | 1,000, 1,500 | 1,500, 1,500 | 1.50, 1.00 |"
    assert lines[4] == "| 40/s, first token p50/p90/p99 ms, first run | 1.0 / 2.0 / 3.0 | 1.0 / 2.0 / 3.0 | |"
    assert lines[-1] == "| prefill | – | – | – |"


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(bench_beside.importlib.util, "find_spec", lambda name: None)
    asked = []
    monkeypatch.setattr(bench_beside, "run_side", lambda side, *_: asked.append(side) or {})
    assert main(["single"]) == 0 and asked == ["hookline"]
    captured = capsys.readouterr()
    assert "vllm is not installed, so it is missing from the table: pip install vllm" in captured.err
    assert captured.out.splitlines()[0] == "| | vllm: first, best | hookline: first, best | ratio: first, best |"


def test_percentiles_of_nothing_are_zeros():
    assert percentiles([]) == [0, 0, 0]
