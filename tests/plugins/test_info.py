"""`core.info` over the plugins that ship with Hookline: every field is documented, every file is where it says."""

import re
import shlex
from pathlib import Path

import pytest

from hookline.core.config.compose import compose
from hookline.core.info.command import inventory, only
from hookline.core.info.layout import show_one
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS
from hookline.core.run.settings import RunKeys


def test_a_documented_field_is_shown_with_its_docstring_and_the_file_is_the_real_one() -> None:
    lines = show_one(only(inventory(PluginHost.load(environ={})), "prefill_first")).splitlines()
    path = next(line.removeprefix("  file:").strip() for line in lines if line.startswith("  file:"))
    assert "class PrefillFirst" in Path(path).read_text()
    field = next(number for number, line in enumerate(lines) if "scheduler.watermark: float = 0.01" in line)
    assert lines[field + 1].strip().startswith("Fraction of all KV blocks kept free")


@pytest.mark.slow
def test_every_field_of_our_own_options_is_documented() -> None:
    options = inventory(PluginHost.load(environ={}))["options"]
    ours = [one for one in options if one["distribution"] == "hookline" and one["kind"] in KINDS]
    assert [(one["name"], field["name"]) for one in ours for field in one["fields"] if not field["doc"]] == []
    assert [one["name"] for one in ours if not Path(one["file"]).is_file()] == []


def test_a_plugin_is_shown_with_its_file_hooks_and_options() -> None:
    text = show_one(only(inventory(PluginHost.load(environ={})), "schedulers"))
    assert text.startswith("plugin schedulers\n  from:      hookline ")
    assert "plugins/schedulers/__init__.py\n  hooks:     register_schedulers" in text
    assert "scheduler=prefill_first" in text and "scheduler=chunked" in text


@pytest.mark.slow
def test_an_observers_fields_are_shown_with_the_argument_that_sets_them() -> None:
    host = PluginHost.load(environ={})
    text = show_one(only(inventory(host), "prometheus"))
    assert text.count("observer prometheus: ") == 1 and "\n    port: int | None = None\n" in text
    [shown] = re.findall(r"fields, as in (observers='.*'):\n", text)
    [argument] = shlex.split(shown.replace("FIELD: VALUE", "port: 9464"))
    [job] = compose([argument], host, RunKeys)
    assert job.tree["observers"] == [{"name": "prometheus", "port": 9464}]


def test_a_processor_is_shown_with_the_keys_that_a_request_sets() -> None:
    text = show_one(only(inventory(PluginHost.load(environ={})), "truncation"))
    assert text.startswith("processor truncation: ") and "    sampling.top_k: int = 0" in text
