"""Short forms of arguments: what they stand for, and which of them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookline.core.config.compose import compose
from hookline.core.config.shorthands import write_out
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.run.settings import RunKeys
from hookline.core.serve.settings import ServeKeys

KEYS = ["prompt", "device", "model"]


@pytest.mark.parametrize(
    ("given", "positional", "wanted"),
    [
        ("Qwen/Qwen3-0.6B", "model", "model.checkpoint=Qwen/Qwen3-0.6B"),
        ("qwen3_0_6b", "model", "model=qwen3_0_6b"),
        ("model=HuggingFaceTB/SmolLM2-135M", None, "model.checkpoint=HuggingFaceTB/SmolLM2-135M"),
        ("model=./folder,owner/name", None, "model.checkpoint=./folder,owner/name"),
        ("model=qwen3,owner/name", None, "model=qwen3,owner/name"),
        ("model.checkpoint=a/b", None, "model.checkpoint=a/b"),
        ("prompts_file=a/b", None, "prompts_file=a/b"),
        ("hello there", "prompt", "prompt=hello there"),
        ("x = 1", "prompt", "prompt=x = 1"),
        ("a/b", "prompt", "prompt=a/b"),
        ("tags.a=b c", "prompt", "tags.a=b c"),
        ("~device", "prompt", "~device"),
        ("device", "prompt", "device"),
        ("hello there", None, "hello there"),
    ],
)
def test_a_short_form_is_written_out(given: str, positional: str | None, wanted: str) -> None:
    assert write_out([given], positional, KEYS) == [wanted]


@pytest.mark.parametrize(
    ("pairs", "positional", "message"),
    [
        (["hello", "there"], "prompt", "'hello' and 'there' have no key; prompt takes one, with quotes around all its"),
        (
            ["Qwen/Qwen3-0.6B", "hello there"],
            "prompt",
            "'Qwen/Qwen3-0.6B' and 'hello there' have no key; prompt takes one, and a checkpoint has a key: "
            "model.checkpoint=Qwen/Qwen3-0.6B 'hello there'",
        ),
        (["a/b", "c/d"], "model", "'a/b' and 'c/d' have no key; model takes one, with quotes around all its words"),
        (["hello", "prompt=x"], "prompt", "prompt is given twice, as 'hello' and by its key; leave one out"),
        (["a/b", "model=x"], "model", "model is given twice, as 'a/b' and by its key"),
        (["x", "model.checkpoint=a/b"], "model", "model.checkpoint is given twice, as 'x' and by its key"),
        (["device = cpu"], None, "'device' is a key, which has no spaces around its =; write device=cpu"),
        (["device =", "c u"], None, "'device' is a key, which has no spaces around its =; write 'device=c u'"),
        (["device", "=", "cpu"], "prompt", "'device' is a key, which has no spaces around its =; write device=cpu"),
        (["device", "=cpu"], "prompt", "'device' is a key, which has no spaces around its =; write device=cpu"),
        (
            ["device = cpu"],
            "prompt",
            "'device' is a key, which has no spaces around its =; write device=cpu, or 'prompt=device = cpu' if it is",
        ),
    ],
)
def test_what_is_given_twice_or_spread_is_refused(pairs: list[str], positional: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        write_out(pairs, positional, KEYS)
    assert str(error.value).startswith(message)


def test_the_commands_take_them() -> None:
    host = PluginHost.load()
    [job] = compose(["tp=1", "a = b, c"], host, RunKeys, positional="prompt")
    assert job.tree["prompt"] == "a = b, c"
    [job] = compose(["model.checkpoint=/home/josé/models (old)/it's"], host, RunKeys)
    assert job.tree["model"]["checkpoint"] == "/home/josé/models (old)/it's"
    [job] = compose(["Qwen/Qwen3-0.6B", "serve.port=1"], host, ServeKeys, "serve", positional="model")
    assert (job.tree["model"]["checkpoint"], job.tree["serve"]["port"]) == ("Qwen/Qwen3-0.6B", 1)


def test_a_command_without_a_positional_argument_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"cannot read argument 'a/b'; .* key=value, as in model=a/b$"):
        compose(["a/b"], PluginHost.load(), RunKeys)


@pytest.mark.parametrize(
    ("name", "told"), [("mine", "model.checkpoint=./mine"), ("my own", "'model.checkpoint=./my own'")]
)
def test_a_folder_in_place_of_a_model_s_name_is_told_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        compose([name], PluginHost.load(), ServeKeys, "serve", positional="model")
    assert str(error.value) == f"no model named '{name}'; for the folder of this name: {told}"
