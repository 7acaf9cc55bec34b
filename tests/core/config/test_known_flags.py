"""Flags of other engines: each is answered with a key that exists, and the documentation says the same."""

import re
import shlex
from pathlib import Path

import pytest

from hookline.core.config.compose import compose
from hookline.core.config.known_flags import KEYS, SETTINGS
from hookline.core.config.schema import plain_defaults
from hookline.core.contracts import ModelConfig
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS
from hookline.core.serve.settings import ServeKeys

PAGE = Path(__file__).parents[3] / "docs" / "from_other_engines.md"
DEFAULTS = plain_defaults(ServeKeys) | {"model": plain_defaults(ModelConfig)}


def exists(key):
    root, _, name = key.partition(".")
    return (root in DEFAULTS or root in KINDS) and (not name or name in DEFAULTS[root])


@pytest.mark.parametrize("key", sorted({*KEYS.values(), *(text.partition("=")[0] for text in SETTINGS.values())}))
def test_what_a_flag_is_answered_with_is_a_key(key):
    assert exists(key)


def test_the_page_says_what_the_commands_say():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    said = 0
    for *theirs, ours in rows:
        keys = re.findall(r"`([a-z_.]+)=[^`]*`", ours)
        assert all(exists(key) for key in keys), ours
        for flag in re.findall(r"`--([a-z-]+)[ `]", "|".join(theirs)):
            answer = KEYS.get(flag) or SETTINGS.get(flag, "").partition("=")[0]
            said += bool(answer)
            assert not answer or answer in keys, (flag, ours)
    assert said > 25


def test_the_error_in_the_page_is_the_error():
    command, error = re.findall(r"^\$ hookline serve (.*)\nhookline: error: (.*)$", PAGE.read_text(), re.M)[0]
    with pytest.raises(ConfigError) as refused:
        compose(shlex.split(command), PluginHost.load(), ServeKeys, "serve", positional="model")
    assert str(refused.value) == error


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("qwen3_0_6b", "model=qwen3_0_6b"),
        ("a/b", "model.checkpoint=a/b"),
        (".", "model.checkpoint=."),
        ("./my own", "'model.checkpoint=./my own'"),
    ],
)
def test_a_model_s_name_is_no_checkpoint(given, told):
    with pytest.raises(ConfigError, match=f"^there is no flag --model; write {re.escape(told)}$"):
        compose(["--model", given], PluginHost.load(), ServeKeys, "serve", positional="model")
