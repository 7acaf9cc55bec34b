"""tools/bench_servers.py: loads, the figures of a server, and the table of two."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("httptools", reason="needs the extra: pip install hookline[serve]")

from hookline.core.bench.recorder import Recording, RequestRecord
from tests.core.bench.remote.fake_server import FakeServer
from tools.bench_servers import by_turn, decode_tok_s, main, read, rows, workload

WAITS = {"ttft_s": {"p50": 0.2, "p99": 0.3}, "tpot_s": {"p50": 0.006}, "refused": 0, "client_busy_percent": 7.0}
SLOWER = {**WAITS, "output_tok_s": 1000.0, "decode_tok_s": 1200.0, "turns": [{}]}
FASTER = {**SLOWER, "output_tok_s": 1250.0, "decode_tok_s": None, "ttft_s": {"p50": 0.1, "p99": 0.4}}


def record(arrival_s, first_s, last_s, follows=None, cached=0):
    times = {"first_token_s": first_s, "finish_s": last_s, "start_s": arrival_s, "follows": follows}
    return RequestRecord(arrival_s, prompt_tokens=10, output_tokens=4, cached_tokens=cached, **times)


def recording(requests, times_s):
    none = np.empty(0, dtype=np.int64)
    steps = {"end_s": np.array(times_s), "num_drawn": np.ones(len(times_s), dtype=np.int64)}
    return Recording(times_s[-1], 0, 0, requests, steps, none, none, none)


def test_a_load_is_requests_at_once_or_conversations_with_keys_of_the_workload():
    assert workload("64x128+1024").num_prompts == 64
    assert workload("64x128+1024").output_len == (1024, 1024) and workload("64x128+1024").turns == (1, 1)
    chats = workload("24x20x128+32:shared_prefix_len=4096:think_s=[0.5,1]")
    assert (chats.num_prompts, chats.turns, chats.prompt_len) == (24, (20, 20), (128, 128))
    assert chats.shared_prefix_len == 4096 and chats.think_s == (0.5, 1)


def test_what_is_no_load_and_no_setting_is_named():
    with pytest.raises(SystemExit, match="'3x4' is not REQUESTSxPROMPT"):
        workload("3x4")
    with pytest.raises(SystemExit, match="unknown: out; known are results"):
        main(["out=file", "a=http://127.0.0.1:1", "1x2+3"])


def test_the_decode_speed_counts_from_the_last_first_token_to_the_first_end():
    requests = [record(0, 1.0, 4.0), record(0, 2.0, 6.0)]
    assert decode_tok_s(recording(requests, [1.0, 2.0, 2.5, 3.0, 4.0, 6.0])) == 1.5
    assert decode_tok_s(recording([record(0, 1.0, 2.0), record(0, 3.0, 4.0)], [1.0, 2.0, 3.0, 4.0])) is None


def test_first_tokens_of_conversations_are_told_by_turn():
    requests = [record(0, 1.0, 2.0), record(3, 3.5, 4.0, 0, cached=8), record(0, 2.0, 3.0), record(4, 4.1, 5.0, 2)]
    first, second = by_turn(recording(requests, [1.0, 5.0]))
    assert first == {"p50_s": 1.5, "p90_s": 1.9, "cached": 0.0}
    assert second["p50_s"] == 0.3 and second["cached"] == 0.4


def test_rows_have_both_servers_and_ratios_above_1_where_the_second_is_faster():
    results = {("8B 2x3+4", "vllm"): SLOWER, ("8B 2x3+4", "hookline"): FASTER}
    [line] = rows("8B 2x3+4", results, ("vllm", "hookline"))
    assert line == ("| 8B 2x3+4 | 1,000; 200.0, 300.0; 6.00; 1,200 | 1,250; 100.0, 400.0; 6.00; – | 1.25; 2.00; – |")
    del results["8B 2x3+4", "vllm"]
    assert rows("8B 2x3+4", results, ("vllm", "hookline"))[0].startswith("| 8B 2x3+4 | – | 1,250;")


def test_conversations_have_a_row_for_some_turns():
    turns = [{"p50_s": 0.01 * (turn + 1), "p90_s": 0.5, "cached": 0.25} for turn in range(6)]
    lines = rows("chat", {("chat", "a"): {"turns": turns}, ("chat", "b"): {"turns": turns}}, ("a", "b"))
    assert [line.split(" | ")[0] for line in lines] == ["| chat, turn 1", "| chat, turn 2", "| chat, turn 5"]
    assert lines[2] == "| chat, turn 5 | 50.0, 500.0 ms, 25 % cached | 50.0, 500.0 ms, 25 % cached | 1.00 |"


@pytest.mark.slow
def test_servers_one_after_the_other_end_in_one_table(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    common = [f"results={path}", "of=made up", "sides=one,two", "4x8+12", "2x3x5+9"]
    with FakeServer() as first:
        assert main([f"one={first.url}", *common]) == 0
    assert "| made up 4x8+12 | " in (told := capsys.readouterr().out) and "| – | –; –; – |" in told
    with FakeServer() as second:
        assert main([f"two={second.url}", *common]) == 0
    assert {body["max_tokens"] for body in second.bodies} == {8, 12, 9}  # the warm-ups are short
    assert len(read(path)) == 4
    capsys.readouterr()
    assert main([f"results={path}", "sides=one,two"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    names = ["| made up 4x8+12", "| made up 2x3x5+9, turn 1", "| made up 2x3x5+9, turn 2"]
    assert [line.split(" | ")[0] for line in lines] == names
    assert not any("| – " in line for line in lines)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_named_and_the_others_are_measured(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    with FakeServer() as server:
        assert main(["gone=http://127.0.0.1:1", f"here={server.url}", f"results={path}", "2x4+9"]) == 0
    captured = capsys.readouterr()
    assert "gone failed under 2x4+9: " in captured.err
    assert [json.loads(line)["side"] for line in path.read_text().splitlines()] == ["here"]
