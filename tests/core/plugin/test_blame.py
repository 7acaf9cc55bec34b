"""Who is to blame for what code of plugins raises: nobody for a lack of memory, an interrupt, or an error of ours."""

import pytest

from hookline.core.errors import Interrupted, PluginError, RequestError
from hookline.core.plugin.blame import Blaming
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
