"""Models with one planted fault each, and what the conformance suite must say. Legend: as in core/contracts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Attend, ModelSpec, QKNorm, Rope, Runtime, WeightTarget, wanted_rows
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.layers import ParallelHead
from hookline.core.testing.plain_model import PlainModel

TIES = "tie_word_embeddings"


class ForgetsAWeight(PlainModel):
    def weight_targets(self) -> Mapping[str, WeightTarget]:
        return {name: target for name, target in super().weight_targets().items() if name != "layers.1.mlp_norm.weight"}


class LoadsTwoTensorsToOnePlace(PlainModel):
    def weight_targets(self) -> Mapping[str, WeightTarget]:
        targets = dict(super().weight_targets())
        return {**targets, "layers.0.k.weight": targets["layers.0.v.weight"]}


class KeepsItsLatestTokens(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        self.latest_T = token_ids_T + 0
        return super().forward(token_ids_T, positions_T, attend)


class ForgetsScales(PlainModel):
    """Keeps a weight in int8, and computes without the scales that it loads."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__(hf_config, runtime)
        self.int8_D = torch.empty_like(self.norm_D, dtype=torch.int8)
        self.scale = torch.empty(1, device=runtime.device)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        self.norm_D = self.int8_D.to(self.norm_D.dtype)
        return super().forward(token_ids_T, positions_T, attend)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        targets = {**super().weight_targets(), "norm.scale": WeightTarget.whole(self.scale)}
        return {**targets, "norm.weight": WeightTarget.whole(self.int8_D)}


class NeverUsesAWeight(PlainModel):
    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__(hf_config, runtime)
        self.unused_D = torch.empty_like(self.norm_D)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        return {**super().weight_targets(), "extra.weight": WeightTarget.whole(self.unused_D)}


