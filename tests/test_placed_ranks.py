"""Ranks that a stranger's executor starts, registered by its hook: the tokens of ranks here; one lost is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hookline import LLM, SamplingParams
from hookline.core.errors import ConfigError, PluginError, RankError
from hookline.core.new.command import write_skeleton
from hookline.core.plugin.sources import DEVELOPMENT_VARIABLE

pytestmark = pytest.mark.slow
ENGINE = dict(block_size=8, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(autouse=True, scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory):
    """What `hookline new executor` writes, found by this process and by those of its ranks."""
    folder = write_skeleton("executor", "apart", tmp_path_factory.mktemp("new") / "hookline-apart")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(Path.cwd()))]))
        patch.setenv(DEVELOPMENT_VARIABLE, "hookline_apart")
        yield


def test_two_placed_ranks_give_the_tokens_of_ranks_here_and_a_killed_one_is_named() -> None:
    with LLM(device="cpu", tp=2, engine=ENGINE) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    option = {"name": "apart", "nice": 1}
    with LLM(device="cpu", tp=2, engine={**ENGINE, "executor": option, "overlap": True}) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        pid = llm.engine.executor.links.children[1].place.pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank 1 of 2 \(pid {pid} on node 127\.0\.0\.1\) ended with exit code -9"):
            for _ in range(50):
                llm.generate(PROMPTS, GREEDY)


def test_what_it_refuses_and_what_is_no_option_of_it_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"device=cuda: engine\.executor=apart has CPUs alone; use device=cpu"):
        LLM(device="cuda", engine={"executor": "apart"})
    with pytest.raises(ConfigError, match=r"unknown key 'engine\.executor\.apart\.nicer'\. Did you mean"):
        LLM(device="cpu", engine={"executor": {"name": "apart", "nicer": 1}})
    with pytest.raises(PluginError, match=r"no executor named 'a_part'\. Did you mean 'apart'\? Available: "):
        LLM(device="cpu", engine={"executor": "a_part"})
