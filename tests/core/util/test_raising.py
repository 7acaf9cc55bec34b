"""Code of plugins may raise anything: it is blamed for that, and for no interrupt."""

import pytest

from hookline.core.errors import Interrupted
from hookline.core.util.raising import Raising, raised_by


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted()])
def test_an_interrupt_leaves_code_of_plugins_as_it_is(error):
    def interrupted():
        raise error

    with pytest.raises(type(error)) as caught, Raising(lambda error: ValueError("blamed")):
        interrupted()
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        raised_by(interrupted)
    assert caught.value is error


@pytest.mark.parametrize("may_show", [True, False])
@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("theirs")])
def test_whatever_else_it_raises_leaves_as_the_error_that_blames_it(error, may_show):
    with (
        pytest.raises(ValueError, match="blamed") as caught,
        Raising(lambda error: ValueError("blamed"), may_show=may_show),
    ):
        raise error
    assert caught.value.__cause__ is (error if may_show else None)
    with pytest.raises(type(error)) as caught, Raising(lambda error: None):
        raise error
    assert caught.value is error


def test_what_a_call_raised_is_told_and_nothing_if_it_returns():
    assert raised_by(int, "3") is None
    assert str(raised_by(int, "x", base=10)) == "invalid literal for int() with base 10: 'x'"
