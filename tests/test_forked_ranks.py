"""A fork that is a rank is a process of its own: it has the environment of the moment, and its end is noticed."""

from __future__ import annotations

import os
import signal

import pytest

from hookline import LLM, SamplingParams
from hookline.core.errors import RankError

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_fork_that_is_killed_is_named_by_its_engine_and_the_next_one_starts() -> None:
    one = SamplingParams(max_tokens=1)
    with LLM(tp=2, device="cpu") as llm:
        child = llm.engine.executor.links.children[0]  # type: ignore[attr-defined]
        assert llm.generate("a", one) and child.process.poll() is None and child.process.pid != os.getpid()
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"\(pid {child.process.pid}\) was killed by SIGKILL"):
            llm.generate("a", one)
    with LLM(tp=2, device="cpu") as llm:
        assert llm.generate("a", one)
        child = llm.engine.executor.links.children[0]  # type: ignore[attr-defined]
    assert child.process.poll() == 0


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_fork_has_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.odd_drafters")
    with LLM(tp=2, device="cpu", drafter="random") as llm:  # a rank without the same plugins is refused
        assert llm.generate("a", SamplingParams(max_tokens=1))
