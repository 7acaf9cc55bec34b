"""The model suite over models whose layers keep states: a correct one passes, and a planted fault is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Attend, ModelSpec, RecurrentState, Runtime, StateRows, StateTensor, WeightTarget
from hookline.core.errors import ConfigError
from hookline.core.layers import ParallelHead, VocabParallelEmbedding
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.testing.running import failures


class Sums:
    """The next token by the sum of all tokens so far: one layer, whose state is that sum."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        self.embed = VocabParallelEmbedding(hf_config["vocab_size"], hf_config["hidden_size"], runtime)
        self.head = ParallelHead(hf_config["vocab_size"], hf_config["hidden_size"], runtime)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        if hf_config.get("tie_word_embeddings"):
            raise ConfigError("its head is its own")
        hidden, vocab = hf_config["hidden_size"], hf_config["vocab_size"]
        keeps = RecurrentState((("sum", StateTensor((hidden,), "float32")),))
        return ModelSpec(1, 2, 2, hidden, hidden, vocab, max_position=64, layers=(keeps,))

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        return {**self.embed.targets("embed"), **self.head.targets("head")}

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x_TD, states = self.embed(token_ids_T), attend.states(0)
        request_T = self.requests(states, len(x_TD))
        sum_RD = states.tensors["sum"]
        is_seen_TT = (request_T.unsqueeze(1) == request_T).tril()
        past_TD = sum_RD[states.rows_B][request_T] + is_seen_TT.float() @ x_TD.float()
        is_of_BT = torch.arange(len(states.rows_B)).unsqueeze(1) == request_T
        sum_RD.index_add_(0, states.rows_B, is_of_BT.float() @ x_TD.float())
        return past_TD.to(x_TD.dtype)

    def requests(self, states: StateRows, num_tokens: int) -> Tensor:
        return torch.searchsorted(states.query_starts_B1[1:].long(), torch.arange(num_tokens), right=True)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND)


class AsksTheHostForLengths(Sums):
    def requests(self, states: StateRows, num_tokens: int) -> Tensor:
        assert states.query_starts_host is not None, "no lengths"
        lengths = (states.query_starts_host[1:] - states.query_starts_host[:-1]).tolist()
        return torch.tensor([request for request, length in enumerate(lengths) for _ in range(length)])


class SumsSuite(ModelSuite):
    uses_positions = False
    captures_prompts = True

    def hf_config(self) -> dict[str, Any]:
        return {"vocab_size": 23, "hidden_size": 8}

    def refused_configs(self) -> list[dict[str, Any]]:
        return []


class PlainSumsSuite(SumsSuite):
    model_class = Sums


class LengthsSuite(SumsSuite):
    model_class = AsksTheHostForLengths


def test_a_model_that_computes_its_states_on_the_device_passes() -> None:
    assert failures(PlainSumsSuite) == []


def test_a_model_that_says_it_can_be_captured_and_asks_the_host_for_lengths_fails_in_one_place() -> None:
    [failure] = failures(LengthsSuite)
    assert "test_states_need_no_lengths_on_the_host" in failure
    assert "no lengths" in failure
