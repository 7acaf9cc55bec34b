"""The conformance suite and its driver take models whose layers keep unlike things, and notice their wrong calls."""

import pytest
import torch

from hookline.core.contracts import NoCache
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.testing.model_suite.driver import Chunk, ModelDriver
from tests.layered_model import LAYERED_CONFIG, LayeredModel, SharedAttention
from tests.test_layered import KINDS

ALL_KINDS = {**LAYERED_CONFIG, "layer_kinds": KINDS["all kinds"]}
PROMPT = list(range(1, 24))


class TestLayered(ModelSuite):
    model_class = LayeredModel
    dtypes = (torch.float32,)

    def hf_config(self):
        return dict(ALL_KINDS)

    def refused_configs(self):
        return super().refused_configs()[:2]


class AttendsEverywhere(LayeredModel):
    def forward(self, token_ids_T, positions_T, attend):
        for index, layer in enumerate(self.spec_layers):
            if isinstance(layer, NoCache):
                attend(index, torch.zeros(len(token_ids_T), 64), None)
        return super().forward(token_ids_T, positions_T, attend)

    @property
    def spec_layers(self):
        return self.spec(ALL_KINDS).layers


class ForgetsALayer(LayeredModel):
    def __init__(self, hf_config, runtime):
        super().__init__(hf_config, runtime)
        self.layers[self.forgotten].mixer = None


class ForgetsAWindow(ForgetsALayer):
    forgotten = 2


class ForgetsAState(ForgetsALayer):
    forgotten = 1


class WithKeys(SharedAttention):
    def __call__(self, x_TD, attend):
        q_TC = self.q(x_TD)
        return attend(self.index, torch.cat((q_TC, q_TC), -1), self.rope)


class GivesKeysToAShared(LayeredModel):
    def __init__(self, hf_config, runtime):
        super().__init__(hf_config, runtime)
        self.layers[4].mixer.__class__ = WithKeys


FAULTS = [
    (AttendsEverywhere, r"forward wants attention of layer 3, which has none by ModelSpec\.layers"),
    (ForgetsAWindow, r"attend for layers \[0, 4, 5\] and must for \[0, 2, 4, 5\]"),
    (ForgetsAState, r"asked for the states of layers \[\] and must for \[1\]"),
    (GivesKeysToAShared, r"qkv_TC, which attend was given,.*\(23, 32\)"),
]


@pytest.mark.parametrize(("model_class", "said"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_model_that_asks_for_what_its_spec_does_not_say_is_caught(model_class, said):
    driver = ModelDriver(model_class, ALL_KINDS)
    with pytest.raises(AssertionError, match=said):
        driver.logits(Chunk(0, 0, PROMPT))


def test_a_chunk_can_be_repeated_although_its_layers_keep_states():
    driver = ModelDriver(LayeredModel, ALL_KINDS)
    driver.logits(Chunk(0, 0, PROMPT[:9]))
    first_TV, again_TV = (driver.logits(Chunk(0, 9, PROMPT[9:])) for _ in range(2))
    assert torch.equal(first_TV, again_TV)
    whole_TV = ModelDriver(LayeredModel, ALL_KINDS).logits(Chunk(0, 0, PROMPT))
    assert torch.allclose(first_TV, whole_TV[9:], rtol=0, atol=1e-4)
