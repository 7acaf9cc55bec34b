"""`python -m core.run task=embed`: vectors as text, JSON lines and arrays, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.run.command import main
from hookline.core.run.results import print_text, write_results

SMALL = ["device=cpu", "engine.num_blocks=64"]


def output(number: int, vector: np.ndarray | None, error: str | None = None) -> RequestOutput:
    reason = FinishReason.STOP if error is None else FinishReason.ERROR
    return RequestOutput(number, "text", [1, 2], [], reason, error=error, vector=vector)


OUTPUTS = [
    output(0, np.arange(10, dtype=np.float32)),
    output(1, None, "it is empty"),
    output(2, np.ones(10, np.float32)),
]


def test_an_array_has_a_row_for_each_prompt_and_nan_for_those_refused(tmp_path: Path) -> None:
    write_results(OUTPUTS, tmp_path / "found.npy")
    found = np.load(tmp_path / "found.npy")
    assert found.dtype == np.float32 and found.shape == (3, 10)
    assert found[0].tolist() == [*range(10)] and np.isnan(found[1]).all() and (found[2] == 1).all()


def test_json_lines_hold_the_vector(tmp_path: Path) -> None:
    write_results(OUTPUTS, tmp_path / "found.jsonl")
    first, refused, _ = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert first["vector"] == [float(one) for one in range(10)] and first["finish_reason"] == "stop"
    assert "vector" not in refused and refused["error"] == "it is empty"


def test_text_shows_the_first_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(OUTPUTS[:1])
    assert capsys.readouterr().out == "=== 1/1: 10 numbers\ntext\n[0, 1, 2, 3, 4, 5, 6, 7, …]\n\n"


@pytest.mark.slow
def test_a_prompts_file_is_embedded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("import os\ndef f(x):\n")
    keys = ["task=embed", "pooling.dimensions=16", f"prompts_file={tmp_path}/texts.txt", f"output={tmp_path}/v.npy"]
    assert main([*keys, *SMALL]) == 0
    found = np.load(tmp_path / "v.npy")
    assert found.shape == (2, 16) and np.linalg.norm(found, axis=1) == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_line_whose_sampling_would_have_no_effect_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a", "max_tokens": 3}\n')
    assert main(["task=embed", f"prompts_file={tmp_path}/texts.jsonl"]) == 2
    assert "texts.jsonl:1: sampling.* is for task=generate; task=embed draws no token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["task=embeds"], "task='embeds' is not one of generate, embed, classify"),
        (["task=embed", "pooling.dimensions=0"], "pooling.dimensions=0 must be at least 1"),
        (["pooling.dimensions=8"], "pooling.* is for task=embed; a completion has no vector"),
        (["task=embed", "sampling.max_tokens=3"], "sampling.* is for task=generate; task=embed draws no token"),
        (["task=classify", "sampling.top_k=3"], "sampling.* is for task=generate; task=classify draws no token"),
        (["output=found.npy"], "the name must end in .jsonl; leave output out"),
        (["task=embed", "output=found.txt"], "the name must end in .jsonl or .npy; leave output out"),
        (["task=embed", "pooler=none"], "none"),
    ],
)
def test_a_mistake_is_one_line(keys: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*keys, *SMALL, "prompt=x"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hookline: error:") and error.count("\n") == 1
