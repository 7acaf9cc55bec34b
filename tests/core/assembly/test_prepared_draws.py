"""Which kinds of draws are made ready at a start."""

from types import SimpleNamespace

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.assembly.rank_parts import prepared_draws
from hookline.core.config.settings import EngineConfig
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.worker.runner.model_runner import Extras


@pytest.fixture(scope="module")
def installed():
    return InstalledExtensions.of(PluginHost.load().registry)


def bits(installed, *names):
    return sum(1 << index for index, stage in enumerate(installed.stages) if stage.entry.name in names)


def prepared(installed, defaults=None, device="cuda", vocab_size=10, **engine):
    return prepared_draws(
        SimpleNamespace(
            device=torch.device(device),
            config=SimpleNamespace(engine=EngineConfig(**engine)),
            checkpoint=SimpleNamespace(sampling_defaults=defaults or {}),
            spec=SimpleNamespace(vocab_size=vocab_size),
        ),
        installed,
    )


def test_truncation_is_ready_unless_the_configuration_says_otherwise(installed):
    assert prepared(installed) == [Extras(bits(installed, "truncation"))]
    assert prepared(installed, prepared_sampling=[]) == []
    assert prepared(installed, device="cpu") == []


def test_what_the_checkpoint_recommends_is_ready(installed):
    qwen3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert prepared(installed, qwen3, prepared_sampling=[]) == [Extras(bits(installed, "truncation"))]
    qwen2 = qwen3 | {"repetition_penalty": 1.05}
    both = Extras(bits(installed, "truncation", "penalties"))
    assert prepared(installed, qwen2, prepared_sampling=[]) == [both]
    assert prepared(installed, {"temperature": 0.0}, prepared_sampling=[]) == []


def test_each_kind_is_ready_once_with_the_scores_that_are_asked_for(installed):
    asked = [{"logprobs": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 20, "top_k": 5}, {"temperature": 0.5}]
    truncated = bits(installed, "truncation")
    expected = [Extras(0, 5), Extras(truncated), Extras(truncated, 10)]
    assert prepared(installed, prepared_sampling=asked) == expected


def test_it_is_what_steps_say_of_such_requests(installed, monkeypatch):
    asked = [{"top_k": 5}, {"logprobs": 3}, {"repetition_penalty": 1.1, "top_p": 0.5, "logprobs": 0}]
    with LLM(device="cpu") as llm:
        worker, found = llm.engine.executor, []
        compute = worker._compute_eagerly
        monkeypatch.setattr(
            worker, "_compute_eagerly", lambda step, extras, *rest: found.append(extras) or compute(step, extras, *rest)
        )
        for one in asked:
            llm.generate([[1, 2]], SamplingParams(max_tokens=1, temperature=1, **one))
        assert prepared(llm.engine.limits.extensions, vocab_size=4096, prepared_sampling=asked) == found


def test_what_no_processor_takes_is_left_out_with_a_line_in_the_log(caplog):
    with caplog.at_level("INFO", "hookline"):
        assert prepared(InstalledExtensions(), prepared_sampling=[{"top_p": 0.5}, {"logprobs": 1}]) == [Extras(0, 1)]
    assert "draws with {'top_p': 0.5} are not made ready: sampling.top_p=0.5: no step extension" in caplog.text
