"""Engines on a card that is not there: they start, serve requests of all kinds, and launches wait for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookline.plugins import models
from tests.asked_script import AskedScript, compiling_environment

SCRIPT = Path(__file__).parent / "pretended_steps.py"
TOKENIZER = Path(models.__path__[0]) / "qwen3_tiny"


TWO_LAYERS = ("model.random_shape.num_hidden_layers=2", f"model.tokenizer={TOKENIZER}", "model.weights=random")


def sizes(seqs, length, tokens, *overrides):
    """The overrides of one configuration."""
    limits = [
        f"engine.max_num_seqs={seqs}",
        f"engine.max_model_len={length}",
        f"engine.max_num_batched_tokens={tokens}",
    ]
    return [*limits, *overrides]


PERIODS = {"gemma3_4b": "sliding_window_pattern", "qwen3_next_80b_a3b": "full_attention_interval"}
"""Keys that say how many layers there are until the kinds of layers come again."""


def shape(name, *overrides, tokens=512):
    """A preset's layers, two of them, of which none has to be loaded."""
    return sizes(8, 256, tokens, f"model={name}", *TWO_LAYERS, *overrides)


def small(seqs, length, tokens, *overrides):
    """Two layers like the bundled model's eight, which are alike."""
    return sizes(seqs, length, tokens, "model=qwen3_0_6b", *TWO_LAYERS, *overrides)


@pytest.fixture(scope="module")
def faults_of():
    """Asks tests/pretended_steps.py for the faults of each configuration."""
    pytest.importorskip("triton")
    script = AskedScript(SCRIPT, compiling_environment())
    yield lambda configurations, waits=False: script.ask(configurations, waits)
    script.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "configurations",
    [
        [sizes(8, 256, 512), small(1, 32, 4096), small(40, 256, 600, "engine.joined_decodes=20")],
        [small(8, 256, 512, "drafter=suffix"), small(3, 64, 512, "drafter=synthetic")],
        *(
            pytest.param(configurations, marks=pytest.mark.nightly)
            for configurations in (
                [sizes(8, 256, 512, "engine.overlap=false"), sizes(11, 128, 32, "scheduler=chunked")],
                [sizes(3, 64, 512), sizes(8, 256, 512, "engine.cuda_graphs=false")],
                [shape("gemma3_4b", "model.random_shape.sliding_window_pattern=2")],
                [shape("gpt_oss_20b"), shape("qwen3_30b_a3b", "engine.batch_invariant=true")],
                [shape("qwen3_next_80b_a3b", "model.random_shape.full_attention_interval=2")],
                [shape(name, f"model.random_shape.{key}=2", tokens=600) for name, key in PERIODS.items()],
            )
        ),
    ],
    ids=[
        "plain, one, joining some",
        "drafts",
        "in turn, small steps",
        "three, eager",
        "windows",
        "experts",
        "states",
        "joining",
    ],
)
def test_all_kinds_of_requests_are_served_without_a_wait(faults_of, configurations):
    assert faults_of(configurations) == [[]] * len(configurations)


@pytest.mark.slow
def test_a_launch_that_waits_is_noticed(faults_of):
    (faults,) = faults_of([small(8, 256, 512)], waits=True)
    assert len(faults) == 1 and "a copy that waits for the card" in faults[0]
