"""Every causal model type of transformers in its default sizes, without data: served, or refused with the reason."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from hookline.core.contracts import FullAttention, SlidingWindow
from hookline.core.errors import ConfigError
from tests.lazily import Lazily
from tests.transformers_types import DRAFTERS, REFUSED, causal_config, model_types

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(Version(version("transformers")) < Version("5.24"), reason="the types of transformers 5.24"),
]
TransformersModel = Lazily("hookline.plugins.models.transformers.model", "TransformersModel")
FEW = ("bart", "bert", "gemma4", "llama4", "minimax", "mllama")
"""Types that every run tries; nightly ones try all."""
NUM_SERVED = 153
"""What docs/transformers.md says."""


def test_served_and_refused_types_are_all_that_transformers_has():
    known = set(model_types())
    assert known >= {*REFUSED, *DRAFTERS}
    assert len(known) - len(REFUSED) - len(DRAFTERS) >= NUM_SERVED


@pytest.mark.parametrize("model_type", FEW)
def test_a_type_is_served(model_type):
    assert TransformersModel.spec(causal_config(model_type)).num_layers >= 1


@pytest.mark.nightly
def test_every_type_that_is_not_listed_is_served():
    told = {}
    for model_type in sorted({*model_types()} - {*REFUSED, *DRAFTERS}):
        try:
            TransformersModel.spec(causal_config(model_type))
        except ConfigError as error:
            told[model_type] = str(error)
    assert not told


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_a_listed_type_is_refused_with_its_reason(model_type):
    with pytest.raises(ConfigError) as error:
        TransformersModel.spec(causal_config(model_type))
    assert REFUSED[model_type] in str(error.value)


def test_chunks_are_windows_as_long_as_they_and_room_behind_the_keys():
    config = causal_config("llama4")
    spec = TransformersModel.spec(config)
    assert spec.max_position == 131_072
    assert list(spec.layers[:4]) == [SlidingWindow(8192)] * 3 + [FullAttention()]
    assert spec.head_dim == 160
    within_one = TransformersModel.spec({**config, "attention_chunk_size": 131_072})
    assert (within_one.layers, within_one.head_dim) == ((), 128)
