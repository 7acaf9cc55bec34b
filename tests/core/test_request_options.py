"""What a request says of itself: what is taken, and one line for what is not."""

from functools import partial

import pytest

from hookline.core.errors import RequestError
from hookline.core.request_options import PLAIN, RequestOptions, options_each, options_of


def test_nothing_said_is_a_plain_request():
    assert RequestOptions().checked() == PLAIN
    assert PLAIN == RequestOptions(0, None, None, None, None)
    assert PLAIN.prefix_root == 0


def test_tags_are_a_copy_that_cannot_be_written_to():
    given = {"tenant": "acme", "a.b-c_1": "x" * 128}
    info = RequestOptions(tags=given).checked()
    given["tenant"] = "other"
    assert info.tags["tenant"] == "acme"
    with pytest.raises(TypeError):
        info.tags["tenant"] = "other"


def test_different_salts_have_different_roots_beyond_every_serial_and_equal_ones_the_same():
    salts = ["a", "b", "ab", "é" * 256, "\ud800"]
    roots = [RequestOptions(cache_salt=salt).checked().prefix_root for salt in salts]
    assert len(set(roots)) == len(salts) and min(roots) >= 2**128
    assert RequestOptions(cache_salt="a").checked().prefix_root == roots[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"priority": 1.5}, "priority=1.5 must be a whole number; lower is more urgent"),
        ({"priority": True}, "priority=True must be a whole number; lower is more urgent"),
        ({"priority": 2**63}, "priority=9223372036854775808 must be a whole number; lower is more urgent"),
        ({"deadline_s": -2}, "deadline_s=-2 must be a finite number of seconds above 0, or None"),
        ({"deadline_s": 0}, "deadline_s=0 must be a finite number of seconds above 0, or None"),
        ({"deadline_s": float("nan")}, "deadline_s=nan must be a finite number of seconds above 0, or None"),
        ({"timeout_s": -2}, "timeout_s=-2 must be a finite number of seconds above 0, or None"),
        ({"deadline_s": "2"}, "deadline_s='2' must be a finite number of seconds above 0, or None"),
        ({"cache_salt": "x" * 257}, "cache_salt has 257 characters; at most 256 are allowed"),
        ({"cache_salt": ""}, "cache_salt='' must be a text of 1 to 256 characters, or None"),
        ({"cache_salt": 7}, "cache_salt=7 must be a text of 1 to 256 characters, or None"),
        ({"tags": ["acme"]}, "tags=['acme'] must be a mapping of keys to texts"),
        ({"tags": {f"k{place}": "v" for place in range(9)}}, "tags has 9 keys; at most 8 are allowed"),
        (
            {"tags": {"Tenant": "acme"}},
            "tags.Tenant: a tag's key is at most 32 characters of a-z, 0-9, '_', '.' and '-', and begins with a letter",
        ),
        (
            {"tags": {"t\n": "acme"}},
            r"tags.t\n: a tag's key is at most 32 characters of a-z, 0-9, '_', '.' and '-', and begins with a letter",
        ),
        (
            {"tags": {3: "acme"}},
            "tags.3: a tag's key is at most 32 characters of a-z, 0-9, '_', '.' and '-', and begins with a letter",
        ),
        ({"tags": {"tenant": 3}}, "tags.tenant=3 must be a text of 1 to 128 printable characters"),
        ({"tags": {"tenant": ""}}, "tags.tenant='' must be a text of 1 to 128 printable characters"),
        ({"tags": {"tenant": "a\nb"}}, r"tags.tenant='a\nb' must be a text of 1 to 128 printable characters"),
        (
            {"tags": {"tennant": "acme"}, "tag_keys": ("tenant", "class")},
            "tags.tennant is unknown. Did you mean 'tenant'? engine.tag_keys allows: tenant, class",
        ),
        ({"tags": {"tenant": "acme"}, "tag_keys": ()}, "tags.tenant is unknown. engine.tag_keys allows: none"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given, message):
    given = dict(given)
    tag_keys = given.pop("tag_keys", None)
    with pytest.raises(RequestError) as refused:
        RequestOptions(**given).checked(tag_keys)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "given", [{"tags": {"tenant": "x" * 10**6}}, {"cache_salt": "x" * 10**6}, {"tags": {"k" * 10**6: "v"}}]
)
def test_a_very_long_value_is_refused_in_a_short_line(given):
    with pytest.raises(RequestError) as refused:
        RequestOptions(**given).checked()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_tokens", "max_tokens is a sampling parameter; pass SamplingParams(max_tokens=...)"),
        (
            "deadline",
            "unexpected argument 'deadline'. Did you mean 'deadline_s'? Available: priority, tags, deadline_s, ",
        ),
    ],
)
def test_an_option_that_is_none_is_told_with_what_was_meant(name: str, told: str) -> None:
    for make in (options_of, partial(options_each, 1)):
        with pytest.raises(TypeError) as error:
            make(**{name: 3})
        assert str(error.value).startswith(told)
