"""Whatever a chat template does with whatever messages: a text of bounded size, or an error in one line, in time."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.errors import RequestError
from hookline.core.tokenizer import chat_templates
from hookline.core.tokenizer.chat_templates import rendered, size_fault
from tests.core.tokenizer.test_text_limits import codec
from tests.fuzzing import examples

# Hypothesis watches collections of garbage, and what breaks off a template may strike there; then it comes once more.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored .*gc_callback:pytest.PytestUnraisableExceptionWarning"
)

TIMEOUT_S, MAX_BYTES, MAX_CHARACTERS = 0.2, 2**27, 2**20
NAMES = st.sampled_from(
    ["messages", "messages[0]", "messages[-1].content", "messages[7].x.y", "tools", "nobody", "ns.x", "loop.index",
     "''.__class__", "messages.__class__.__mro__", "cycler.__init__.__globals__", "self", "namespace", "range(9)",
     "range(10**9)", "'a' * 99", "'%9d' % 3", "9 ** 9", "99999999999 * 'a'", "messages|tojson", "'a'|center(99999)",
     "raise_exception('\x1b[31mno')", "strftime_now('%Y')", "lipsum(n=3)", "m()", "ns.x ~ ns.x", "1 / 0", "none.x"]
)  # fmt: skip
OPENINGS = {
    "{% for i in range(99999) %}": "{% endfor %}",
    "{% for one in messages %}": "{% endfor %}",
    "{% if messages %}": "{% endif %}",
    "{% macro m() %}": "{% endmacro %}",
    "{% set ns = namespace(x='ab') %}": "",
    "{% generation %}": "{% endgeneration %}",
    "{% filter upper %}": "{% endfilter %}",
    "{% call m() %}": "{% endcall %}",
    "{% include 'x' %}": "",
    "{% import os %}": "",
    "{{": "",
    "{% set ns.x = ns.x ~ ns.x %}": "",
    "{% break %}": "",
    "{#": "#}",
}
EXPRESSIONS = st.builds("{{{{ {} }}}}".format, NAMES)
TEMPLATES = st.recursive(
    st.one_of(st.text(max_size=8), EXPRESSIONS),
    lambda inner: st.builds(
        lambda opening, parts: opening + "".join(parts) + OPENINGS[opening],
        st.sampled_from(sorted(OPENINGS)),
        st.lists(inner, max_size=3),
    ),
    max_leaves=6,
)
VALUES = st.one_of(st.none(), st.text(max_size=9), st.integers(), st.lists(st.text(max_size=3), max_size=2))
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "reasoning", "x"]), VALUES, max_size=4),
    max_size=3,
)
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


@pytest.fixture(scope="module", autouse=True)
def tight():
    """Bounds that are soon reached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_templates, "TIMEOUT_S", TIMEOUT_S)
        patch.setattr(chat_templates, "MAX_BYTES", MAX_BYTES)
        patch.setattr(chat_templates, "MAX_CHARACTERS", MAX_CHARACTERS)
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return codec(max_len=None).tokenizer


def outcome(tokenizer, template, messages, **options):
    """The text, or the line of the error."""
    tokenizer.chat_template = template
    started = time.process_time()
    try:
        text = rendered(tokenizer, messages, options)
    except RequestError as error:
        line = str(error)
        assert 0 < len(line) < 1500 and line.isprintable() and "Traceback" not in line
        return None, line
    finally:
        assert time.process_time() - started < 2 * chat_templates.TIMEOUT_S + 18 * TIMEOUT_S
    assert isinstance(text, str) and len(text) <= MAX_CHARACTERS
    return text, ""


# What breaks a template off may strike in Hypothesis's own callback of the garbage collector, which only prints it; the
# template is broken off once more then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(template=TEMPLATES, messages=MESSAGES, adds=st.booleans())
def test_any_template_ends_in_a_bounded_text_or_one_line(tokenizer, template, messages, adds):
    outcome(tokenizer, template, messages, add_generation_prompt=adds)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (DOUBLING, "MemoryError: it takes more than 128 MiB"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "not done after 0.2 s"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "it makes more than 1048576 characters"),
        ("{% for i in range(99999) %}{{ 'a'|center(99999) }}{% endfor %}", "it makes more than 1048576 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ 'a' * 300000000 }}", "is refused: it has the number 300000000, and the largest that may be is 1000000"),
        ("{{ 1e99 }}", "it has the number 1e99"),
        ("{{ '%0300000000d' % 1 }}", "it formats to a width above 1000000"),
        ("{{ '{:>300000000}'.format(1) }}", "it formats to a width above 1000000"),
        ("{{ 9 ** 9 ** 9 }}", "it has a power, x ** y"),
        ("{{ raise_exception('\x1b[31mno') }}", r"TemplateError: \x1b[31mno"),
        ("{{ messages[7].x.y }}", "UndefinedError"),
        ("{% include 'x' %}", "no loader for this environment"),
    ],
)
def test_what_has_no_end_or_bound_is_refused_by_name(tokenizer, template, message, monkeypatch):
    if template == DOUBLING:
        monkeypatch.setattr(chat_templates, "TIMEOUT_S", 5.0)  # a busy machine reaches the time before the memory
    text, line = outcome(tokenizer, template, [{"role": "user", "content": "hi"}])
    assert text is None and message in line


@pytest.mark.parametrize(
    "template",
    ["{{ dict(**{}) }}{{ f(1, **x) }}", "{{ 1_000_000 }} {{ 0.5 }}", "{# 99999999 #}99999999 ** 2", "{{ '20240726' }}"],
)
def test_what_real_templates_may_have_is_no_fault(template):
    assert size_fault(template) == ""
