import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.cli.command import is_sweep
from hookline.core.cli.stdin import piped_text
from hookline.core.config import settings as config_module
from hookline.core.config.compose import compose
from hookline.core.config.hydra_options import quote_raw_values
from hookline.core.config.settings import validate
from hookline.core.errors import ConfigError, PlanError, PluginError
from hookline.core.frontend.generation import Progress, progress_bar
from hookline.core.info import command as info_command
from hookline.core.outputs import FinishReason, RequestOutput, Timings
from hookline.core.plugin.host import PluginHost
from hookline.core.run.command import main
from hookline.core.run.prompts import DEFAULT_PROMPTS, PromptLine, read_prompts
from hookline.core.run.results import failures, write_json_lines
from hookline.core.run.settings import RunKeys, validate_run
from hookline.core.sampling_params import SamplingParams
from hookline.core.sweep import sweep
from hookline.core.sweep.results import read_results
from tests.core.plugin_fakes import (
    OPTIONS,
    PatientConfig,
    full_plugin,
    host_with,
    offering_presets,
    plugin_module,
    preset_package,
    registering,
)
from tests.fuzzing import examples

CHOSEN = [f"{kind}={name}" for kind, name in OPTIONS.items()]
ORDINARY_PROMPTS = [
    "Hello, world",
    "it's",
    'say "hi"',
    "a=b",
    "What is 1 + 1?",
    "{'a': 1}",
    "[1, 2",
    "${HOME}",
    "${oops",
    "\\${x}",
    "C:\\dir\\",
    "50% of $100",
    "def f(x):\n    return x",
    "# comment",
    "",
    " ",
    "null",
    "???",
    "1e3",
    "~!@#^&*()",
    "été 你好",
]


@pytest.fixture(autouse=True)
def work_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@dataclass
class DryArguments:
    multiplier: float = 0.0
    length: int = 2
    breakers: list[str] = field(default_factory=list)


@pytest.fixture
def host() -> PluginHost:
    broken = plugin_module(register_schedulers=registering("scheduler", "theirs", target="nonsense"))
    processors = plugin_module(register_processors=registering("processor", "dry", config=DryArguments))
    return host_with(full_plugin(), broken, processors)


def output(index: int, text: str = " done", error: str | None = None) -> RequestOutput:
    reason = FinishReason.ERROR if error else FinishReason.LENGTH
    token_ids = [] if error else [5, 6]
    return RequestOutput(index, f"prompt {index}", [1, 2], token_ids, reason, text="" if error else text, error=error)


class FakeLLM:
    """Notes what it is asked; returns `outputs` or raises what it finds there."""

    calls: list[tuple[list[Any], list[SamplingParams]]]
    infos: list[dict[str, Any]]
    outputs: Any
    config: Any

    @classmethod
    def from_config(cls, config: Any, host: Any) -> "FakeLLM":
        fake = cls()
        fake.config = config
        return fake

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def generate(self, prompts: list[Any], params: list[SamplingParams], progress: Any, **infos: Any) -> Any:
        self.calls.append((prompts, params))
        self.infos.append(infos)
        if isinstance(self.outputs, BaseException):
            raise self.outputs
        return self.outputs if self.outputs is not None else [output(index) for index in range(len(prompts))]


@pytest.fixture
def llm(host: PluginHost, monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = type("Fresh", (FakeLLM,), {"calls": [], "infos": [], "outputs": None})
    module = ModuleType("hookline.core.frontend.llm")
    vars(module)["LLM"] = fake
    monkeypatch.setitem(sys.modules, "hookline.core.frontend.llm", module)
    monkeypatch.setattr(PluginHost, "load", classmethod(lambda cls: host))
    monkeypatch.setattr("hookline.core.run.prompts.piped_text", lambda: None)
    monkeypatch.setattr("hookline.core.sweep.sweep.piped_text", lambda: None)
    return fake


def fails(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*CHOSEN, *arguments]) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert out == ""
    assert "Traceback" not in err
    assert last.startswith("hookline: error: ")
    assert err.count("hookline: error: ") == 1
    return last.removeprefix("hookline: error: ")


# --- results


def test_text_goes_to_standard_output_under_a_header(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHOSEN, "prompts=[a,b]"]) == 0
    assert capsys.readouterr().out == (
        "=== 1/2: 2 tokens, length\nprompt 0 done\n\n=== 2/2: 2 tokens, length\nprompt 1 done\n\n"
    )


def test_an_answer_begins_a_line_of_its_own_in_a_chat(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHOSEN, "prompt=a", "model.chat=true"]) == 0
    assert capsys.readouterr().out == "=== 1/1: 2 tokens, length\nprompt 0\n done\n\n"


