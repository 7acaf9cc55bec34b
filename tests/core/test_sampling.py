"""SamplingParams: every invalid value is one line that names the field, the value and the range."""

import pytest

from core.errors import RequestError
from core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "sampling.temperature=-0.1 must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "sampling.temperature=nan must be"),
        ({"temperature": "hot"}, "sampling.temperature='hot' must be"),
        ({"max_tokens": 0}, "sampling.max_tokens=0 must be at least 1"),
        ({"max_tokens": -3}, "sampling.max_tokens=-3 must be at least 1"),
        ({"max_tokens": 2.5}, "sampling.max_tokens=2.5 must be a whole number"),
        ({"max_tokens": True}, "sampling.max_tokens=True must be a whole number"),
        ({"min_tokens": -1}, "sampling.min_tokens=-1 must be at least 0"),
        ({"min_tokens": 9, "max_tokens": 4}, "sampling.min_tokens=9 exceeds max_tokens=4"),
        ({"seed": -1}, "sampling.seed=-1 must be between 0 and"),
        ({"seed": 2**63}, "must be between 0 and 9223372036854775807"),
        ({"stop_token_ids": 7}, "sampling.stop_token_ids=7 must be a list of token ids"),
        ({"stop_token_ids": "7"}, "must be a list of token ids"),
        ({"stop_token_ids": [1, -2]}, "sampling.stop_token_ids=-2 must be at least 0"),
        ({"ignore_eos": 1}, "sampling.ignore_eos=1 is not a bool"),
        ({"n": 0}, "sampling.n=0 must be between 1 and 1024"),
        ({"n": 1025}, "sampling.n=1025 must be between 1 and 1024"),
        ({"n": 1.0}, "sampling.n=1.0 must be a whole number"),
        ({"stop": ""}, "sampling.stop='' must be a text or a list of texts, none of them empty"),
        ({"stop": ["a", ""]}, "sampling.stop=['a', ''] must be a text or a list of texts, none of them empty"),
        ({"stop": [5]}, "sampling.stop=[5] must be a text or a list of texts"),
        ({"stop": None}, "sampling.stop=None must be a text or a list of texts"),
        ({"include_stop_str_in_output": "no"}, "sampling.include_stop_str_in_output='no' is not a bool"),
        ({"skip_special_tokens": 0}, "sampling.skip_special_tokens=0 is not a bool"),
    ],
)
def test_an_invalid_value_is_named_with_its_range(values, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_key_is_an_error_with_the_near_miss():
    with pytest.raises(RequestError, match=r"unknown key 'sampling.temprature'. Did you mean 'temperature'\?"):
        SamplingParams.of({"temprature": 1})


def test_lists_become_tuples_so_that_params_are_values():
    assert SamplingParams.of({"stop_token_ids": [1, 2], "temperature": 1}) == SamplingParams(1.0, stop_token_ids=(1, 2))


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"]) == SamplingParams(stop=("END",))


def test_each_completion_has_parameters_and_a_seed_of_its_own():
    several = SamplingParams(n=3, seed=5, temperature=0.5).each()
    assert [one.n for one in several] == [1, 1, 1] and {one.temperature for one in several} == {0.5}
    assert several[0].seed == 5 and len({one.seed for one in several}) == 3
    assert [one.seed for one in SamplingParams(n=2).each()] == [None, None]
    assert SamplingParams(seed=5).each() == [SamplingParams(seed=5)]
