"""A model that brings its own checkpoint: found, checked, loaded, and its tokenizer used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.core.checkpoint.checkpoint import resolve_model
from hookline.core.checkpoint.load import load_source
from hookline.core.contracts import ModelConfig, WeightTarget
from hookline.core.errors import CheckpointError, RequestError
from hookline.core.tokenizer.codec import Codec

CONFIG = {"model_type": "plain", "hidden_size": 4, "eos_token_id": [7, 9]}


class Source:
    """Tensors in memory; notes what is read."""

    def __init__(self, tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.tensors, self.reads = tensors, []
        self._shapes = shapes or {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name]

    def tokenizer(self) -> Any:
        return Words()


class Words:
    """A tokenizer whose tokens are lengths of words."""

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join("x" * id_ for id_ in ids)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return " ".join(f"<{one['role']}> {one['content']}" for one in messages)


class Model:
    source = Source({"w": torch.ones(2, 3)})

    @classmethod
    def open_checkpoint(cls, config: ModelConfig) -> Source | None:
        return cls.source if config.checkpoint.endswith(".special") else None


def test_a_model_may_bring_the_checkpoint_and_overrides_lie_over_its_config() -> None:
    found = resolve_model(ModelConfig(checkpoint="x.special", hf_overrides={"hidden_size": 8}), Model)
    assert found.source is Model.source and found.folder is None and not found.is_packaged
    assert found.config["hidden_size"] == 8 and found.eos_token_ids == (7, 9)


def test_what_the_model_leaves_to_core_is_resolved_as_ever() -> None:
    with pytest.raises(CheckpointError, match=r"model\.checkpoint 'nowhere/at/all' does not exist"):
        resolve_model(ModelConfig(checkpoint="nowhere/at/all"), Model)


def test_random_weights_take_the_sources_config_and_read_no_tensor() -> None:
    found = resolve_model(ModelConfig(checkpoint="x.special", weights="random"), Model)
    assert found.config == CONFIG and Model.source.reads == []


def test_an_end_token_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_id of x\.special is 'two'; it must be a token id"):
        resolve_model(ModelConfig(checkpoint="x.special", hf_overrides={"eos_token_id": "two"}), Model)


def test_tensors_are_cut_converted_and_read_once_each() -> None:
    source = Source({"w": torch.arange(6.0).view(2, 3), "unused": torch.ones(9)})
    half, ignored = torch.empty(2, 2, dtype=torch.bfloat16), WeightTarget.ignored()
    target = WeightTarget(half, (2, 3), dim=1, start=1, stop=3)
    assert load_source("x", source, {"w": target, "unused": ignored}) == 8
    assert half.tolist() == [[1.0, 2.0], [4.0, 5.0]] and source.reads == ["w"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "1 missing tensor: w"),
        ({"w": torch.ones(2, 3), "extra": torch.ones(1)}, "1 surplus tensor: extra"),
        ({"w": torch.ones(3, 2)}, r"1 misshaped tensor: w has \[3, 2\] and needs \[2, 3\]"),
    ],
)
def test_what_does_not_match_the_model_is_refused_before_anything_is_read(tensors: Any, message: str) -> None:
    source = Source(tensors)
    with pytest.raises(CheckpointError, match=f"checkpoint x does not match the model: {message}"):
        load_source("x", source, {"w": WeightTarget.whole(torch.empty(2, 3))})
    assert source.reads == []


def test_a_source_that_gives_another_shape_than_it_said_is_refused() -> None:
    source = Source({"w": torch.ones(3)}, shapes={"w": (2, 3)})
    with pytest.raises(CheckpointError, match=r"checkpoint x gives w with shape \[3\] and said \[2, 3\]"):
        load_source("x", source, {"w": WeightTarget.whole(torch.empty(2, 3))})


def test_a_source_may_give_integers_for_integers_and_no_fractions() -> None:
    target = WeightTarget.whole(torch.zeros(2, 3, dtype=torch.int8))
    load_source("x", Source({"w": torch.full((2, 3), -7, dtype=torch.int8)}), {"w": target})
    assert target.view is not None and target.view.tolist() == [[-7] * 3] * 2
    with pytest.raises(CheckpointError, match=r"tensor w cannot be loaded: torch\.float32 is stored"):
        load_source("x", Source({"w": torch.full((2, 3), 0.4)}), {"w": target})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_a_source_that_are_no_numbers_are_refused_by_name(value: float) -> None:
    source = Source({"w": torch.full((2, 3), value)})
    with pytest.raises(CheckpointError, match="1 broken tensor: w: NaN or infinity"):
        load_source("x", source, {"w": WeightTarget.whole(torch.empty(2, 3))})


def test_the_sources_tokenizer_is_used() -> None:
    codec = Codec(None, source=Model.source)
    assert codec.encode("one three") == [3, 5] and codec.decode([2, 1]) == "xx x"


def test_a_text_is_a_users_message_if_the_option_says_so() -> None:
    assert Codec(None, source=Model.source, chat=True).encode("one three") == [6, 3, 5]
    assert Codec(None, source=Model.source, chat=True).encode([4, 4]) == [4, 4]


def test_chat_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="a chat prompt needs a tokenizer"):
        Codec(None, chat=True).encode("hello")
