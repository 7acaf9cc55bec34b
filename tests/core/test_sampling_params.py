"""SamplingParams: every invalid value is one line that names the field, the value and the range."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.errors import RequestError
from hookline.core.outputs import FinishReason, RequestOutput, TokenLogprob, merge_completions
from hookline.core.sampling_params import SamplingParams, generation_defaults
from tests.fuzzing import examples

HUGE = 10**400
"""Too large for a float."""
UNWRITABLE = 10**5000
"""Python refuses to write it out."""
NESTED = [7]
for _ in range(100_000):
    NESTED = [NESTED]


def refusal(make):
    """The message of a RequestError: one line, and not too long, whatever was refused."""
    with pytest.raises(RequestError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000 and message.encode()
    return message


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
        ({"bad_words": [""]}, "sampling.bad_words[0] is an empty word"),
        ({"bad_words": ["a", []]}, "sampling.bad_words[1] is an empty word"),
        (
            {"bad_words": ["a", "\n"]},
            r"sampling.bad_words[1]='\n' is white space alone; give the token ids of such a word",
        ),
        ({"bad_words": [3]}, "sampling.bad_words=3 must be a list of token ids"),
        ({"logprobs": 21}, "sampling.logprobs=21 must be between 0 and 20"),
        ({"logprobs": True}, "sampling.logprobs=True must be a whole number"),
        ({"prompt_logprobs": -1}, "sampling.prompt_logprobs=-1 must be between 0 and 20"),
        ({"extra_args": [1]}, "sampling.extra_args=[1] must be a mapping of extensions to their arguments"),
        ({"extra_args": {"x": 1}}, "sampling.extra_args.x=1 must be a mapping of the extension's arguments"),
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
    with pytest.raises(RequestError, match=r"unknown key 'sampling.temprature'. Did you mean 'sampling.temperature'\?"):
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


def test_what_defaults_make_of_parameters_is_kept_for_the_same_defaults_alone():
    params, defaults = SamplingParams(top_k=0), {"temperature": 0.6}
    resolved = params.resolved(defaults)
    assert params.resolved(defaults) is resolved and resolved.resolved({"temperature": 0.1}) is resolved
    assert params.resolved({"temperature": 0.1}).temperature == 0.1 and params.temperature is None
    assert params.resolved(defaults).temperature == 0.6 and params == SamplingParams(top_k=0)
    several = SamplingParams(n=2)
    assert several.resolved(defaults).n == 2 and several.each()[1].resolved(defaults).n == 1


def test_minus_one_means_all_tokens_and_json_keys_may_be_texts():
    params = SamplingParams(top_k=-1, logit_bias={"7": 1})
    assert params.top_k == 0 and params.logit_bias == {7: 1.0}


def test_null_in_the_configuration_means_none_of_it():
    assert SamplingParams.of({"logit_bias": None, "extra_args": None, "top_p": None}) == SamplingParams()


def test_do_sample_false_in_a_generation_config_means_greedy():
    assert generation_defaults({"do_sample": False, "temperature": 0.7, "top_k": None}, "x") == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 10**40 - 1}, f"sampling.top_p={10**40 - 1} must be a number above 0 and at most 1"),
        ({"top_p": HUGE}, "sampling.top_p=<whole number of about 400 digits> must be a number above 0 and at most 1"),
        ({"temperature": HUGE}, "digits> must be a finite number of at least 0"),
        ({"temperature": -UNWRITABLE}, "<whole number of about 5000 digits> must be a finite number"),
        ({"repetition_penalty": HUGE}, "must be a finite number above 0"),
        ({"frequency_penalty": UNWRITABLE}, "must be a number between -2 and 2"),
        (
            {"logit_bias": {3: HUGE}},
            "sampling.logit_bias[3]=<whole number of about 400 digits> must be a finite number",
        ),
        ({"logit_bias": {"9" * 5000: 1}}, "must be a whole number"),
        (
            {"logit_bias": {UNWRITABLE: 1}},
            "sampling.logit_bias key=<whole number of about 5000 digits> must be at most",
        ),
        ({"top_k": 2**63}, "sampling.top_k=9223372036854775808 must be at most 2**63-1"),
        ({"max_tokens": UNWRITABLE}, "sampling.max_tokens=<whole number of about 5000 digits> must be at most 2**63-1"),
        ({"min_tokens": UNWRITABLE}, "sampling.min_tokens=<whole number"),
        ({"seed": UNWRITABLE}, "must be between 0 and 9223372036854775807"),
        ({"n": -UNWRITABLE}, "must be between 1 and 1024"),
        ({"stop_token_ids": [UNWRITABLE]}, "must be at most 2**63-1"),
        ({"allowed_token_ids": [1, HUGE]}, "must be at most 2**63-1"),
        ({"bad_words": [[HUGE]]}, "must be at most 2**63-1"),
        ({"temperature": 1e39}, "sampling.temperature=1e+39 must be a finite number of at least 0 as a float32"),
        ({"repetition_penalty": 1e-60}, "must be a finite number above 0 as a float32"),
        ({"stop": NESTED}, "must be a text or a list of texts"),
        ({"bad_words": NESTED}, "must be a whole number"),
        ({"extra_args": {"\ud800\n": 1}}, "must be a mapping of the extension's arguments"),
    ],
)
def test_numbers_of_any_size_and_lists_of_any_depth_are_refused_in_one_line(values, message):
    assert message in refusal(lambda: SamplingParams(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": ["x"] * 1_000_000}, "sampling.stop has 1000000 texts; at most 1024 are allowed"),
        ({"stop": "x" * 50_000}, "sampling.stop has 50000 characters in all; at most 16384 are allowed"),
        ({"stop_token_ids": range(149_000)}, "sampling.stop_token_ids has more than 4096 token ids"),
        ({"allowed_token_ids": range(2**20 + 1)}, "sampling.allowed_token_ids has more than 1048576 token ids"),
        ({"logit_bias": dict.fromkeys(range(20_000), 1.0)}, "sampling.logit_bias has 20000 tokens; at most 16384 are"),
        ({"bad_words": ["x" * 5_000_000]}, "sampling.bad_words has 5000000 characters in all; at most 16384 are"),
        ({"bad_words": ["x"] * 1025}, "sampling.bad_words has more than 1024 words"),
        ({"bad_words": [range(10_000), range(10_000)]}, "sampling.bad_words has 20000 ids in all; at most 16384 are"),
        ({"x" * 100_000: 1}, "unknown key 'sampling.xxx"),
    ],
)
def test_more_than_a_request_may_ask_for_is_refused_with_the_limit(values, message):
    assert message in refusal(lambda: SamplingParams.of(values))


def test_what_honest_clients_ask_for_is_far_inside_the_limits():
    SamplingParams(
        stop=[f"stop {n}" for n in range(200)],
        stop_token_ids=range(3000),
        logit_bias=dict.fromkeys(range(4000), -1.0),
        allowed_token_ids=range(262_144),
        bad_words=[f"word {n}" for n in range(500)],
    )


def test_a_top_k_beyond_any_vocabulary_fits_an_int32():
    assert SamplingParams(top_k=10**18).top_k == 2**31 - 1


def test_completions_and_defaults_cost_no_further_checks(monkeypatch):
    params = SamplingParams(n=100, stop=["x"], allowed_token_ids=range(1000))
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: pytest.fail("checked again"))
    several = params.each()
    assert all(one.allowed_token_ids is params.allowed_token_ids for one in several)
    assert all(one.stop_strings is several[0].stop_strings for one in several)
    assert several[0].resolved({"top_k": 5}).processed_fields == ("top_k", "allowed_token_ids")


ODD = {
    "huge": HUGE,
    "-huge": -HUGE,
    "unwritable": UNWRITABLE,
    "-unwritable": -UNWRITABLE,
    "digits": "9" * 5000,
    "nested": NESTED,
    "surrogate": "\ud800\n",
    "int32": 2**31,
    "int64": 2**63,
    "float64": np.float64(0.5),
    "float32": np.float32(0.5),
    "numpy": np.int64(3),
    "no dimensions": np.array(3),
    "array": np.arange(3),
    "complex": 1j,
    "object": object(),
    "type": int,
}
"""By name: Hypothesis could not write some of them out."""


def odd(name):
    return ODD[name]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(sorted(ODD)).map(odd)
)
KEYS = (
    st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["unwritable", "digits"]).map(odd)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.tuples(below) | st.dictionaries(KEYS, below, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(name=st.sampled_from([field.name for field in fields(SamplingParams)]), value=ANYTHING)
def test_any_value_of_any_field_is_accepted_or_refused_in_one_line(name, value):
    try:
        params = SamplingParams.of({name: value})
    except RequestError:
        refusal(lambda: SamplingParams.of({name: value}))
    else:
        assert params.resolved({}).top_k is not None
        assert all(one.n == 1 for one in params.each())


def test_the_first_of_n_completions_alone_scores_the_prompt_and_all_are_given_its_scores() -> None:
    params = SamplingParams(n=3, prompt_logprobs=2, logprobs=1, seed=5)
    assert [(one.prompt_logprobs, one.logprobs) for one in params.each()] == [(2, 1), (None, 1), (None, 1)]
    scores = [None, TokenLogprob(1, -0.5)]
    made = [RequestOutput(index, None, [1, 2], [3], FinishReason.STOP, index=index) for index in (2, 0, 1)]
    made[1].prompt_logprobs = scores
    merged = merge_completions(made)
    assert [one.prompt_logprobs for one in merged.completions] == [scores] * 3
    assert len({id(one.prompt_logprobs) for one in merged.completions}) == 3
