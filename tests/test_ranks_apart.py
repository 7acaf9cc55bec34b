"""Rank 0 in a process of its own gives what it gives here, and a loss of it is told like that of any rank."""

import os
import signal
from pathlib import Path

import pytest

from hookline import LLM, SamplingParams
from hookline.core.errors import ConfigError, PluginError, RankError
from hookline.core.executor.remote import RemoteExecutor
from hookline.core.frontend.profiling import Profile, profiled
from tests.faulty_rank import VARIABLE
from tests.test_parity import mixed_load

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
ENGINE = dict(block_size=8, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
MASKED = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[a-c]{4,8}"})


def engine_of(tp, rank_0):
    """Of the bundled checkpoint, which has a tokenizer."""
    return LLM(device="cpu", tp=tp, engine={**ENGINE, "rank_0": rank_0, "overlap": True})


def answers(llm):
    """What each way of asking brings."""
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    mixed = llm.generate(*mixed_load())
    assert sum(output.num_preemptions for output in mixed) > 0
    scored = llm.generate(prompts, SCORED)
    penalised = SamplingParams(temperature=0.7, seed=3, max_tokens=9, repetition_penalty=1.4, min_tokens=4)
    vectors = [output.vector for output in llm.embed(prompts)]
    return {
        "mixed": [output.token_ids for output in mixed],
        "scored": [(output.token_ids, [one.logprob for one in output.logprobs or ()]) for output in scored],
        "penalised": [output.token_ids for output in llm.generate(prompts, penalised)],
        "masked": [output.token_ids for output in llm.generate(["a", "b"], MASKED)],
        "pooled": [vector.tolist() for vector in vectors],
    }


@pytest.fixture(scope="module")
def expected():
    """With one rank, in this process."""
    with engine_of(1, "here") as llm:
        return answers(llm)


def test_one_rank_apart_gives_the_bits_of_one_rank_here(expected, tmp_path):
    with engine_of(1, "apart") as llm:
        assert isinstance(llm.engine.executor, RemoteExecutor) and not llm.engine.executor.is_here
        llm.engine.time_steps()
        assert answers(llm) == expected
        assert llm.engine.last_stats.device_s > 0
        assert llm.start_phases_s["weights"] >= 0, "the parts of rank 0's start are told, too"
        with pytest.raises(ConfigError, match="shows what this process does, and rank 0 computes in another one"):
            with profiled(llm, Profile(tmp_path / "trace.json")):
                raise AssertionError
        (child,) = llm.engine.executor.links.children
    assert child.process.poll() == 0


def test_two_ranks_apart_give_the_tokens_of_one_and_a_killed_rank_0_is_named(expected):
    with engine_of(2, "apart") as llm:
        assert [output.token_ids for output in llm.generate(*mixed_load())] == expected["mixed"]
        os.kill(llm.engine.executor.links.children[0].process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 0 of 2 \(pid \d+\) was killed by SIGKILL"):
            llm.generate([[1, 2, 3]], GREEDY)


def test_a_plugin_that_fails_in_a_step_of_one_rank_apart_ends_that_step_s_requests_alone(folder, monkeypatch):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_rank")
    monkeypatch.setenv(VARIABLE, "0:T9:raise")
    monkeypatch.chdir(ROOT)
    with LLM(folder, model="faulty", device="cpu", engine={"num_blocks": 50, "rank_0": "apart"}) as llm:
        with pytest.raises(PluginError, match=r"'faulty' of .* ValueError: a bug in this rank .*, the engine goes on"):
            llm.generate([[1] * 9], GREEDY)
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 12


def test_another_place_for_rank_0_is_refused(folder):
    with pytest.raises(ConfigError, match=r"engine\.rank_0='away' is not one of here, apart"):
        LLM(folder, engine={"rank_0": "away"})
    with pytest.raises(PluginError, match=r"no executor named 'rye'\. .*Available: local"):
        LLM(folder, engine={"executor": "rye"})
