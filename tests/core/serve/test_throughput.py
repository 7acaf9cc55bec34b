"""The line of the log that says how fast an engine is."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest

from hookline.core.contracts import StepStats
from hookline.core.serve.throughput import Throughput


def stats(**given: Any) -> StepStats:
    return StepStats(**{one.name: 0 for one in fields(StepStats)} | given)


def test_a_line_every_ten_seconds_says_what_the_steps_did(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    with caplog.at_level(logging.INFO, "hookline.throughput"):
        for second in range(1, 26):
            now[0] = float(second)
            throughput.count(
                stats(
                    num_running=3, num_waiting=1, num_free_blocks=75, num_blocks=100, num_generated_tokens=20,
                    num_prefill_tokens=5, num_prompt_tokens=10, num_cached_tokens=5,
                )
            )  # fmt: skip
    assert [one.getMessage() for one in caplog.records] == [
        "3 running, 1 waiting; 5.0 prompt tokens/s, 20.0 tokens/s; KV cache 25.0 % full, 50.0 % of prompts cached"
    ] * 2
    assert caplog.records[0].fields["tokens_s"] == 20.0  # type: ignore[attr-defined]


def test_the_time_without_requests_is_no_part_of_a_line(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    with caplog.at_level(logging.INFO, "hookline.throughput"):
        for second in (1000, *range(1001, 1011)):
            now[0] = float(second)
            throughput.count(stats(num_generated_tokens=10))
    (line,) = [one.getMessage() for one in caplog.records]
    assert "; 0.0 prompt tokens/s, 10.0 tokens/s;" in line