def test_a_refused_request_is_one_line_and_exit_code_2(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.outputs = [output(0), output(1, error="prompt has 9000 tokens,\nengine.max_model_len is 4096")]
    assert main([*CHOSEN, "prompts=[a,b]"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("=== 1/2") and "2/2" not in out
    assert err.splitlines()[-1] == (
        "hookline: request 2/2 was refused: prompt has 9000 tokens, engine.max_model_len is 4096"
    )


@pytest.mark.slow
def test_several_completions_are_numbered_below_their_prompt(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    several = output(0)
    several.others = [RequestOutput(1, "prompt 0", [1, 2], [7], FinishReason.STOP, text=" other", index=1)]
    llm.outputs = [several]
    assert main([*CHOSEN, "prompt=a", "sampling.n=2"]) == 0
    assert capsys.readouterr().out == (
        "=== 1/1, completion 1: 2 tokens, length\nprompt 0 done\n\n"
        "=== 1/1, completion 2: 1 tokens, stop\nprompt 0 other\n\n"
    )
    assert main([*CHOSEN, "prompt=a", "sampling.n=2", "output=out.jsonl"]) == 0
    [line] = Path("out.jsonl").read_text().splitlines()
    assert json.loads(line)["others"] == [
        {"text": " other", "token_ids": [7], "finish_reason": "stop", "stop_reason": None}
    ]


@pytest.mark.slow
def test_usage_is_said_on_standard_error_when_asked_for(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.outputs = [output(0), output(1)]
    llm.outputs[1].timings = Timings(10.0, 10.5, 11.0, 14.0)
    assert main([*CHOSEN, "prompts=[a,b]", "usage=true"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        "hookline: 4 prompt tokens (0 cached), 4 completion tokens; "
        "means: queued 0.500 s, first token 1.000 s, end 4.000 s"
    )
    assert main([*CHOSEN, "prompts=[a,b]"]) == 0
    assert "prompt tokens" not in capsys.readouterr().err


def test_usage_must_be_a_bool(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(["prompt=a", "usage=3"], capsys) == "usage=3 is not a bool"


def test_output_writes_json_lines_in_order(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.outputs = [output(0), output(1, error="too long")]
    assert main([*CHOSEN, "prompts=[a,b]", "output=out, it's.jsonl"]) == 2
    lines = [json.loads(line) for line in Path("out, it's.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert lines[0] == {
        "index": 0,
        "request_id": 0,
        "prompt": "prompt 0",
        "prompt_token_ids": [1, 2],
        "text": " done",
        "token_ids": [5, 6],
        "finish_reason": "length",
        "stop_reason": None,
        "num_cached_tokens": 0,
        "error": None,
    }
    assert lines[1]["error"] == "too long"
    assert capsys.readouterr().out == ""
    assert os.listdir() == ["out, it's.jsonl"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def no_space(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.core.util.files.os.replace", no_space)
    with pytest.raises(ConfigError, match=r"output=.*out.jsonl cannot be written: No space left on device"):
        write_json_lines([output(0)], path)
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "work"]


def test_a_plain_run_leaves_no_file_behind(llm: type[FakeLLM]) -> None:
    assert main([*CHOSEN, "prompt=x"]) == 0
    assert os.listdir() == []


def test_an_interrupt_exits_with_130_and_no_traceback(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.outputs = KeyboardInterrupt()
    assert main([*CHOSEN, "prompt=x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_ours_is_one_line(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.outputs = PlanError("scheduler 'patient'\nplans nothing")
    assert fails(["prompt=x"], capsys) == "scheduler 'patient' plans nothing"


def test_a_bug_of_ours_keeps_its_traceback(llm: type[FakeLLM]) -> None:
    llm.outputs = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main([*CHOSEN, "prompt=x"])


# --- prompts


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ORDINARY_PROMPTS)
def test_a_prompt_arrives_as_it_was_typed(llm: type[FakeLLM], prompt: str) -> None:
    assert main([*CHOSEN, f"prompt={prompt}"]) == 0
    assert llm.calls[0][0] == [prompt]


@settings(max_examples=examples(100), deadline=None)
@given(st.text(alphabet=st.sampled_from("a'\"\\${},= []:()#\n\té"), max_size=10))
def test_quoting_survives_hydra_and_omegaconf(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    override = OverridesParser.create().parse_override(quote_raw_values([f"prompt={value}"])[0])
    node = OmegaConf.create({"prompt": None})
    OmegaConf.update(node, "prompt", override.value())
    assert OmegaConf.to_container(node, resolve=True) == {"prompt": value}


def test_other_arguments_keep_hydras_grammar(llm: type[FakeLLM]) -> None:
    assert main([*CHOSEN, 'prompts=["a, b", [1, 2]]']) == 0
    assert llm.calls[0][0] == ["a, b", [1, 2]]


def test_without_any_source_the_default_prompts_run(llm: type[FakeLLM]) -> None:
    assert main(CHOSEN) == 0
    assert llm.calls[0][0] == list(DEFAULT_PROMPTS)


def test_an_open_and_silent_standard_input_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hookline.core.cli.stdin.PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream:
        assert piped_text(stream) is None
        assert "open and silent" in caplog.text
        os.write(writing, b"late\n")
        os.close(writing)
        assert piped_text(stream) == "late\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_piped_text_is_utf_8_whatever_the_locale_says(encoding: str) -> None:
    assert piped_text(io.TextIOWrapper(io.BytesIO("caf\u00e9\r\n".encode()), encoding=encoding)) == "caf\u00e9\n"
    with pytest.raises(ConfigError, match="standard input is not UTF-8 text: 'utf-8' codec can't decode byte 0xff"):
        piped_text(io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding=encoding))


def test_piped_text_is_one_prompt_a_line(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.core.run.prompts.piped_text", lambda: "one\n\n  \ntwo, three\n")
    assert main(CHOSEN) == 0
    assert llm.calls[0][0] == ["one", "two, three"]


def test_standard_input_is_left_alone_when_there_is_a_source() -> None:
    def read() -> str:
        raise AssertionError("read")

    assert read_prompts({"prompt": "x"}, SamplingParams(), read) == [PromptLine("x", SamplingParams())]


def test_what_is_said_on_the_command_line_is_of_every_prompt(llm: type[FakeLLM]) -> None:
    said = ["priority=2", "tags.tenant=007, it's", "tags.class=1e3", "deadline_s=1.5", "cache_salt=${HOME}, 'x'"]
    assert main([*CHOSEN, "prompts=[a,b]", *said]) == 0
    assert llm.infos == [
        {
            "priority": [2, 2],
            "tags": [{"tenant": "007, it's", "class": "1e3"}] * 2,
            "deadline_s": [1.5, 1.5],
            "cache_salt": ["${HOME}, 'x'"] * 2,
        }
    ]


def test_lines_say_their_own_and_keep_the_other_tags(llm: type[FakeLLM]) -> None:
    rows = [
        {"prompt": "a", "priority": 1, "tags": {"tenant": "acme"}, "deadline_s": 2, "cache_salt": "s"},
        {"prompt": "b", "tags": {"class": "chat"}},
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*CHOSEN, "prompts_file=p.jsonl", "tags.class=batch", "deadline_s=9"]) == 0
    assert llm.infos == [
        {
            "priority": [1, 0],
            "tags": [{"class": "batch", "tenant": "acme"}, {"class": "chat"}],
            "deadline_s": [2, 9],
            "cache_salt": ["s", None],
        }
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["priority=high"], "priority='high' must be a whole number; lower is more urgent"),
        (["deadline_s=-2"], "deadline_s=-2 must be a finite number of seconds above 0, or None"),
        ([f"cache_salt={'x' * 257}"], "cache_salt has 257 characters; at most 256 are allowed"),
        (["tags=acme"], "tags='acme' must be a mapping of keys to texts"),
        (["tags={tenant: 3}"], "tags.tenant=3 must be a text of 1 to 128 printable characters"),
        (["tags.tenant="], "tags.tenant='' must be a text of 1 to 128 printable characters"),
        (
            ["tags.Tenant=acme"],
            "tags.Tenant: a tag's key is at most 32 characters of a-z, 0-9, '_', '.' and '-', and begins with a letter",
        ),
        (
            ["tags.tennant=acme", "engine.tag_keys=[tenant]"],
            "tags.tennant is unknown. Did you mean 'tenant'? engine.tag_keys allows: tenant",
        ),
    ],
)
def test_what_no_request_can_say_is_refused_before_anything_starts(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert fails(["prompt=a", *arguments], capsys) == message
    assert not llm.calls


def test_results_tell_what_requests_said(llm: type[FakeLLM]) -> None:
    said = output(0)
    said.tags, said.priority, said.deadline_s = {"tenant": "acme"}, 2, 1.5
    llm.outputs = [said]
    assert main([*CHOSEN, "prompt=a", "output=out.jsonl"]) == 0
    line = json.loads(Path("out.jsonl").read_text())
    assert (line["tags"], line["priority"], line["deadline_s"]) == ({"tenant": "acme"}, 2, 1.5)


def test_prompts_and_results_may_lie_in_the_home_folder(
    llm: type[FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.txt").write_text("first\n")
    assert main([*CHOSEN, "prompts_file=~/p.txt", "output=~/out.jsonl"]) == 0
    assert llm.calls[0][0] == ["first"] and len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_a_text_file_holds_one_prompt_a_line(llm: type[FakeLLM]) -> None:
    Path("a, b.txt").write_text("one\n\ntwo's\n")
    assert main([*CHOSEN, "prompts_file=a, b.txt"]) == 0
    assert llm.calls[0][0] == ["one", "two's"]


MARKED = "\ufeffimport os\x0cimport sys\r\na\u2028b\x85c\rd\n"
"""Two lines, as an editor of Windows writes them, with characters at which Python splits lines and nobody else."""
TWO_LINES = ["import os\x0cimport sys", "a\u2028b\x85c\rd"]


@pytest.mark.parametrize("rest", [b"", b"\xff\n"], ids=["all_utf8", "a_line_that_is_none"])
def test_a_line_of_a_text_file_ends_at_a_new_line_alone_and_a_byte_order_mark_is_no_prompt(rest: bytes) -> None:
    Path("p.txt").write_bytes(MARKED.encode() + rest)
    lines = read_prompts({"prompts_file": "p.txt"}, SamplingParams())
    assert [line.prompt for line in lines if not line.error] == TWO_LINES
    assert [line.place for line in lines if line.error] == (["p.txt:3"] if rest else [])


def test_a_line_that_is_piped_in_ends_at_a_new_line_alone_and_a_byte_order_mark_is_no_prompt() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as into:
        into.write(MARKED.encode())
    with os.fdopen(read, encoding="ascii") as stream:
        lines = read_prompts({}, SamplingParams(), lambda: piped_text(stream))
    assert [line.prompt for line in lines] == TWO_LINES
    assert [line.prompt for line in read_prompts({}, SamplingParams(), lambda: MARKED)] == TWO_LINES


def test_json_lines_may_begin_with_a_byte_order_mark() -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\r\n{"prompt": "b"}\n', encoding="utf-8-sig", newline="")
    lines = read_prompts({"prompts_file": "p.jsonl"}, SamplingParams())
    assert [(line.prompt, line.error) for line in lines] == [("a", ""), ("b", "")]


def test_json_lines_hold_three_forms_and_their_own_sampling(llm: type[FakeLLM]) -> None:
    rows = [
        {"prompt": "a\u2028b", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [1, 2], "stop_token_ids": [7]},
    ]
    Path("p.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert main([*CHOSEN, "prompts_file=p.jsonl", "sampling.temperature=0"]) == 0
    prompts, params = llm.calls[0]
    assert prompts == ["a\u2028b", [{"role": "user", "content": "hi"}], [1, 2]]
    assert params == [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, stop_token_ids=(7,)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "p.jsonl:2: not JSON: "),
        ("3", "p.jsonl:2: not a JSON object but int"),
        (
            '{"prompt": "a", "max_token": 3}',
            "p.jsonl:2: unknown key 'max_token'. Did you mean 'max_tokens'? Available:",
        ),
        ('{"max_tokens": 3}', "p.jsonl:2: needs one of prompt, messages, prompt_token_ids; it has none"),
        (
            '{"prompt": "a", "messages": []}',
            "p.jsonl:2: needs one of prompt, messages, prompt_token_ids; it has prompt",
        ),
        ('{"prompt": 3}', "p.jsonl:2: prompt=3 is not a text"),
        ('{"prompt_token_ids": ["a"]}', "p.jsonl:2: prompt_token_ids=['a'] is not a list of token ids"),
        ('{"messages": "hi"}', "p.jsonl:2: messages is not a list of objects with role and content"),
        ('{"prompt": "a", "max_tokens": 0}', "p.jsonl:2: sampling.max_tokens=0 must be at least 1"),
        ('{"prompt": "a", "priority": "x"}', "p.jsonl:2: priority='x' must be a whole number; lower is more urgent"),
        ('{"prompt": "a", "deadline_s": -1}', "p.jsonl:2: deadline_s=-1 must be a finite number of seconds above 0"),
        ('{"prompt": "a", "tags": {"k": 1}}', "p.jsonl:2: tags.k=1 must be a text of 1 to 128 printable characters"),
        ('{"prompt": "a", "cache_salt": ["s"]}', "p.jsonl:2: cache_salt=['s'] must be a text of 1 to 256 characters"),
        (
            '{"prompt_token_ids": [-1]}',
            "p.jsonl:2: prompt_token_ids=[-1] is not a list of token ids: one or more, none",
        ),
        ('{"prompt_token_ids": []}', "p.jsonl:2: prompt_token_ids=[] is not a list of token ids: one or more, none"),
    ],
)
def test_a_bad_line_is_refused_alone_with_its_number(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], line: str, error: str
) -> None:
    Path("p.jsonl").write_text('{"prompt": "fine"}\n' + line + '\n{"prompt": "too"}\n')
    assert main([*CHOSEN, "prompts_file=p.jsonl", "output=out.jsonl"]) == 2
    assert llm.calls[0][0] == ["fine", "too"]
    err = capsys.readouterr().err
    assert f"hookline: request 2/3 was refused: {error}" in err and "Traceback" not in err
    rows = [json.loads(row) for row in Path("out.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert rows[1]["error"].startswith(error) and rows[0]["error"] is None


def test_nothing_starts_if_no_line_says_something_possible_of_its_request(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.jsonl").write_text('{"prompt": "a", "tags": {"tennant": "x"}}\n{"prompt": "a", "priority": 0.5}\n')
    message = fails(["prompts_file=p.jsonl", "engine.tag_keys=[tenant]"], capsys)
    assert message.startswith("p.jsonl:1: tags.tennant is unknown. Did you mean 'tenant'?")
    assert not llm.calls


def test_what_only_the_engine_can_refuse_is_told_with_its_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt_token_ids": [9999]}\n')
    llm.outputs = [output(0), output(1, error="token id 9999 is outside the vocabulary (0 to 49)")]
    assert main([*CHOSEN, "prompts_file=p.jsonl", "output=out.jsonl"]) == 2
    error = "p.jsonl:3: token id 9999 is outside the vocabulary (0 to 49)"
    assert f"hookline: request 2/2 was refused: {error}\n" in capsys.readouterr().err
    assert json.loads(Path("out.jsonl").read_text().splitlines()[1])["error"] == error


@pytest.mark.parametrize(("typed", "stop"), [('["\n"]', "\n"), ('["\\n"]', "\\n")])
def test_a_text_of_the_command_line_is_taken_as_it_is(llm: type[FakeLLM], typed: str, stop: str) -> None:
    assert main([*CHOSEN, "prompt=a", f"sampling.stop={typed}"]) == 0
    assert llm.calls[0][1][0].stop == (stop,)


def test_a_request_that_failed_is_not_called_refused() -> None:
    begun = Timings(0.0, 1.0, None, 2.0)
    outputs = [
        output(1, error="too long"),
        replace(output(2, error="the grammar cannot be"), timings=replace(begun, scheduled_s=None)),
        replace(output(3, error="token 5 does not fit"), timings=begun),
        replace(output(4, error="a plugin fails"), is_fault=True),
        output(5),
    ]
    assert failures(outputs) == [
        "request 1/5 was refused: too long",
        "request 2/5 was refused: the grammar cannot be",
        "request 3/5 failed: token 5 does not fit",
        "request 4/5 failed: a plugin fails",
    ]


def test_a_line_whose_processor_s_arguments_cannot_be_is_refused_alone(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "a", "extra_args": {"dry": {"lenght": 3}}},
        {"prompt": "b", "extra_args": {"dry": {"length": 3}}},
    ]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([*CHOSEN, "prompts_file=p.jsonl"]) == 2
    assert llm.calls[0][0] == ["b"]
    assert "request 1/2 was refused: p.jsonl:1: unknown key 'sampling.extra_args.dry.lenght'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_line_that_is_no_utf_8_is_refused_alone(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    good = {"txt": ["one", "two"], "jsonl": ['{"prompt": "one"}', '{"prompt": "two"}']}[suffix]
    Path(f"p.{suffix}").write_bytes(b"\xff\n".join(line.encode() + b"\n" for line in good))
    assert main([*CHOSEN, f"prompts_file=p.{suffix}"]) == 2
    assert llm.calls[0][0] == ["one", "two"]
    assert f"request 2/3 was refused: p.{suffix}:2: not UTF-8 text: 'utf-8' codec" in capsys.readouterr().err


def test_a_file_of_bad_lines_alone_starts_nothing(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.jsonl").write_text('{"promt": "a"}\n{"promt": "b"}\n')
    assert fails(["prompts_file=p.jsonl"], capsys).startswith("p.jsonl:1: unknown key 'promt'. Did you mean 'prompt'?")
    assert llm.calls == []


# --- mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["scheduler=patiant"], "no scheduler named 'patiant'. Did you mean 'patient'? Available: hasty, patient"),
        (["scheduler=theirs"], "scheduler 'theirs' of plugin 'plugin1' (their-dist 1.2) cannot be used: scheduler "),
        (["kernels=quik"], "no kernels named 'quik'. Did you mean 'quick'? Available: auto, quick, slow"),
        (["experiment=latncy"], "no experiment named 'latncy'. Did you mean 'latency'? Available: "),
        (["workload=smoke"], "this command takes no 'workload'; hookline bench takes it"),
        (["modle=tiny"], "unknown key 'modle'. Did you mean 'model'? Available: "),
        (["+modle=tiny"], "unknown key 'modle'. Did you mean 'model'? Available: "),
        (
            ["scheduler.max_wait=3"],
            "unknown key 'scheduler.max_wait'. Did you mean 'scheduler.max_wait_ms'? Available: max_wait_ms",
        ),
        (["scheduler.max_nun_seqs=3"], "unknown key 'scheduler.max_nun_seqs'. Did you mean 'engine.max_num_seqs'?"),
        (["+scheduler.foo=3"], "unknown key 'scheduler.foo'. Available: max_wait_ms, fair, limit"),
        (["engine.tp=2"], "unknown key 'engine.tp'. Did you mean 'tp'? Available: "),
        (["engine.max_num_seq=3"], "unknown key 'engine.max_num_seq'. Did you mean 'engine.max_num_seqs'? Available: "),
        (["+engine.foo=3"], "unknown key 'engine.foo'. Available: max_num_seqs"),
        (["scheduler.max_wait_ms=soon"], "scheduler.max_wait_ms='soon' is not a float"),
        (["engine.max_num_seqs=abc"], "engine.max_num_seqs='abc' is not an int"),
        (["engine.max_num_seqs="], "engine.max_num_seqs='' is not an int"),
        (["engine.block_size=${nowhere}"], "engine.block_size: Interpolation key 'nowhere' not found"),
        (["dtype=${nowhere}"], "dtype: Interpolation key 'nowhere' not found"),
        (["engine.max_num_seqs=???"], "engine.max_num_seqs='???' stands for a value that is missing; set engine."),
        (
            ["scheduler.name=hasty"],
            "'scheduler.name=hasty' would change a name and not the option; write scheduler=hasty",
        ),
        (["scheduler=[1,2]"], "scheduler=[1,2] is a list, and scheduler takes one name; for a job of each: -m sch"),
        (["kernels=[a,b]"], "kernels=[a,b] is a list, and kernels takes one name"),
        (["model= [1,2]"], "model= [1,2] is a list, and model takes one name"),
        (["experiment=[1,2]"], "experiment=[1,2] is a list, and experiment takes one name"),
        (["scheduler=null"], "scheduler needs an option; it can be neither null nor deleted"),
        (["scheduler=hasty,patient"], "scheduler=hasty,patient has several values; add -m to run one job for each"),
        (["device=cpu x"], "device='cpu x' is not one of auto, cpu, cuda, cuda:N"),
        (["device={cpu"], "cannot read the value of device={cpu; put it in quotes: \"device='{cpu'\""),
        (["-m", "seed=1,,2,"], "seed=1,,2, has nothing at a side of a comma; write seed=1,2"),
        (["--bogus"], "unrecognized arguments: --bogus; see --help and --hydra-help"),
        (["--cfg", "jab"], "argument --cfg/-c: invalid choice: 'jab'"),
        (["device"], "cannot read argument 'device'; arguments have the form key=value"),
        (["sampling.temprature=1"], "unknown key 'sampling.temprature'. Did you mean 'sampling.temperature'?"),
        (["sampling.temperature=-1"], "sampling.temperature=-1 must be a finite number of at least 0"),
        (["sampling.max_tokens=0"], "sampling.max_tokens=0 must be at least 1"),
        (["sampling=5"], "sampling=5 is not a mapping of sampling parameters"),
        (["prompt=a", "prompts=[b]"], "prompt and prompts are both set; give the prompts one way"),
        (["prompts=hello"], "prompts='hello' is not a list; write prompts='[\"a\", \"b\"]', or prompt= for one"),
        (["prompts=[]"], "prompts=[] holds no prompt"),
        (["prompts=[1,2]"], "prompts[0]=1 is neither a text nor a list of token ids; quote a text"),
        (["prompts_file=none.txt"], "prompts_file=none.txt cannot be read: No such file or directory"),
        (["prompts_file=p.csv"], "prompts_file=p.csv: the name must end in .txt (a prompt a line) or .jsonl"),
        (["output=a.txt"], "output=a.txt: the name must end in .jsonl; leave output out to print text"),
        (["output=no/such/a.jsonl"], "output=no/such/a.jsonl: the folder no/such does not exist; make it first"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert fails(arguments, capsys).startswith(error)
    assert llm.calls == []
    assert os.listdir() == []


def test_a_deleted_option_is_refused(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*(one for one in CHOSEN if "scheduler" not in one), "~scheduler"]) == 2
    assert capsys.readouterr().err.endswith("hookline info lists them\n")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\n \n", "prompts_file=p.txt holds no prompt"),
        (b"\xff\xfe", "p.txt:1: not UTF-8 text: 'utf-8' codec can't decode"),
    ],
)
def test_an_unusable_prompts_file_is_named(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], content: bytes, error: str
) -> None:
    Path("p.txt").write_bytes(content)
    assert fails(["prompts_file=p.txt"], capsys).startswith(error)


def test_an_output_that_is_a_folder_is_refused(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").mkdir()
    assert fails(["output=a.jsonl"], capsys) == "output=a.jsonl is a folder; name a file"


def test_results_whose_file_cannot_be_written_are_shown(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.core.util.files.os.replace", full)
    assert main([*CHOSEN, "prompt=x", "output=a.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert "prompt 0 done" in out
    assert err.splitlines()[-1] == "hookline: error: output=a.jsonl cannot be written: No space left on device"
    assert not list(Path().iterdir())


def test_a_closed_standard_output_is_told_before_anything_runs(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main([*CHOSEN, "prompt=x"]) == 2
    assert not llm.calls and "standard output is closed; redirect it" in capsys.readouterr().err
    assert main([*CHOSEN, "prompt=x", "output=a.jsonl"]) == 0


def test_a_broken_plugin_is_mentioned_but_stops_nobody(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHOSEN, "prompt=x"]) == 0
    assert (
        "hookline: not loaded: plugin 'plugin1' (their-dist 1.2): scheduler 'theirs': target" in capsys.readouterr().err
    )


# --- Hydra


def test_logging_is_left_as_it_was(llm: type[FakeLLM]) -> None:
    logger = logging.getLogger("hookline")
    before = (logger.level, list(logger.handlers))
    main([*CHOSEN, "prompt=x"])
    assert (logger.level, logger.handlers) == before


@pytest.mark.slow
def test_help_and_cfg_show_options_and_run_nothing(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHOSEN, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hookline run [PROMPT] [option=name | key=value] ...: completes prompts.")
    assert "scheduler: hasty, patient" in out
    assert "engine.max_num_seqs=512\n    Most requests running at the same time.\n" in out
    assert main([*CHOSEN, "scheduler.limit=7", "--cfg", "job"]) == 0
    assert "limit: 7" in capsys.readouterr().out
    assert llm.calls == []


def test_the_environment_and_argv_are_left_as_they_were(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = list(sys.argv)
    main([*CHOSEN, "prompt=x"])
    assert sys.argv == before
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_an_experiment_sets_engine_keys_and_the_command_line_wins(llm: type[FakeLLM], host: PluginHost) -> None:
    folder = Path("mine")
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "few.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /scheduler: hasty\nengine: {max_num_seqs: 3, block_size: 8}\n"
    )
    rest = [one for one in CHOSEN if "scheduler" not in one]
    tree = compose([*rest, "experiment=few", "engine.block_size=4", "--config-dir", "mine"], host, RunKeys)[0].tree
    assert tree["scheduler"]["name"] == "hasty"
    assert (tree["engine"]["max_num_seqs"], tree["engine"]["block_size"]) == (3, 4)


def test_a_preset_that_begins_with_a_byte_order_mark_says_what_it_says_without(host: PluginHost) -> None:
    folder = Path("marked/experiment")
    folder.mkdir(parents=True)
    (folder / "few.yaml").write_text("# @package _global_\nengine: {max_num_seqs: 3}\n", encoding="utf-8-sig")
    tree = compose([*CHOSEN, "experiment=few", "--config-dir", "marked"], host, RunKeys)[0].tree
    assert tree["engine"]["max_num_seqs"] == 3


@pytest.mark.parametrize("extra", [[], ["hydra.searchpath=[]"], ["hydra.searchpath=[pkg://plugin_presets]"]])
def test_a_plugins_preset_is_the_same_on_the_command_line_and_in_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("plugin_presets", None)
    preset_package(
        tmp_path, "plugin_presets", {"scheduler/eager": "defaults: [patient, _self_]\nlimit: 3\nfair: false\n"}
    )
    host = host_with(full_plugin(), offering_presets("plugin_presets"))
    arguments = [*(one for one in CHOSEN if "scheduler" not in one), "scheduler=eager", "scheduler.max_wait_ms=2"]
    tree = compose([*arguments, *extra], host, RunKeys)[0].tree
    composed = validate({key: tree[key] for key in config_module.ENGINE_KEYS}, host)
    library = validate({**OPTIONS, "scheduler": {"name": "eager", "max_wait_ms": 2}}, host)
    assert composed == library
    assert composed.scheduler.config == PatientConfig(2.0, False, 3)


def test_a_frozen_config_can_be_overridden() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Frozen:
        limit: int = 1

    plugin = plugin_module(register_schedulers=registering("scheduler", "frozen", config=Frozen))
    host = host_with(full_plugin(), plugin)
    rest = [one for one in CHOSEN if "scheduler" not in one]
    tree = compose([*rest, "scheduler=frozen", "scheduler.limit=5"], host, RunKeys)[0].tree
    assert tree["scheduler"] == {"name": "frozen", "limit": 5}


@pytest.mark.parametrize("argument", ["={a: 1}", ".a=1"])
def test_a_mapping_takes_keys_of_its_own_but_no_other_place_does(host: PluginHost, argument: str) -> None:
    tree = compose([*CHOSEN, f"model.hf_overrides{argument}"], host, RunKeys)[0].tree
    assert tree["model"]["hf_overrides"] == {"a": 1}
    with pytest.raises(ConfigError, match=r"unknown key 'model.hf_override'\. Did you mean 'model.hf_overrides'"):
        compose([*CHOSEN, f"model.hf_override{argument}"], host, RunKeys)


def test_options_of_an_earlier_host_are_gone(host: PluginHost) -> None:
    other = host_with(plugin_module(register_schedulers=registering("scheduler", "only")))
    for kind in ("model", "sampler", "kernels"):
        other.registry.add(host.choose(kind, OPTIONS[kind]))
    compose(CHOSEN, host, RunKeys)
    with pytest.raises(PluginError, match="no scheduler named 'patient'"):
        compose(CHOSEN, other, RunKeys)


# --- sweeps


def started_jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    """Stands in for the jobs' processes; notes the arguments and the standard input of each."""
    started: list[tuple[list[str], str | None]] = []

    def run_child(
        command: Sequence[str], cwd: str, text: str | None, log: Path, timeout_s: Any, environ: Any
    ) -> dict[str, Any]:
        started.append((list(command[6:]), text))
        if "scheduler.limit=1" in command:
            return {"status": "failed", "error": "no such luck", "exit_code": 2}
        Path(command[-1].removeprefix("output=")).touch()
        return {"status": "done", "error": None, "exit_code": 0}

    monkeypatch.setattr(sweep, "run_child", run_child)
    return started


@pytest.mark.slow
def test_each_job_of_a_sweep_gets_its_own_arguments_and_folder(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = started_jobs(monkeypatch)
    arguments = [*CHOSEN, "-m", "scheduler.limit=1,2", "prompt=it's, ${x", "hydra.sweep.dir=outputs/here"]
    assert main(arguments) == 1
    folder = Path.cwd() / "outputs" / "here"
    assert [job[4] for job, _ in started] == ["scheduler.limit=1", "scheduler.limit=2"]
    assert all("prompt=it's, ${x" in job for job, _ in started)
    assert [job[-1] for job, _ in started] == [f"output={folder / str(number) / 'output.jsonl'}" for number in (0, 1)]
    err = capsys.readouterr().err
    assert "hookline: job 0 failed: no such luck; the others run on" in err
    assert "hookline: 1 of 2 jobs succeeded" in err
    assert llm.calls == []


@pytest.mark.slow
def test_the_keys_of_a_processor_that_info_shows_work_on_the_command_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert info_command.main(["dry"]) == 0
    shown = [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines() if "extra_args" in line]
    values = dict(zip(shown, ["0.5", "3", "[a,b]"], strict=True))
    assert main([*CHOSEN, "prompt=a", *(f"{key}={value}" for key, value in values.items())]) == 0
    assert main([*CHOSEN, "prompt=a", "sampling.extra_args={dry:{length:4}}", "sampling.extra_args.dry.length=5"]) == 0
    assert [params[0].extra_args["dry"] for _, params in llm.calls] == [
        {"multiplier": 0.5, "length": 3, "breakers": ["a", "b"]},
        {"length": 5},
    ]


@pytest.mark.slow
def test_what_all_requests_ask_of_a_processor_is_a_key_that_info_shows_and_sweeps_go_over(
    host: PluginHost, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert info_command.main(["dry"]) == 0
    assert "fields; for all requests of an engine: processors.dry.FIELD=VALUE" in capsys.readouterr().out
    tree = compose([*CHOSEN, "processors.dry.length=4", "processors.dry.breakers=[a]"], host, RunKeys)[0].tree
    assert tree["processors"] == {"dry": {"length": 4, "breakers": ["a"]}}
    assert validate_run({**tree, "prompt": "a"}, host).config.processors["dry"].arguments.length == 4
    assert fails(["processors.dry.lenght=4"], capsys).startswith("unknown key 'processors.dry.lenght'. Did you mean")
    started = started_jobs(monkeypatch)
    assert main([*CHOSEN, "-m", "prompt=a", "processors.dry.length=3,4"]) == 0
    assert [one for job, _ in started for one in job if "processors" in one] == [
        "processors.dry.length=3",
        "processors.dry.length=4",
    ]


def test_an_experiment_may_say_what_all_requests_ask_of_a_processor(host: PluginHost, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nprocessors: {dry: {length: 4, multiplier: 0.5}}\n"
    (tmp_path / "conf" / "experiment" / "careful.yaml").write_text(text)
    arguments = [*CHOSEN, "experiment=careful", f"hydra.searchpath=[file://{tmp_path}/conf]", "processors.dry.length=5"]
    assert compose(arguments, host, RunKeys)[0].tree["processors"] == {"dry": {"length": 5, "multiplier": 0.5}}


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("dry.multiplier=much", "sampling.extra_args.dry.multiplier='much' is not a float"),
        (
            "dry.multiply=1",
            "unknown key 'sampling.extra_args.dry.multiply'. Did you mean 'sampling.extra_args.dry.multiplier'? ",
        ),
        (
            "dri.multiplier=1",
            "unknown key 'sampling.extra_args.dri'. Did you mean 'sampling.extra_args.dry'? Available: dry",
        ),
        ("dry=1", "sampling.extra_args.dry=1 must be a mapping of the extension's arguments"),
        ("dry.length={", "cannot read the value of sampling.extra_args.dry.length={; put it in quotes: "),
    ],
)
def test_a_mistake_in_a_processors_key_is_one_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], argument: str, error: str
) -> None:
    assert fails([f"sampling.extra_args.{argument}"], capsys).startswith(error)
    assert llm.calls == []


@pytest.mark.slow
def test_a_sweep_goes_over_the_fields_of_a_processor(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    started = started_jobs(monkeypatch)
    key = "sampling.extra_args.dry.length"
    assert main(["-m", *CHOSEN, "prompt=x", f"{key}=2,3", "hydra.sweep.dir=here"]) == 0
    assert [job[4] for job, _ in started] == [f"{key}=2", f"{key}=3"]
    assert [f"{key}=2" in record["overrides"] for record in read_results(Path("here"))] == [True, False]


@pytest.mark.slow
def test_a_sweep_takes_a_file_name_but_no_folder_for_output(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = started_jobs(monkeypatch)
    assert main(["-m", *CHOSEN, "seed=1,2", "prompt=x", "output=mine.jsonl"]) == 0
    assert [Path(job[-1]).name for job, _ in started] == ["mine.jsonl"] * 2
    assert main(["-m", *CHOSEN, "seed=1,2", "prompt=x", "output=a/mine.jsonl"]) == 2
    assert "output=a/mine.jsonl: each job of a sweep has its own folder; give a file name alone" in (
        capsys.readouterr().err
    )
    assert main(["-m", *CHOSEN, "seed=1,2", "prompt=x", "profile=trace.json"]) == 2
    assert "profile=trace.json: all jobs of a sweep would write there; leave it out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "given"), [([], "piped"), (["prompt=x"], None), (["prompts=[a]"], None)])
def test_piped_prompts_are_read_once_for_all_jobs(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, arguments: list[str], given: str | None
) -> None:
    started = started_jobs(monkeypatch)
    texts = iter(["piped"])
    monkeypatch.setattr(sweep, "piped_text", lambda: next(texts))
    assert main(["-m", *CHOSEN, "seed=1,2", *arguments]) == 0
    assert [text for _, text in started] == [given, given]


@pytest.mark.slow
def test_a_sweep_into_the_same_folder_runs_only_what_is_not_done_yet(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = started_jobs(monkeypatch)
    common = ["-m", *CHOSEN, "prompt=x", "hydra.sweep.dir=here"]
    assert main([*common, "scheduler.limit=1,2"]) == 1
    assert main([*common, "scheduler.limit=3,2,1"]) == 1
    assert [job[-3] for job, _ in started] == [f"scheduler.limit={limit}" for limit in (1, 2, 3, 1)]
    err = capsys.readouterr().err
    assert f"hookline: job 1 is finished already, in {Path.cwd() / 'here' / '1'}" in err
    assert "hookline: 2 of 3 jobs succeeded" in err
    records = read_results(Path("here"))
    assert {record["overrides"][-2]: record["status"] for record in records} == {
        "scheduler.limit=1": "failed",
        "scheduler.limit=2": "done",
        "scheduler.limit=3": "done",
    }
    folders = [record["folder"] for record in records]
    assert len(set(folders)) == 3, "a job took the folder of another one"


@pytest.mark.slow
def test_nobody_but_the_results_own_keys_tells_jobs_apart(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    started = started_jobs(monkeypatch)
    common = ["-m", *CHOSEN, "hydra.sweep.dir=here", "prompt=x"]
    assert main([*common, "seed=1", "scheduler.limit=4"]) == 0
    assert main([*common, "scheduler.limit=4", "seed=1", "output=other.jsonl"]) == 0
    assert len(started) == 1
    assert main(["-m", *CHOSEN, "hydra.sweep.dir=here", "prompt=y", "seed=1", "scheduler.limit=4"]) == 0
    assert len(started) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["-m"], True), (["--multirun"], True), (["--multi"], True), (["prompt=-m"], False), (["--"], False), ([], False)],
)
def test_a_sweep_is_recognised_by_its_flag(arguments: list[str], expected: bool) -> None:
    assert is_sweep(arguments) is expected


DEVELOPED = """
from hookline.core.contracts import ModelConfig, hookimpl

API_VERSION = 2

@hookimpl
def register_models(register): register("tiny", "nowhere:Tiny", config=ModelConfig)

@hookimpl
def register_schedulers(register): register("patient", "nowhere:Patient")

@hookimpl
def register_samplers(register): register("dice", "nowhere:Dice")

@hookimpl
def register_kernels(register): register("slow", "nowhere:Slow")
"""


def run_command(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "developed_plugin.py").write_text(DEVELOPED)
    path = os.pathsep.join([str(folder), str(Path(sweep.__file__).parents[3])])
    environ = {**os.environ, "HOOKLINE_PLUGINS": "developed_plugin", "PYTHONPATH": path}
    command = [sys.executable, "-m", "core.run", *CHOSEN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=text, env=environ, timeout=240)


@pytest.mark.slow
def test_failed_jobs_do_not_stop_the_others_and_give_exit_code_1(tmp_path: Path) -> None:
    done = run_command(tmp_path, "-m", "engine.max_num_seqs=0,-1", "prompt=x")
    assert done.returncode == 1, done.stderr
    assert "engine.max_num_seqs=0 must be at least 1" in done.stderr
    assert "engine.max_num_seqs=-1 must be at least 1" in done.stderr
    assert "hookline: 0 of 2 jobs succeeded" in done.stderr
    assert "Traceback" not in done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["job", "status"],
        ["0", "failed"],
        ["1", "failed"],
    ]


@pytest.mark.slow
def test_the_command_reads_the_environments_plugins_and_fails_in_one_line(tmp_path: Path) -> None:
    done = run_command(tmp_path, "sampling.max_tokens=0", text="piped prompt\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "hookline: error: sampling.max_tokens=0 must be at least 1"


# --- progress


def test_there_is_no_progress_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress_bar(3) is None


def test_the_progress_bar_shows_live_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr("hookline.core.frontend.generation.time.monotonic", lambda: now[0])
    bar = Progress(2)
    bar.update(0, 100, 0)
    now[0] = 1.0
    bar.update(1, 100, 20)
    bar.update(1, 0, 0)
    bar._bar.refresh()
    bar.close()
    err = capsys.readouterr().err
    assert "prefill 200 tok/s, decode 20 tok/s" in err
    assert "2/2" in err
