"""Step extensions see and change the layers of every model: equal to transformers with hooks on its own layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hookline import LLM
from hookline.core.errors import RequestError
from hookline.plugins.models.transformers.taps import last_norm, shown_layers
from tests.small_models import CONFIGS, save_checkpoint
from tests.test_model_parity import PLUGINS, SEEDS
from tests.test_step_extensions import ENGINE, check, params, plugin  # noqa: F401  (a fixture)

PROMPTS = [[5, 9, 2, 11], [7, 3, 3, 8, 1, 4, 90], [13]]
NAMES = {
    "gemma3": "gemma3",
    "olmo2": "olmo2",
    "qwen3_next": "qwen3_next",
    "gpt_oss": "gpt_oss",
    "qwen2": "qwen2",
    "llama": "transformers",
    "olmo2 of transformers": "transformers",
}


def deep(name: str) -> dict[str, Any]:
    """At least three layers, since Probe reads the third."""
    config = dict(CONFIGS[name])
    return {**config, "num_hidden_layers": max(3, config["num_hidden_layers"])}


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_requests_get_what_transformers_gives_with_and_without_an_extension(case: str, tmp_path: Path) -> None:
    name = case.partition(" ")[0]
    config = deep(name)
    reference = save_checkpoint(config, tmp_path, SEEDS.get(name, 0))
    model = {"name": NAMES[case], "checkpoint": str(tmp_path)}
    options: dict[str, Any] = {"engine": {**ENGINE, "max_num_batched_tokens": 8}, "kernels": "torch"}
    with LLM(model=model, device="cpu", **options) as llm:
        outputs = llm.generate(PROMPTS, params(len(PROMPTS)))
    check((str(tmp_path), reference), outputs, PROMPTS)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize(("name", "ranks"), [("gemma3", {"tp": 2}), ("olmo2", {"pp": 2}), ("qwen3_next", {"pp": 2})])
def test_ranks_and_stages_give_the_same(name: str, ranks: dict[str, int], tmp_path: Path) -> None:
    save_checkpoint(deep(name), tmp_path, SEEDS.get(name, 0))
    model = {"name": PLUGINS.get(CONFIGS[name]["model_type"], name), "checkpoint": str(tmp_path)}
    told = []
    for ways in ({}, ranks):
        with LLM(model=model, device="cpu", kernels="torch", engine=ENGINE, **ways) as llm:
            told.append([output.token_ids for output in llm.generate(PROMPTS, params(len(PROMPTS)))])
    assert told[0] == told[1]


def test_a_decoder_without_a_known_norm_or_a_list_of_layers_is_left_alone() -> None:
    nn = pytest.importorskip("torch").nn
    with pytest.raises(RequestError, match=r"transformers' Linear has no norm .* \(norm, .*use another model"):
        last_norm(nn.Linear(2, 2))
    shown: list[int] = []
    decoder = nn.Sequential(nn.Linear(2, 2))
    with shown_layers(decoder, 1, SimpleNamespace(tap=lambda layer, stream: shown.append(layer))):
        decoder(nn.Parameter(nn.init.ones_(nn.Linear(2, 2).weight.data)))
    assert shown == []
