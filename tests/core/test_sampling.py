"""SamplingParams: every invalid value is one line that names the field, the value and the range."""

import pytest

from core.errors import RequestError
from core.sampling import SamplingParams, generation_defaults


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
        ({"temperature": float("inf")}, "sampling.temperature=inf must be a finite number of at least 0"),
        ({"top_k": -2}, "sampling.top_k=-2 must be at least -1"),
        ({"top_k": 1.5}, "sampling.top_k=1.5 must be a whole number"),
        ({"top_p": 0}, "sampling.top_p=0 must be a number above 0 and at most 1"),
        ({"top_p": 1.2}, "sampling.top_p=1.2 must be a number above 0 and at most 1"),
        ({"top_p": True}, "sampling.top_p=True must be a number above 0"),
        ({"min_p": -0.1}, "sampling.min_p=-0.1 must be a number between 0 and 1"),
        ({"min_p": "x"}, "sampling.min_p='x' must be a number between 0 and 1"),
        ({"repetition_penalty": 0}, "sampling.repetition_penalty=0 must be a finite number above 0"),
        ({"presence_penalty": 2.5}, "sampling.presence_penalty=2.5 must be a number between -2 and 2"),
        ({"frequency_penalty": -3}, "sampling.frequency_penalty=-3 must be a number between -2 and 2"),
        ({"frequency_penalty": None}, "sampling.frequency_penalty=None must be a number between -2 and 2"),
        ({"logit_bias": [1]}, "sampling.logit_bias=[1] must be a mapping of token ids to numbers"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias key=-1 must be at least 0"),
        ({"logit_bias": {"x": 1.0}}, "sampling.logit_bias key='x' must be a whole number"),
        ({"logit_bias": {3: float("nan")}}, "sampling.logit_bias[3]=nan must be a finite number"),
        ({"allowed_token_ids": []}, "sampling.allowed_token_ids=[] allows no token; null allows all"),
        ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids=-1 must be at least 0"),
        ({"bad_words": "foo"}, "sampling.bad_words='foo' must be a list of texts or of lists of token ids"),
        ({"bad_words": [""]}, "sampling.bad_words=[''] holds an empty word"),
        ({"bad_words": [[]]}, "sampling.bad_words=[[]] holds an empty word"),
        ({"bad_words": [3]}, "sampling.bad_words=3 must be a list of token ids"),
        ({"logprobs": 21}, "sampling.logprobs=21 must be between 0 and 20"),
        ({"logprobs": True}, "sampling.logprobs=True must be a whole number"),
        ({"prompt_logprobs": -1}, "sampling.prompt_logprobs=-1 must be between 0 and 20"),
        ({"extra_args": [1]}, "sampling.extra_args=[1] must be a mapping of processors to their arguments"),
        ({"extra_args": {"x": 1}}, "sampling.extra_args.x=1 must be a mapping of the processor's arguments"),
    ],
)
def test_an_invalid_value_is_named_with_its_range(values, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_bias_has_no_range_but_must_be_finite():
    with pytest.raises(RequestError, match=r"sampling.logit_bias\[3\]=inf must be a finite number$"):
        SamplingParams(logit_bias={3: float("inf")})


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


def test_what_is_open_takes_the_defaults_and_then_what_changes_nothing():
    params = SamplingParams(top_k=0, min_p=0.5).resolved({"temperature": 0.6, "top_k": 20, "min_p": 0.1})
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 0, 1.0, 0.5)
    assert params.processed_fields == ("min_p",)


def test_minus_one_means_all_tokens_and_json_keys_may_be_texts():
    params = SamplingParams(top_k=-1, logit_bias={"7": 1})
    assert params.top_k == 0 and params.logit_bias == {7: 1.0}


def test_null_in_the_configuration_means_none_of_it():
    assert SamplingParams.of({"logit_bias": None, "extra_args": None, "top_p": None}) == SamplingParams()


def test_do_sample_false_in_a_generation_config_means_greedy():
    assert generation_defaults({"do_sample": False, "temperature": 0.7, "top_k": None}, "x") == {"temperature": 0.0}
