"""What a server is configured with: its names, what its observers are told of them, and keys that were meant."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from hookline.core.config.compose import compose
from hookline.core.contracts import Observer
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.settings import ServeConfig, ServeKeys, validate_serve
from tests.core.plugin_fakes import OPTIONS, full_plugin, host_with, plugin_module, registering

HOST = functools.cache(PluginHost.load)


@dataclass
class LabelConfig:
    model_name: str = ""


class Labels(Observer):
    def __init__(self, config: Any) -> None:
        self.config = config


def observing_host() -> PluginHost:
    target = f"{__name__}:Labels"
    return host_with(
        full_plugin(),
        plugin_module(register_observers=registering("observer", "labels", target=target, config=LabelConfig)),
        plugin_module(register_observers=registering("observer", "plain", target=target)),
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "a"], "serve.names=['a', 'b', 'a'] has 'a' twice"),
        ([""], "serve.names=['']: a name must not be empty"),
        (["a", " "], "serve.names=['a', ' ']: a name must not be empty"),
    ],
)
def test_names_that_are_empty_or_there_twice_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServeConfig(names=tuple(names))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("observers", "names", "told"),
    [
        (["labels", "plain"], ["a", "b"], ["a", None]),
        ("labels", ["a"], ["a"]),
        ([{"name": "labels", "model_name": "own"}], ["a"], ["own"]),
        (["labels"], [], [""]),
    ],
)
def test_an_observer_is_told_the_first_name_unless_it_has_its_own(
    observers: Any, names: list[str], told: list[str | None]
) -> None:
    run = validate_serve({**OPTIONS, "observers": observers, "serve": {"names": names}}, observing_host())
    again = validate_serve({**run.tree, "serve": {}}, observing_host())  # as the engine's process does
    for config in (run.config, again.config):
        assert [getattr(one.config, "model_name", None) for one in config.observers] == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=1"], "unknown key 'port'. Did you mean 'serve.port'? Available: "),
        (["max_model_len=1"], "unknown key 'max_model_len'. Did you mean 'engine.max_model_len'? Available: "),
        (["--port", "18910"], "there is no flag --port; write serve.port=18910"),
        (["--port=18910"], "there is no flag --port; write serve.port=18910"),
        (["device=cpu", "--max-model-len", "9"], "there is no flag --max-model-len; write engine.max_model_len=9"),
        (["--access-log"], "there is no flag --access-log; write serve.access_log=..."),
        (["--tensor-parallel-size", "2"], "there is no flag --tensor-parallel-size; write tp=2"),
        (["--mem-fraction-static=0.8"], "there is no flag --mem-fraction-static; write engine.memory_fraction=0.8"),
        (["--model-path", "Qwen/Qwen3-8B"], "there is no flag --model-path; write model.checkpoint=Qwen/Qwen3-8B"),
        (["--enforce-eager"], "there is no flag --enforce-eager; write engine.cuda_graphs=false"),
        (["--api-key", "x"], "there is no flag --api-key; write serve.api_key_file=FILE, a file"),
        (
            ["--tensor-parallel-size", "2", "--max-model-len=9"],
            "there is no flag --tensor-parallel-size or --max-model-len; write tp=2 engine.max_model_len=9",
        ),
        (["--bogus"], "unrecognized arguments: --bogus; see --help and --hydra-help"),
    ],
)
def test_a_key_without_its_group_and_a_flag_in_its_place_are_told_what_was_meant(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compose(arguments, HOST(), ServeKeys, "serve")
    assert str(error.value).startswith(message)
