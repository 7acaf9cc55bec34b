"""What people type first in Python: conversations, a close that is awaited, and what a notebook shows of a value."""

from __future__ import annotations

import asyncio
import sys
import warnings
from types import SimpleNamespace

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.errors import RequestError
from hookline.core.frontend.generation import Progress
from hookline.core.outputs import FinishReason, RequestOutput

HELLO = [{"role": "user", "content": "Hello"}]
SMALL = {"device": "cpu", "engine": {"num_blocks": 64}}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    (one,) = llm.chat(HELLO, params)
    assert one.token_ids == llm.generate(HELLO, params)[0].token_ids and one.error is None
    assert [len(output.token_ids) for output in llm.chat([HELLO, HELLO], params)] == [3, 3]


@pytest.mark.parametrize("given", ["Hello", [1, 2], ["Hello"], [HELLO, "Hello"]])
def test_what_is_no_conversation_is_refused_with_what_to_write(llm: LLM, given: object) -> None:
    with pytest.raises(RequestError, match=r"are no conversation; write \[\{.role.: .user., .content.: .Hello.\}\]"):
        llm.chat(given)  # type: ignore[arg-type]


def test_closing_may_be_awaited_and_need_not_be() -> None:
    async def talk() -> None:
        llm = AsyncLLM(**SMALL)
        assert repr(llm) == "AsyncLLM('hookline.plugins.models/qwen3_tiny', device='cpu')"
        await llm.close()
        await llm.close()
        assert llm.close() is not None

    asyncio.run(talk())


def test_values_print_as_one_short_line(llm: LLM) -> None:
    assert repr(llm) == "LLM('hookline.plugins.models/qwen3_tiny', device='cpu')"
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0, stop=("x",))) == "SamplingParams(temperature=0.0, stop=('x',))"
    output = RequestOutput(3, "x", [1] * 5000, [2] * 4000, FinishReason.LENGTH, "hello")
    assert repr(output) == "<RequestOutput 3: 5000 prompt tokens, 4000 tokens, length, text='hello'>"


def test_progress_is_what_tqdm_chooses_for_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Bar:
        def __init__(self, **options: object) -> None:
            made.append(options)

        def close(self) -> None:
            pass

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    Progress(3).close()
    assert made[0]["total"] == 3


def test_a_notebook_without_widgets_gets_the_bar_of_a_terminal_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ZMQInteractiveShell:
        pass

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", SimpleNamespace())
    monkeypatch.setattr("tqdm.notebook.IProgress", None)
    for module in ("tqdm.auto", "tqdm.autonotebook"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Progress(3).close()
    assert "0/3" in capsys.readouterr().err and not told
