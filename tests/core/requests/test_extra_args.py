"""Arguments of a request that are hostile: refused in one line, quickly, without a look at the environment."""

import io
import json
import os
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hookline.core.contracts import LogitsProcessor, RequestFacts
from hookline.core.errors import ConfigError, RequestError
from hookline.core.plugin.registry import PROCESSOR, Entry, Origin
from hookline.core.requests.step_extensions import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_VALUES,
    InstalledExtensions,
    refuse_oversized,
)
from hookline.core.run.prompts import read_prompts
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.arrays import ints
from tests.fuzzing import examples

FACTS = RequestFacts(3, 1.0, frozenset(), 50)
MARKER, SECRET = "HOOKLINE_TEST_MARKER", "the-value-of-the-marker"
RESOLVING = f"${{oc.env:{MARKER}}}"


@dataclass
class Inner:
    text: str = ""
    number: int = 0


@dataclass
class Arguments:
    n: float = 0.0
    count: int = 0
    flag: bool = False
    text: str = ""
    words: list[str] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


class Takes(LogitsProcessor):
    """Encodes how long its texts are, so that all of its arguments are looked at."""

    def __init__(self, spec):
        self.spec = spec

    def process(self, logits_NV, rows):
        return logits_NV

    @staticmethod
    def encode(arguments, facts):
        assert SECRET not in repr(arguments)
        return ints([len(word) for word in arguments.words])

    def load(self, row, values):
        pass


@pytest.fixture(autouse=True)
def marker():
    os.environ[MARKER] = SECRET
    yield
    del os.environ[MARKER]


def installed():
    origin = Origin("theirs", "m", "their-dist", "1")
    return InstalledExtensions.of(
        [Entry(PROCESSOR, "taker", "tests.core.requests.test_extra_args:Takes", origin, Arguments)]
    )


def refusal(extra_args):
    with pytest.raises(RequestError) as caught:
        installed().prepare(SamplingParams(extra_args=extra_args).resolved({}), FACTS)
    return str(caught.value)


def nested(depth, value=1):
    for _ in range(depth):
        value = [value]
    return value


def test_the_environment_is_not_read_for_a_request():
    assert refusal({"taker": {"n": RESOLVING}}) == f"sampling.extra_args.taker.n='{RESOLVING}' is not a float"
    params = SamplingParams(extra_args={"taker": {"words": [RESOLVING], "text": RESOLVING}}).resolved({})
    assert installed().prepare(params, FACTS).records[0][1].tolist()[-1] == len(RESOLVING)


def test_a_missing_mark_is_an_error_that_names_the_key():
    assert refusal({"taker": {"n": "???"}}).startswith("sampling.extra_args.taker.n='???' stands for a value that is")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": {"a": nested(100_000)}}, f"nested deeper than {MAX_DEPTH} levels"),
        ({"text": "x" * 10_000_000}, f"holds more than {MAX_CHARACTERS} characters"),
        ({"x" * 10_000_000: 1}, f"holds more than {MAX_CHARACTERS} characters"),
        ({"table": {"a": [1] * 10_000_000}}, f"holds more than {MAX_VALUES} values"),
        ({"count": 2 ** (3 * MAX_CHARACTERS)}, f"holds more than {MAX_CHARACTERS} characters"),
        ({"count": 10**30}, "is too large; an int must fit into 64 bits"),
        ({"n": 1e300}, "is too large; an int must fit into 64 bits and a float into 32"),
        ({"a\nb": 1}, "unknown key 'sampling.extra_args.taker.a\\nb'"),
        ({"y" * 60_000: 1}, "unknown key 'sampling.extra_args.taker.yyy"),
        ({"n": "z" * 60_000}, "sampling.extra_args.taker.n='zzz"),
        ({"n": "${" * 30_000}, "sampling.extra_args.taker.n='${${"),
    ],
    ids=range(11),
)
def test_hostile_arguments_are_refused_in_one_short_line_and_quickly(arguments, message):
    started = time.process_time()
    refused = refusal({"taker": arguments})
    assert time.process_time() - started < 1
    assert message in refused and refused.isprintable() and len(refused) < 1000
    if "too large" not in message:
        with pytest.raises(RequestError):
            installed().check(SamplingParams(extra_args={"taker": arguments}))


