"""The examples' step extensions, all at once: each request gets what it asked for, whatever else its batch asks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hookline import LLM, SamplingParams
from tests.hf_models import QWEN3, make_qwen3
from tests.test_pooling_parity import random_prompts
from tests.test_step_extensions import ENGINE

NAMES = ("steering", "logitlens", "watermark")
PROMPTS = random_prompts()[:5]
ASKED: list[dict[str, Any]] = [
    {},
    {"steering": {"vector": "one", "strength": 1.5}},
    {"logitlens": {"top": 2}},
    {"watermark": {"delta": 3.0}},
    {"steering": {"vector": "one", "strength": -1.0}, "logitlens": {"top": 1}, "watermark": {"delta": 1.0}},
]
PARAMS = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=asked) for asked in ASKED]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen3")
    make_qwen3(folder, num_hidden_layers=4)
    vector = torch.randn(QWEN3["hidden_size"], generator=torch.Generator().manual_seed(0))
    save_file({"one": vector}, folder / "vectors.safetensors.file")
    steering = {"file": str(folder / "vectors.safetensors.file"), "layers": [0, 2]}
    extensions = {"steering": steering, "logitlens": {"layers": [0, 1, 3], "most": 2}}
    paths = [str(Path(__file__).parents[1] / "examples" / f"hookline-{name}") for name in NAMES]
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("HOOKLINE_PLUGINS", ",".join(f"hookline_{name}" for name in NAMES))
        yield {
            "model": {"name": "qwen3", "checkpoint": str(folder)},
            "device": "cpu",
            "engine": ENGINE,
            "extensions": extensions,
        }


def told(outputs: Any) -> list[Any]:
    """Tokens, and of the lens the layers and ids; probabilities differ in their last bits."""
    return [
        (one.token_ids, [[(layer["layer"], [top["id"] for top in layer["top"]]) for layer in token]
                         for token in (one.extensions or {}).get("logitlens", [])])
        for one in outputs
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(options: Any) -> list[Any]:
    with LLM(**options) as llm:
        pairs = zip(PROMPTS, PARAMS, strict=True)
        return told([llm.generate(prompt, params)[0] for prompt, params in pairs])


@pytest.mark.parametrize(
    "ways", [{}, {"engine": {"overlap": True}}, {"engine": {"max_num_batched_tokens": 8}}], ids=str
)
def test_a_crowd_gets_what_each_gets_alone(ways: Any, options: Any, alone: list[Any]) -> None:
    with LLM(**{**options, "engine": {**ENGINE, **ways.get("engine", {})}}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert told(outputs) == alone
    assert len({tuple(tokens) for tokens, _ in alone}) == len(alone)
    assert [bool(lens) for _, lens in alone] == ["logitlens" in asked for asked in ASKED]


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}, {"pp": 4}], ids=str)
def test_ranks_and_stages_give_the_same(ranks: Any, options: Any, alone: list[Any]) -> None:
    with LLM(**options, **ranks) as llm:
        assert told(llm.generate(PROMPTS, PARAMS)) == alone
