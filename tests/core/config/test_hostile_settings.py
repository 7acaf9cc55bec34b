"""Any value of any key of a configuration is taken or refused in one line."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.config import settings as settings_module
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineConfig, validate
from hookline.core.errors import HooklineError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import default_options
from hookline.core.plugin.registry import KINDS
from tests.fuzzing import examples

NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, math.nan, math.inf])
TEXTS = st.text(max_size=6) | st.sampled_from(["${oc.env:HOME}", "???", "auto", "\x1b[31m", "\ud800", "${", "x" * 5000])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.binary(max_size=3) | st.builds(object)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=3,
)
SIZES = st.dictionaries(
    st.sampled_from([field.name for field in dataclasses.fields(EngineConfig)]) | TEXTS, ANYTHING, max_size=3
)


@pytest.fixture(scope="module")
def host():
    options = default_options()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings_module, "default_options", lambda: dict(options))  # else read again for every case
        yield PluginHost.load()


@st.composite
def trees(draw, host):
    """Mostly of keys that there are, with names and fields that there are."""
    tree = draw(st.dictionaries(st.sampled_from(ENGINE_KEYS) | TEXTS, ANYTHING, max_size=3))
    if draw(st.booleans()):
        tree["engine"] = draw(SIZES)
    entry = draw(st.sampled_from([entry for entry in host.registry if entry.kind in KINDS]))
    if draw(st.booleans()):
        names = [field.name for field in dataclasses.fields(entry.config)] if entry.config else []
        values = draw(st.dictionaries(st.sampled_from([*names, "name"]), ANYTHING, max_size=2))
        tree[entry.kind] = {"name": entry.name, **values}
    return tree


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(data=st.data())
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(host, data):
    tree = data.draw(trees(host))
    try:
        config = validate(tree, host)
    except HooklineError as error:
        line = str(error)
        assert 0 < len(line) < 4000 and line.isprintable() and "Traceback" not in line
    else:
        assert isinstance(config, Config)
