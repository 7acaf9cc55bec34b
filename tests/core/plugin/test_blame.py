"""Who is to blame for what code of plugins raises: nobody for a lack of memory, an interrupt, or an error of ours."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from hookline.core.errors import Interrupted, PluginError, RequestError
from hookline.core.plugin.blame import Blaming, with_place
from hookline.core.plugin.problems import with_line
from hookline.core.plugin.registry import Entry, Origin

ENTRY = Entry("sampler", "theirs", "nowhere:Theirs", Origin("theirs", "nowhere", "their-dist", "1"))


def raised(error):
    with pytest.raises(BaseException) as caught, Blaming([ENTRY], "while tested", otherwise=ENTRY):
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
        Interrupted(),
        RequestError("not like this"),
    ],
)
def test_what_is_nobody_s_fault_stays_as_it_is(error):
    assert raised(error) is error


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), StopIteration(), RuntimeError("a bug")])
def test_whatever_else_is_the_plugin_s(error):
    found = raised(error)
    assert type(found) is PluginError and found.__cause__ is error
    assert str(found).startswith("sampler 'theirs' of plugin 'theirs' (their-dist 1) fails while tested: ")


class Theirs:
    def embed(self):
        return torch.zeros(2) + torch.zeros(3)

    def encode(self):
        return json.dumps({"a": object()})

    def store(self):
        return asdict(3)

    def ask_core(self):
        return Blaming([ENTRY], "", kind=3).whose(None)


@pytest.mark.parametrize("method", ["embed", "encode", "store", "ask_core"])
def test_the_place_of_an_error_is_in_the_plugin_s_file_and_not_in_a_library_s(method):
    entry = replace(ENTRY, target=f"{__name__}:Theirs")
    line = getattr(Theirs, method).__code__.co_firstlineno + 1
    with pytest.raises(PluginError) as caught, Blaming([entry], "while tested"):
        getattr(Theirs(), method)()
    assert str(caught.value).startswith(f"{entry} fails in {method} while tested: ")
    assert str(caught.value).endswith(f" ({__file__}:{line}, in {method})")


def test_the_place_is_a_library_s_if_no_plugin_called_it():
    try:
        json.loads("x")
    except ValueError as error:
        outer = error.__traceback__
        error.__traceback__ = outer.tb_next
        assert "decoder.py:" in with_place(error) and "decoder.py:" in with_line(error)
