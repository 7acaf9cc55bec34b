"""`hookline quantize texts=`: perplexity before and after, and values rounded for the inputs that texts give."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.config.settings import validate
from hookline.core.contracts import StoredForm
from hookline.core.plugin.host import PluginHost
from hookline.core.quantize.calibration import passes, reading, recording
from hookline.core.quantize.command import main
from hookline.core.quantize.recording import Moments
from hookline.plugins.quantizations import RoundedInt4Config
from hookline.plugins.quantizations.on_the_fly import RoundedInt4
from tests.hf_models import make_qwen3, make_qwen3_moe

ENGINE: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 32, "max_num_batched_tokens": 64, "max_model_len": 64}
PROMPTS = [[5, 6, 7, 8, 9, 30, 31, 32], [20, 21, 22, 23, 40]]


@pytest.fixture(scope="module")
def bundled() -> Iterator[Path]:
    with as_file(files("hookline.plugins.models") / "qwen3_tiny") as folder:
        yield folder


def recorder(folder: Path, max_bytes: int) -> tuple[LLM, Moments]:
    moments, host = Moments(max_bytes), PluginHost.load()
    model = {"name": "auto", "checkpoint": str(folder)}
    config = validate({"model": model, "device": "cpu", "engine": ENGINE, "dtype": "float32"}, host)
    quantization = RoundedInt4(RoundedInt4Config(), StoredForm())
    return reading(recording(config, quantization, moments), host), moments


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_moe])
def test_weights_that_see_their_inputs_change_no_token_and_sum_all_of_them(make: Any, tmp_path: Path) -> None:
    model = make(tmp_path)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", engine=ENGINE) as llm:
        expected = [list(one.token_ids) for one in llm.generate(PROMPTS, params)]
    llm, moments = recorder(tmp_path, 1 << 30)
    with llm:
        assert [list(one.token_ids) for one in llm.generate(PROMPTS, params)] == expected
        assert not moments.of, "nothing is recorded outside a pass"
        (found,) = list(passes(llm, PROMPTS, moments))
    inputs: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: Any, given: Any, __: Any) -> None:
            x_TD = given[0].reshape(-1, given[0].shape[-1])
            inputs[name] = inputs.get(name, 0) + x_TD.T @ x_TD

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name in found:
            module.register_forward_hook(note(name))
    with torch.no_grad():
        for prompt in PROMPTS:
            model(torch.tensor([prompt]))
    dense = [name for name in found if ".experts." not in name]
    assert {name.rsplit(".", 1)[1] for name in dense} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name in dense:
        torch.testing.assert_close(found[name], inputs[name], rtol=1e-4, atol=1e-3)
    if make is make_qwen3_moe:
        experts = {name.split(".experts.")[1] for name in found if ".experts." in name}
        assert {one.split(".")[1] for one in experts} == {"gate_proj", "up_proj", "down_proj"}


def test_sums_that_do_not_fit_take_further_passes_and_are_the_same(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    llm, moments = recorder(tmp_path, 1 << 30)
    with llm:
        (whole,) = [dict(one) for one in passes(llm, PROMPTS, moments)]
    llm, moments = recorder(tmp_path, 1)
    with llm:
        several = [dict(one) for one in passes(llm, PROMPTS, moments)]
    assert len(several) > 4
    assert all(len({id(one) for one in found.values()}) == 1 for found in several)
    together = {name: one for found in several for name, one in found.items()}
    assert together.keys() == whole.keys()
    for name, one in whole.items():
        torch.testing.assert_close(together[name], one)


@pytest.mark.slow
def test_int4_for_texts_of_a_kind_predicts_these_better_than_int4_by_the_nearest(
    bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": inspect.getsource(module)} for module in (textwrap, json.decoder, shutil, re)]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(map(json.dumps, rows)))
    found = {}
    for rounding in ("nearest", "calibrated"):
        arguments = [
            str(bundled),
            str(tmp_path / rounding),
            "quantization=int4",
            f"texts={texts}",
            f"rounding={rounding}",
        ]
        assert main([*arguments, "device=cpu"]) == 0
        told = capsys.readouterr().out
        assert "56 linears quantised" in told and "had no inputs" not in told
        (numbers,) = re.findall(r"([\d.]+) before, ([\d.]+) after", told)
        found[rounding] = tuple(map(float, numbers))
    assert found["calibrated"][0] == found["nearest"][0], "both have the same unquantised model"
    grown = {name: after / before - 1 for name, (before, after) in found.items()}
    assert 0 < grown["calibrated"] < 0.75 * grown["nearest"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["quantization=int4", "rounding=calibrated"], "give texts=FILE"),
        (["quantization=int4", "rounding=best"], "rounding=best is not one of nearest, calibrated"),
        (["quantization=int4", "texts={missing}"], "cannot be read"),
        (["quantization=int4", "texts={empty}"], "has no text"),
        (["quantization=int4", "texts={short}", "device=cpu"], "has 11 characters"),
        (["quantization=int4", "texts={rows}"], '{"text": "..."}'),
        (["quantization=int4", "texts={short}", "device=gpu"], "gpu"),
        (["quantization=int4", "text={short}"], "Did you mean 'texts'?"),
    ],
)
def test_what_is_missing_or_unknown_is_an_error_of_one_line(
    bundled: Path, arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: tmp_path / name for name in ("missing", "empty", "short")} | {"rows": tmp_path / "rows.jsonl"}
    places["empty"].write_text(" \n")
    places["short"].write_text("import abc\n")
    places["rows"].write_text('{"prompt": "a"}\n')
    target = tmp_path / "out"
    assert main([str(bundled), str(target), *(one.format(**places) for one in arguments)]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "error: " in one)
    assert told in line
    assert not target.exists()
