"""What it adds, and whom it leaves alone, from end to end in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hookline_steering import SteeringArguments, SteeringConfig
from hookline_steering.extension import Steering
from safetensors.torch import save_file

from hookline import LLM, SamplingParams
from hookline.core.testing.extension_suite import ExtensionSuite

SIZES = {"cpu_cache_gib": 0.1, "max_model_len": 128}
PROMPT = "def f(x):\n"


def params(**steering: Any) -> SamplingParams:
    extra = {"steering": steering} if steering else {}
    return SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, extra_args=extra)


class TestSteering(ExtensionSuite):
    extension, arguments, sizes_alike = Steering, SteeringArguments, True
    examples = ({"vector": "one", "strength": 2.0}, {"vector": "two", "strength": -1.5})

    @pytest.fixture(autouse=True)
    def vectors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        generator = torch.Generator().manual_seed(0)
        file = tmp_path / "vectors.safetensors"
        save_file({name: torch.randn(32, generator=generator) for name in ("one", "two")}, file)
        monkeypatch.setattr(type(self), "config", SteeringConfig(str(file), [0, 2]))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    with LLM(device="cpu", engine=SIZES) as llm:
        spec = llm.engine.executor.runner.extensions.spec
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(spec.hidden_size, generator=generator)
    save_file({"one": one, "each": one.expand(spec.num_layers, -1).contiguous()}, tmp_path / "vectors.safetensors")
    yield str(tmp_path / "vectors.safetensors")


def test_only_those_who_ask_are_steered_and_both_forms_of_a_vector_are_the_same(file: str) -> None:
    asked = [params(), params(vector="one", strength=3.0), params(vector="each", strength=3.0), params(strength=0.0)]
    with LLM(device="cpu", engine=SIZES, extensions={"steering": {"file": file, "layers": [0]}}) as llm:
        (alone,) = llm.generate(PROMPT, params())
        plain, one, each, none = (output.token_ids for output in llm.generate([PROMPT] * 4, asked))
        (again,) = llm.generate(PROMPT, params())
    assert plain == alone.token_ids == none == again.token_ids
    assert one == each != plain


def test_what_cannot_be_used_is_refused_by_name(file: str) -> None:
    with LLM(device="cpu", engine=SIZES, extensions={"steering": {"file": file}}) as llm:
        (output,) = llm.generate(PROMPT, params(vector="two", strength=1.0))
    assert output.error is not None and "there is: each, one" in output.error
    with LLM(device="cpu", engine=SIZES) as llm:
        (output,) = llm.generate(PROMPT, params(vector="one", strength=1.0))
    assert output.error is not None and "set extensions.steering.file" in output.error
