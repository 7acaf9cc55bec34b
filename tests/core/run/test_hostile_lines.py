"""Any line of a prompts file is a request or refused in one line, and the other lines are read."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.errors import HooklineError
from hookline.core.request_options import LINE_KEYS
from hookline.core.run.prompts import read_prompts
from hookline.core.sampling_params import SamplingParams
from tests.fuzzing import examples

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["${oc.env:HOME}", "\x1b[31m", 10**400, 2**63, "x" * 5000])
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
KEYS = ["prompt", "messages", "prompt_token_ids", "n", "stop", "logit_bias", "max_tokens", "extra_args", *LINE_KEYS]
OBJECTS = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), ANYTHING, max_size=4)
LINES = st.one_of(
    OBJECTS.map(lambda values: json.dumps({"prompt": "a", **values}).encode()),
    OBJECTS.map(lambda values: json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.tuples(OBJECTS, st.integers(0, 60)).map(lambda pair: json.dumps(pair[0]).encode()[: pair[1]]),
    st.binary(max_size=20),
    st.sampled_from([b"[" * 100_000, b'{"prompt": ' * 3000, b'{"n": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}", b"NaN"]),
)
GOOD = b'{"prompt": "good"}'


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(lines=st.lists(LINES, min_size=1, max_size=3), suffix=st.sampled_from([".jsonl", ".txt"]))
def test_any_line_is_a_request_or_refused_in_one_line(tmp_path_factory, lines, suffix):
    path = tmp_path_factory.getbasetemp() / f"hostile{suffix}"
    path.write_bytes(b"\n".join([GOOD, *lines, GOOD]))
    try:
        read = read_prompts({"prompts_file": str(path)}, SamplingParams())
    except HooklineError as error:
        pytest.fail(f"one bad line ends the whole file: {error}")
    for line in read:
        assert not line.error or (len(line.error) < 4000 and line.error.isprintable())
    good = [line.prompt for line in read if not line.error]
    expected = "good" if suffix == ".jsonl" else GOOD.decode()
    assert good[0] == good[-1] == expected