class IgnoresPositions(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        def attend_anywhere(layer: int, qkv_TC: Tensor, rope: Rope | None, norm: QKNorm | None = None) -> Tensor:
            return attend(layer, qkv_TC, None, norm)

        return super().forward(token_ids_T, positions_T, attend_anywhere)


class CountsPositionsFromTheChunk(PlainModel):
    """As learned positions would, if the model numbered the tokens itself."""

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD = super().forward(token_ids_T, positions_T, attend)
        return hidden_TD + 0.01 * torch.arange(len(token_ids_T)).unsqueeze(1)


class WritesEveryLayerToTheFirst(PlainModel):
    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__(hf_config, runtime)
        for layer in self.layers:
            layer.index = 0


class OverwritesTokenIds(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD = super().forward(token_ids_T, positions_T, attend)
        token_ids_T.zero_()
        return hidden_TD


class ReturnsTheLastRows(PlainModel):
    """As many as are wanted."""

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD, rows_N = super().forward(token_ids_T, positions_T, attend), wanted_rows(attend)
        return hidden_TD if rows_N is None else hidden_TD[-len(rows_N) :]


class SortsTheWantedRows(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD, rows_N = super().forward(token_ids_T, positions_T, attend), wanted_rows(attend)
        return hidden_TD if rows_N is None else hidden_TD[rows_N.sort().values]


class DropsWhatIsWantedTwice(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD, rows_N = super().forward(token_ids_T, positions_T, attend), wanted_rows(attend)
        return hidden_TD if rows_N is None else hidden_TD[sorted(set(rows_N.tolist()))]


class ReturnsOneRowOfLogits(PlainModel):
    def logits(self, hidden_ND: Tensor) -> Tensor:
        return super().logits(hidden_ND[-1:])


class ReturnsLogitsInFloat64(PlainModel):
    def logits(self, hidden_ND: Tensor) -> Tensor:
        return super().logits(hidden_ND).double()


class MixesTheRowsOfAStep(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD = super().forward(token_ids_T, positions_T, attend)
        return hidden_TD - 0.01 * hidden_TD.mean(0)


class KeepsStateBetweenSteps(PlainModel):
    num_steps = 0

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        self.num_steps += 1
        return super().forward(token_ids_T, positions_T, attend) * (1 + 0.01 * self.num_steps)


class AsksTheHost(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        hidden_TD = super().forward(token_ids_T, positions_T, attend)
        return hidden_TD * 2 if int(positions_T.max()) > 10_000 else hidden_TD


class MasksTheLogits(PlainModel):
    """Through a mask whose number of ones only the device knows."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = super().logits(hidden_ND)
        logits_NV[logits_NV > 1e6] = logits_NV[logits_NV > 1e6] * 0.5
        return logits_NV


class DropsFeaturesAtRandom(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return torch.nn.functional.dropout(super().forward(token_ids_T, positions_T, attend), 0.1)


class ReturnsEveryOtherFeature(PlainModel):
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return super().forward(token_ids_T, positions_T, attend)[:, ::2]


class IgnoresRopeScaling(PlainModel):
    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        return super().spec({key: value for key, value in hf_config.items() if not key.startswith("rope_")})


class IgnoresNewRopeScaling(PlainModel):
    """Reads rope_scaling, and not what transformers 5 writes in its place."""

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        return super().spec({key: value for key, value in hf_config.items() if key != "rope_parameters"})


class IgnoresOldRopeScaling(PlainModel):
    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        return super().spec({key: value for key, value in hf_config.items() if key != "rope_scaling"})


class TiesAnyHead(PlainModel):
    """Computes logits with the embedding, whatever tie_word_embeddings says."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__({key: value for key, value in hf_config.items() if key != TIES}, runtime)
        spec = self.spec(hf_config)
        self.head = ParallelHead(spec.vocab_size, spec.hidden_size, runtime, tied_to=self.embed)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        return super().spec({key: value for key, value in hf_config.items() if key != TIES})


class RaisesKeyError(PlainModel):
    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        hf_config["num_hidden_layers"]
        return super().spec(hf_config)


class TakesAnyModelType(PlainModel):
    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        return super().spec({**hf_config, "model_type": "plain"})


class ClaimsALargerVocabulary(PlainModel):
    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        self.spec = PlainModel.spec  # type: ignore[method-assign]
        super().__init__(hf_config, runtime)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        spec = super().spec(hf_config)
        return replace(spec, vocab_size=spec.vocab_size + 1)


class HasAShortRopeTable(PlainModel):
    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__(hf_config, runtime)
        for layer in self.layers:
            layer.rope = Rope(layer.rope.table_PE[:32])


class ForgetsToAddUpTheRanks(PlainModel):
    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__(hf_config, runtime)
        for layer in self.layers:
            layer.mlp.down.ranks = layer.mlp.down.weight.ranks = LocalRanks()


class SharesNothingOut(PlainModel):
    """Every rank takes the first rank's part."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        super().__init__(hf_config, replace(runtime, ranks=_first_of(runtime.ranks)))


def _first_of(ranks: LocalRanks) -> LocalRanks:
    return replace(ranks, rank=0)


FAULTS = {
    KeepsItsLatestTokens: "test_another_number_of_tokens_leaves_nothing_behind: "
    "a step of 1 tokens keeps what it made for a new size: 1 tensors, (1,) of torch.int64",
    AsksTheHost: "test_forward_and_logits_never_wait_for_the_host: "
    "forward waits for the device: Tensor.__int__ in faulty_models.py:",
    MasksTheLogits: "test_forward_and_logits_never_wait_for_the_host: "
    "logits waits for the device: torch's index in faulty_models.py:",
    DropsFeaturesAtRandom: "test_the_same_step_gives_the_same_logits: the same step computed again gives other logits",
    ReturnsEveryOtherFeature: "test_forward_and_logits_have_the_shapes_that_spec_says: "
    "what forward returns has shape (1, 8) and must have (1, 16)",
    ReturnsTheLastRows: "test_rows_that_are_wanted_are_those_of_all: "
    "hidden states of tokens [0, 4, 10], wanted alone, compared with the same of all",
    SortsTheWantedRows: "test_rows_that_are_wanted_are_those_of_all: "
    "hidden states of tokens [10, 0, 0, 4, 3], wanted alone, compared with the same of all",
    DropsWhatIsWantedTwice: "test_rows_that_are_wanted_are_those_of_all: "
    "what forward returns has shape (4, 16) and must have (5, 16)",
    ForgetsAWeight: "test_every_parameter_is_loaded: still unset: model.layers[1].mlp_norm_D",
    LoadsTwoTensorsToOnePlace: "test_every_parameter_is_loaded: still unset: model.layers[0].qkv.weight",
    ForgetsScales: "test_every_weight_changes_the_logits: the weight norm.scale changes no logits",
    NeverUsesAWeight: "test_every_weight_changes_the_logits: the weight extra.weight changes no logits",
    IgnoresPositions: "test_positions_matter: positions are ignored",
    CountsPositionsFromTheChunk: "test_a_prompt_in_chunks_gives_what_it_gives_at_once: "
    "logits of a prompt computed in chunks of",
    WritesEveryLayerToTheFirst: "test_a_prompt_in_a_batch_gives_what_it_gives_alone: "
    "forward called attend for layers [0, 0] and must for [0, 1]",
    OverwritesTokenIds: "test_a_prompt_in_a_batch_gives_what_it_gives_alone: "
    "token_ids_T, which forward was given, was changed",
    ReturnsOneRowOfLogits: "test_forward_and_logits_have_the_shapes_that_spec_says: "
    "what logits returns has shape (1, 31) and must have (7, 31)",
    ReturnsLogitsInFloat64: "test_a_prompt_in_a_batch_gives_what_it_gives_alone: "
    "what logits returns has dtype torch.float64",
    MixesTheRowsOfAStep: "test_a_prompt_in_a_batch_gives_what_it_gives_alone: "
    "logits of prompts in one batch, compared with each alone",
    KeepsStateBetweenSteps: "test_a_prompt_in_chunks_gives_what_it_gives_at_once: "
    "logits of a prompt computed in chunks of [11]",
    IgnoresRopeScaling: "test_spec_refuses_what_the_model_does_not_implement: spec accepts {'rope_scaling'",
    IgnoresNewRopeScaling: "test_spec_refuses_what_the_model_does_not_implement: "
    "spec accepts {'rope_scaling': None, 'rope_parameters'",
    IgnoresOldRopeScaling: "test_spec_refuses_what_the_model_does_not_implement: spec accepts {'rope_scaling'",
    TiesAnyHead: "test_a_head_of_its_own_is_loaded: tie_word_embeddings changes nothing that is loaded",
    RaisesKeyError: "test_spec_refuses_what_the_model_does_not_implement: "
    "spec raises KeyError, not ConfigError, for {'num_hidden_layers': None}",
    TakesAnyModelType: "test_spec_refuses_what_the_model_does_not_implement: "
    "spec accepts {'model_type': 'no_such_model'} and must raise ConfigError",
    ClaimsALargerVocabulary: "test_forward_and_logits_have_the_shapes_that_spec_says: "
    "what logits returns has shape (1, 31) and must have (1, 32)",
    HasAShortRopeTable: "test_a_prompt_in_a_batch_gives_what_it_gives_alone: "
    "rope.table_PE has 32 rows for max_position=64",
    ForgetsToAddUpTheRanks: "test_several_ranks_give_what_one_does: logits of 2 ranks, joined",
    SharesNothingOut: "test_several_ranks_give_what_one_does: 2 ranks together hold",
}
