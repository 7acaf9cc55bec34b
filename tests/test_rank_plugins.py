"""All ranks of an engine see the same plugins, or there is no engine."""

import os
from pathlib import Path

import pytest

from hookline import LLM, SamplingParams
from hookline.core.errors import RankError

pytestmark = pytest.mark.slow
PLUGIN = """
import os
from hookline.core.contracts import hookimpl
API_VERSION = 2
@hookimpl
def register_schedulers(register):
    register("everywhere", "hookline.plugins.schedulers.prefill_first:PrefillFirst")
    if os.environ["ONLY_SEEN_BY"] in ("all", str(os.getpid())):
        register("somewhere", "hookline.plugins.schedulers.prefill_first:PrefillFirst")
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    (tmp_path / "moody_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOOKLINE_PLUGINS", "moody_plugin")
    yield
    sys.modules.pop("moody_plugin", None)


def test_a_rank_that_sees_other_plugins_stops_the_start_with_the_difference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONLY_SEEN_BY", str(os.getpid()))
    difference = r"missing: scheduler 'somewhere' of plugin 'moody_plugin' \(HOOKLINE_PLUGINS -\)"
    with pytest.raises(RankError, match=rf"rank 1 of 2 .* rank 1 sees other plugins than .*: {difference}"):
        LLM(device="cpu", tp=2, engine=dict(num_blocks=20))


def test_ranks_that_see_the_same_plugins_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONLY_SEEN_BY", "all")
    with LLM(device="cpu", tp=2, engine=dict(num_blocks=20)) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
