"""What others wrote appears in errors in one line of sane length."""

import pytest

from hookline.core.errors import PluginError, clipped, shown


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
