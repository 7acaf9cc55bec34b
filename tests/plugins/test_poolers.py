"""The poolers that ship with Hookline against the conformance suite, each with what it means to compute."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hookline.core.contracts import PoolerSpec
from hookline.core.errors import ConfigError
from hookline.core.testing.plain_pooler import FakePoolerModel, fake_spec
from hookline.core.testing.pooler_suite import PoolerSuite
from hookline.plugins.poolers import YesNoConfig
from hookline.plugins.poolers.heads import ClassLogits, YesNo
from hookline.plugins.poolers.tokens import FirstToken, LastToken, Mean


class TestLastToken(PoolerSuite):
    def make(self, spec: PoolerSpec) -> LastToken:
        return LastToken(None, spec)

    def expected(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD[-1]


class TestFirstToken(PoolerSuite):
    def make(self, spec: PoolerSpec) -> FirstToken:
        return FirstToken(None, spec)

    def expected(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD[0]


class TestMean(PoolerSuite):
    def make(self, spec: PoolerSpec) -> Mean:
        return Mean(None, spec)

    def expected(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD.mean(0)


class TestClassLogits(PoolerSuite):
    hf_config: ClassVar[dict[str, Any]] = {"id2label": {"0": "a", "1": "b", "2": "c"}}

    def make(self, spec: PoolerSpec) -> ClassLogits:
        return ClassLogits(None, spec)

    def expected(self, hidden_TD: Tensor) -> Tensor:
        return FakePoolerModel(50).weight("score.weight", (3, self.hidden_size)).double() @ hidden_TD[-1]


class TestYesNo(PoolerSuite):
    def make(self, spec: PoolerSpec) -> YesNo:
        return YesNo(YesNoConfig(), spec)

    def expected(self, hidden_TD: Tensor) -> Tensor:
        logits_V = FakePoolerModel(50).logits(hidden_TD[-1:].float())[0].double()
        return logits_V[[2, 3]].softmax(0)[1:]  # the fake's tokens are the lengths of "no" and "yes"


@pytest.mark.parametrize("value", [0, -1, True, "3", 2**40])
def test_an_impossible_number_of_classes_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="is no number of classes"):
        ClassLogits(None, fake_spec(8, {"num_labels": value}))


def test_a_yes_of_several_tokens_is_refused_with_its_key() -> None:
    spec = fake_spec(8, {})
    spec.model.token_ids = lambda text: [1] * len(text)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"pooler.no='no' is 2 tokens of this tokenizer; it must be one"):
        YesNo(YesNoConfig(), spec)


def test_a_mean_is_summed_in_float32() -> None:
    hidden_TD = torch.full((300, 4), 1.0, dtype=torch.bfloat16)  # bfloat16 holds no odd number above 256
    suite = TestMean()
    suite.hidden_size = 4  # type: ignore[misc]
    assert suite._pooled(suite._made(), [hidden_TD], 1).tolist() == [[1.0] * 4]
