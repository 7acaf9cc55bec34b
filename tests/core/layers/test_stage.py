"""Models cut into stages, by the suite's own check: that it passes ours and catches a wrong one."""

from typing import Any

import pytest
import torch

from hookline.core.contracts import WHOLE_MODEL, Runtime, Stage
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.layers import FinalNorm, ParallelHead, StageLayers, VocabParallelEmbedding
from hookline.core.testing.model_suite.driver import Chunk
from hookline.core.testing.model_suite.stage_checks import check_stages
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.plugins.models.qwen3 import Qwen3
from tests.hf_models import QWEN3

CONFIG = {**QWEN3, "model_type": "qwen3", "num_hidden_layers": 3}
CHUNK = Chunk(0, 0, [5, 9, 2, 40])


def runtime(stage: Stage = WHOLE_MODEL) -> Runtime:
    return Runtime(torch.device("cpu"), torch.float32, LocalRanks(), PlainKernels(None, None), stage=stage)  # type: ignore[arg-type]


class FirstLayersTwice(Qwen3):
    """Every stage begins with layer 0."""

    def __init__(self, hf_config: Any, runtime: Runtime) -> None:
        super().__init__(hf_config, runtime)
        self.layers._layers[0].index = 0


class NeverStreams(Qwen3):
    """Every stage begins with nothing."""

    def forward(self, token_ids_T: Any, positions_T: Any, attend: Any) -> Any:
        if getattr(attend, "stream_TD", None) is not None:
            attend.stream_TD = attend.stream_TD * 0
        return super().forward(token_ids_T, positions_T, attend)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_cut_model_computes_what_it_does_whole_and_holds_each_tensor_once(is_tied):
    check_stages(Qwen3, {**CONFIG, "tie_word_embeddings": is_tied}, CHUNK, "cpu", 1e-4)


@pytest.mark.parametrize(
    ("model", "message"),
    [(FirstLayersTwice, r"is read by stages \[0, 1, 2\] of 3"), (NeverStreams, "logits of stages of")],
)
def test_a_model_whose_stages_are_not_its_own_is_caught(model, message):
    config = {**CONFIG, "tie_word_embeddings": True}
    with pytest.raises(AssertionError, match=message):
        check_stages(model, config, CHUNK, "cpu", 1e-4)


def test_a_middle_stage_allocates_neither_embedding_nor_norm_nor_head():
    place = runtime(Stage(1, 3, 1, 2))
    embed = VocabParallelEmbedding(96, 8, place, is_tied=True)
    parts = [embed.weight_VD, FinalNorm(8, 1e-6, place).weight_D, ParallelHead(96, 8, place).weight_VD]
    assert [part.numel() for part in parts] == [0, 0, 0]
    targets = {**embed.targets("embed"), **FinalNorm(8, 1e-6, place).targets("norm")}
    assert all(target.view is None for target in targets.values())


def test_layers_of_other_stages_are_neither_made_nor_read():
    made = []

    class Layer:
        def __init__(self, index: int) -> None:
            made.append(index)

        def weight_targets(self) -> dict[str, Any]:
            return {}

    layers = StageLayers(Layer, 5, runtime(Stage(1, 2, 3, 5)))
    assert made == [3, 4] and len(layers) == 2 and layers[0] is next(iter(layers))
    assert sorted(layers.targets("model.layers")) == [f"model.layers.{index}.*" for index in range(3)]