def test_arguments_at_the_limits_are_taken():
    refuse_oversized({"a": {"b": nested(MAX_DEPTH - 2)}})
    refuse_oversized({"a": {"b": "x" * (MAX_CHARACTERS - 2)}})
    refuse_oversized({"a": {"b": [None] * (MAX_VALUES - 2)}})
    for over in (nested(MAX_DEPTH - 1), "x" * (MAX_CHARACTERS - 1), [None] * (MAX_VALUES - 1)):
        with pytest.raises(RequestError):
            refuse_oversized({"a": {"b": over}})


TEXTS = st.sampled_from(
    [
        RESOLVING,
        f"a\\{RESOLVING}",
        "${",
        "${${}}",
        "???",
        "${taker}",
        "a\nb",
        "\x1b[2J",
        "⟦text 0⟧",
        "⟦text 99⟧",
        "1",
        "true",
        "x" * 500,
    ]
) | st.text(max_size=20)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from([10**30, 10**400, 1e300])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
) | st.sampled_from([nested(MAX_DEPTH - 2), nested(MAX_DEPTH + 1), [0] * (MAX_VALUES + 1), "x" * (MAX_CHARACTERS + 1)])
MEANT = {
    "n": st.floats(allow_nan=False, width=32) | LEAVES,
    "count": st.integers(-9, 9) | LEAVES,
    "flag": st.booleans(),
    "text": TEXTS,
    "words": st.lists(TEXTS, max_size=3),
    "table": st.dictionaries(TEXTS, VALUES, max_size=3),
    "inner": st.fixed_dictionaries({}, optional={"text": TEXTS, "number": st.integers(-9, 9)}) | VALUES,
}
"""Values of mostly the right type, so that about half of all arguments are accepted."""
FIELDS = st.sampled_from([*MEANT]) | TEXTS
EXTRA_ARGS = st.one_of(
    st.fixed_dictionaries({"taker": st.fixed_dictionaries({}, optional=MEANT)}),
    st.fixed_dictionaries({"taker": st.dictionaries(FIELDS, VALUES, max_size=4)}),
    st.dictionaries(st.just("taker") | TEXTS, st.dictionaries(FIELDS, VALUES, max_size=4) | VALUES, max_size=2),
)
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
FUZZ = settings(max_examples=examples(500), deadline=None)


def outcome(call, *errors):
    """None, or the error, if it is one of these; looks at what was printed too."""
    out, refused = io.StringIO(), None
    with redirect_stdout(out), redirect_stderr(out):
        try:
            call()
        except errors as error:
            refused = str(error)
    assert SECRET not in out.getvalue()
    if refused is not None:
        assert SECRET not in refused and "\n" not in refused and refused.isprintable()
        assert len(refused) < 2000
    return refused


@pytest.mark.slow
@FUZZ
@given(EXTRA_ARGS)
@example({"taker": {"n": RESOLVING}})
@example({"taker": {"table": {"a": RESOLVING}}})
def test_any_extra_args_are_accepted_or_refused_in_one_line(extra_args):
    taken = {name: value for name, value in extra_args.items() if isinstance(value, dict)}
    one, params = installed(), SamplingParams(extra_args=taken).resolved({})
    checked = outcome(lambda: one.check(params), RequestError)
    prepared = outcome(lambda: one.prepare(params, FACTS), RequestError)
    assert checked is None or prepared == checked


@pytest.mark.slow
@FUZZ
@given(EXTRA_ARGS, st.sampled_from([0, 0, 0, 20, 900, 100_000]))
def test_any_line_of_a_prompts_file_is_accepted_or_refused_in_one_line(tmp_path_factory, extra_args, depth):
    line = json.dumps({"prompt": "a", "extra_args": {name: v for name, v in extra_args.items() if isinstance(v, dict)}})
    if depth:
        line = line.replace(
            '"extra_args": {', '"extra_args": {"taker": {"table": {"a": ' + "[" * depth + "]" * depth + "}},"
        )
        line = line.replace(",}}", "}}")
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_text(line)

    def run():
        one = installed()
        for read in read_prompts({"prompts_file": str(path)}, SamplingParams()):
            one.check(read.params)
            one.prepare(read.params.resolved({}), FACTS)

    outcome(run, RequestError, ConfigError)
