"""What others wrote appears in errors in one line of sane length."""

import pytest

from hookline.core.errors import Interrupted, PluginError, Raising, clipped, raised_by, shown


@pytest.mark.parametrize("value", ["much", 1.5, None, [1, 2], {"a": True}])
def test_short_values_are_shown_whole(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 10**7, ["y" * 10**5] * 50, {str(i): "z" * 1000 for i in range(1000)}])
def test_long_values_are_cut(value):
    assert len(shown(value)) < 500 and "..." in shown(value)


WHO = "processor 'x' of plugin 'theirs' (their-dist 1.2)"


@pytest.mark.parametrize(
    ("message", "blame"),
    [
        (
            f"{WHO} fails in process during a step: KeyError: 'a' (/srv/x.py:3, in f)",
            f"{WHO} fails in process during a step",
        ),
        (f"request 7: {WHO} breaks its contract in load: it returned 3", f"{WHO} breaks its contract in load"),
        (f"{WHO} cannot be loaded from theirs:Mine: ImportError: /srv/x.py", f"{WHO} cannot be loaded"),
        (f"{WHO} fails: ValueError (/srv/x.py:3, in f)", f"{WHO} fails"),
        (f"{WHO} fails in /srv/x.py: so", None),
        (f"{WHO} fails", None),
        ("a secret in /srv/x.py fails: so", None),
    ],
)
def test_a_plugin_is_blamed_without_what_it_raised(message, blame):
    assert PluginError(message).blame == blame


@pytest.mark.parametrize("digits", [70, 400, 5000])
def test_a_whole_number_is_shown_by_its_length_where_that_is_long(digits):
    assert shown([-(10**digits)]) == f"[<whole number of about {digits} digits>]"


def test_a_deep_value_is_shown_without_its_depth():
    value = []
    for _ in range(10**5):
        value = [value]
    assert len(shown(value)) < 100


def test_lines_and_escape_sequences_stay_in_one_line():
    assert clipped("a\nb\x1b[2J\u2028") == r"a\nb\x1b[2J\u2028"
    assert clipped("a" * 300) == "a" * 100 + "..." + "a" * 100


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
