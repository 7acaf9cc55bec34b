"""llguidance as a grammar back end: the suite, and what is its own."""

import random
import resource
from dataclasses import replace

import numpy as np
import pytest

from hookline.core.contracts import GrammarVocabulary, StructuredOutputs
from hookline.core.errors import RequestError
from hookline.core.testing.grammar_suite import GrammarSuite
from hookline.core.testing.plain_grammar import small_vocabulary
from hookline.core.util.arrays import num_mask_words
from hookline.plugins.grammars import LLGuidanceConfig, llguidance_backend
from hookline.plugins.grammars.llguidance_backend import LLGuidance
from hookline.plugins.grammars.quickest import Quickest
from hookline.plugins.grammars.shortest import shortest_text
from hookline.plugins.grammars.trial import is_plain

VOCABULARY = small_vocabulary()
WANTED = StructuredOutputs(json={"type": "array", "items": {"enum": ["x", 7]}})


class TestLLGuidance(GrammarSuite):
    def make(self, vocabulary: GrammarVocabulary) -> LLGuidance:
        return LLGuidance(LLGuidanceConfig(num_threads=1), vocabulary)


SLOW = (
    {"regex": "(((a{100}){100}){100}){100}1"},
    {"json": {"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"}},
    {"json": {"type": "integer", "multipleOf": 9_999_991, "minimum": 0, "maximum": 10**300}},
    {"json": {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{size}}}|.*b)$"} for size in range(3, 40)]}},
    {"grammar": "start: A\nA: /(((a{100}){100}){100}){100}/\n"},
    {
        "structural_tag": {
            "structures": [{"begin": "<t>", "schema": {"multipleOf": 9_999_991}, "end": ""}],
            "triggers": ["<"],
        }
    },
)


@pytest.fixture(scope="module")
def trying():
    return LLGuidance(LLGuidanceConfig(num_threads=1), small_vocabulary())


@pytest.mark.slow
@pytest.mark.parametrize("wanted", SLOW)
def test_a_grammar_that_compiles_for_minutes_or_takes_gigabytes_is_refused(wanted, trying):
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(RequestError, match=r"more than 0.75 s of processor time, or more than 64 MiB; make it smaller"):
        trying.compile(StructuredOutputs(**wanted))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 20 * 1024  # in KiB


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [1, "x"]}}}},
        {"json": {"anyOf": [{"type": "string", "pattern": r"^\d{4}-\d{2}$"}, {"type": "string", "maxLength": 9}]}},
        {"json": {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 9, "title": "numbers"}},
        {"regex": r"\d{1,3}(\.\d{1,3}){3}"},
        {"choice": ("yes", "no")},
        {"grammar": 'root ::= ("x" | "y") "z"?\n'},
        {
            "structural_tag": {
                "structures": [{"begin": "<t>", "schema": {"type": "null"}, "end": ""}],
                "triggers": ["<"],
            }
        },
    ],
)
def test_a_plain_grammar_needs_no_trial(wanted):
    assert is_plain(StructuredOutputs(**wanted))


@pytest.mark.parametrize(
    "wanted",
    [
        *SLOW,
        {"json": {"$ref": "#/$defs/a", "anyOf": [{"type": "string"}], "$defs": {"a": {"type": "string"}}}},
        {"json": {"type": "string", "pattern": "a.{3}b", "maxLength": 100}},
        {"json": {"type": "object", "properties": {"a": {"items": [{"not": {}}]}}}},
        {"json": {"properties": 3}},
        {"regex": "(a|b)*c" * 100},
        {"grammar": "start: A & B\nA: /a*/\nB: /.*/\n"},
        {"grammar": 'start: a~1..100000\na: "x"\n'},
        {"structural_tag": {"structures": 3}},
        {"structural_tag": {"structures": [{"begin": "<t>"}]}},
    ],
)
def test_other_grammars_are_tried(wanted):
    assert not is_plain(StructuredOutputs(**wanted))


def test_what_a_trial_finds_wrong_is_told_as_without_it(trying):
    wanted = StructuredOutputs(regex="(ab" + "{1,3}" * 30)
    told = []
    for backend in (trying, LLGuidance(LLGuidanceConfig(num_threads=1), VOCABULARY, tries=False)):
        with pytest.raises(RequestError) as refused:
            backend.compile(wanted)
        told.append(str(refused.value))
    assert not is_plain(wanted) and told[0] == told[1]


def test_a_grammar_that_was_tried_allows_what_it_does_without_a_trial(trying):
    wanted = StructuredOutputs(json={"oneOf": [{"type": "integer", "multipleOf": 7}, {"const": "x"}]})
    words = num_mask_words(len(VOCABULARY.tokens))
    masks = np.zeros((2, words), dtype=np.int32)
    for row, backend in enumerate((trying, LLGuidance(LLGuidanceConfig(num_threads=1), VOCABULARY, tries=False))):
        backend.compile(wanted).matcher().fill(masks[row])
    assert not is_plain(wanted) and (masks[0] == masks[1]).all() and masks.any()


@pytest.mark.slow
def test_the_process_of_trials_is_begun_again_after_its_end_and_ends_with_its_back_end():
    backend = LLGuidance(LLGuidanceConfig(num_threads=1), small_vocabulary())
    wanted = StructuredOutputs(json={"type": "integer", "multipleOf": 7})
    processes = []
    for _ in range(2):
        backend.compile(wanted)
        process = backend._trials._end.peek()[2][1]
        processes.append(process)
        process.kill()
        process.wait()
    backend.compile(wanted)
    process = backend._trials._end.peek()[2][1]
    assert process.poll() is None and process not in processes
    del backend
    assert process.poll() is not None


@pytest.fixture(scope="module")
def threaded():
    """A back end with three threads."""
    return LLGuidance(LLGuidanceConfig(num_threads=3), small_vocabulary())


@pytest.mark.parametrize("wanted", [{"regex": "a{100000}"}, {"json": {"const": "a" * 120_000}}])
def test_of_a_long_forced_text_a_step_tokenizes_the_beginning(wanted, monkeypatch):
    monkeypatch.setattr(llguidance_backend, "MOST_FORCED", 16)
    vocabulary, lengths = small_vocabulary(), []

    def encode(text):
        lengths.append(len(text))
        return vocabulary.encode(text)

    matcher = (
        LLGuidance(LLGuidanceConfig(num_threads=1), replace(vocabulary, encode=encode))
        .compile(StructuredOutputs(**wanted))
        .matcher()
    )
    text = ""
    while len(text) < 3 * llguidance_backend.MOST_FORCED:
        mask_W = np.zeros(num_mask_words(len(vocabulary.tokens)), dtype=np.int32)
        matcher.fill(mask_W)
        (token_id, *_) = [one for one in range(len(vocabulary.tokens)) if mask_W[one // 32] >> one % 32 & 1]
        assert matcher.advance([token_id])
        text += vocabulary.tokens[token_id].decode()
    assert set(text.strip('"')) == {"a"} and 0 < max(lengths) <= llguidance_backend.MOST_FORCED


@pytest.mark.parametrize(
    ("regex", "allowed"),
    [(r"\d", "5"), (r"\w", "5xX_"), (r"[\d.]", "5."), (r"[^\d]", "xX_.é🯸"), (r"\D", "xX_.é🯸"), (r"\W", ".é🯸")],
)
def test_digits_and_words_of_a_regex_are_ascii(regex, allowed):
    backend = LLGuidance(LLGuidanceConfig(num_threads=1), small_vocabulary())
    for character in "5xX_.é🯸":
        matcher = backend.compile(StructuredOutputs(regex=regex)).matcher()  # its first 256 tokens are the bytes
        assert matcher.advance(list(character.encode())) is (character in allowed)


def test_a_parser_s_panic_is_its_own_fault_and_one_line():
    vocabulary = small_vocabulary()

    def encode(text):
        raise ValueError("odd")

    backend = LLGuidance(LLGuidanceConfig(num_threads=1), replace(vocabulary, encode=encode))
    with pytest.raises(RuntimeError, match=r"^panic: .*odd") as caught:
        backend.compile(StructuredOutputs(regex="abcabcabc")).matcher().fill(np.zeros(64, dtype=np.int32))
    assert "\n" not in str(caught.value)


def test_requests_of_one_grammar_are_spread_over_as_many_parsers_as_there_are_threads(threaded, monkeypatch):
    monkeypatch.setattr(llguidance_backend, "PARSERS_S", 1000.0)
    grammar, other = threaded.compile(WANTED), threaded.compile(WANTED)
    lanes = [grammar.matcher().lane for _ in range(7)]
    assert len(set(lanes)) == 3 and lanes[:3] == lanes[3:6]
    assert other.matcher().lane not in lanes
    assert grammar.num_bytes > 3 * llguidance_backend.BASE_BYTES


def test_a_grammar_that_is_slow_to_compile_has_one_parser(threaded, monkeypatch):
    monkeypatch.setattr(llguidance_backend, "PARSERS_S", 0.0)
    grammar = threaded.compile(WANTED)
    assert len({grammar.matcher().lane for _ in range(4)}) == 1


def test_masks_filled_at_once_are_those_filled_one_by_one(threaded, monkeypatch):
    monkeypatch.setattr(llguidance_backend, "PARSERS_S", 1000.0)
    grammars = [threaded.compile(WANTED), threaded.compile(StructuredOutputs(regex="(ab|c){2,9}"))]
    pairs = [(grammars[row % 2].matcher(), grammars[row % 2].matcher()) for row in range(11)]
    rng, num_words = random.Random(0), threaded.mask_bytes // 4
    for _ in range(12):
        at_once = np.zeros((len(pairs), num_words), dtype=np.int32)
        threaded.fill([one for one, _ in pairs], at_once)
        for (one, other), mask_W in zip(pairs, at_once, strict=True):
            alone = np.zeros(num_words, dtype=np.int32)
            other.fill(alone)
            assert (mask_W == alone).all()
            token_id = rng.choice([token for token in range(32 * num_words) if alone[token // 32] >> token % 32 & 1])
            if not one.is_terminated:
                assert one.advance([token_id]) and other.advance([token_id])


def test_sorting_the_vocabulary_by_more_lengths_changes_no_mask(monkeypatch):
    wanted = StructuredOutputs(json={"type": "string", "maxLength": 9})
    general, ours = llguidance_backend.LLTokenizer.general_slices(), llguidance_backend._slices(r"[ \t]")
    assert set(general[1:]) < set(ours[1:])
    backends = []
    for slices in (general, ours):
        monkeypatch.setattr(llguidance_backend, "_slices", lambda white_space, slices=slices: slices)
        backends.append(LLGuidance(LLGuidanceConfig(num_threads=1), VOCABULARY))
    matchers = [backend.compile(wanted).matcher() for backend in backends]
    for text in '"abcdefghi"':
        masks = np.zeros((2, backends[0].mask_bytes // 4), dtype=np.int32)
        for matcher, mask_W in zip(matchers, masks, strict=True):
            matcher.fill(mask_W)
        assert (masks[0] == masks[1]).all() and masks[0].any()
        assert all(matcher.advance(VOCABULARY.encode(text)) for matcher in matchers)


def test_masks_are_those_filled_one_by_one_where_threads_take_over_half_way(threaded, monkeypatch):
    monkeypatch.setattr(threaded, "_quickest", quickest := Quickest([1, 3]))
    monkeypatch.setattr(quickest, "choose", lambda num_rows: 0)
    monkeypatch.setattr(Quickest, "patience_s", 0.0)
    monkeypatch.setattr(quickest, "rest", lambda seconds, num_done, num_left: int(num_done == 3))
    matchers = [threaded.compile(StructuredOutputs(regex=f"(a|{letter}){{2,9}}")).matcher() for letter in "bcdefgh"]
    masks, alone = np.zeros((2, len(matchers), threaded.mask_bytes // 4), dtype=np.int32)
    threaded.fill(matchers, masks)
    for matcher, mask_W in zip(matchers, alone, strict=True):
        matcher.fill(mask_W)
    assert (masks == alone).all() and len(np.unique(masks, axis=0)) == len(matchers)


def test_a_limit_that_a_token_reaches_is_told_and_a_token_that_does_not_fit_is_refused(threaded):
    schema = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(600)}}
    brace, letter = VOCABULARY.encode("{"), VOCABULARY.encode("x")
    with pytest.raises(RequestError, match=r"row has [0-9]+ items; max is [0-9]+"):
        threaded.compile(StructuredOutputs(json=schema)).matcher().advance(brace)
    assert threaded.compile(WANTED).matcher().advance(letter) is False
    assert threaded.compile(WANTED).matcher().advance(VOCABULARY.encode("[") + letter) is False


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (
            {"grammar": "start: start"},
            "no text fits it from here on: a rule repeats itself without an end, or its parts",
        ),
        ({"grammar": "start: b\nb: c"}, 'line 2, column 4: unknown name: "c"'),
        (
            {"grammar": 'start: %json {"pattern": "("}'},
            "line 1, column 8: failed to compile JSON schema: unclosed group",
        ),
        ({"grammar": 'start: "a'}, "line 1, column 10: it cannot be read from here on"),
        ({"grammar": "start: /(/"}, 'line 1, column 8: invalid regex "(": unclosed group'),
        ({"grammar": "root ::= b"}, "Rule 'b' not found"),
        ({"regex": "(?=a)b"}, 'invalid regex "(?=a)b": look-around, including look-ahead and look-behind, is not sup'),
        ({"json": {"type": "string", "pattern": "("}}, "invalid regex: unclosed group"),
        ({"json": {"type": "x"}}, "Invalid type: x"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_told_in_plain_words(wanted, reason, threaded):
    with pytest.raises(RequestError) as error:
        threaded.compile(StructuredOutputs(**wanted))
    assert str(error.value).startswith(reason) and "|" not in str(error.value)


@pytest.mark.parametrize(
    ("keyword", "value", "unheld"),
    [
        ("uniqueItems", True, True),
        ("propertyNames", {"type": "string"}, True),
        ("not", {}, True),
        ("if", {}, True),
        ("contains", {}, True),
        ("dependentRequired", {"a": ["b"]}, True),
        ("minProperties", 1, False),
        ("contentEncoding", "base64", False),
        ("patternProperties", {"^a": True, "^b": True}, False),
        ("patternProperties", {"^a": True, ".*": True}, True),
        ("patternProperties", {f"^a{number}": True for number in range(9)}, True),
        ("maximum", 2**63 - 1, True),
        ("maximum", 2**53 - 1, False),
        ("multipleOf", 1e30, True),
        ("multipleOf", 0.007, True),
        ("multipleOf", 604_800, True),
        ("multipleOf", 1_000_000, False),
        ("multipleOf", 0.01, False),
        ("properties", {"type": "object", "properties": {"a": True}, "required": ["a"], "minProperties": 1}, False),
        ("properties", {"type": "object", "properties": {"a": True}, "required": [], "maxProperties": 1}, True),
        ("format", "password", True),
        ("format", "date-time", False),
        ("pattern", "^(?!a)b", True),
        ("pattern", r"\bfoo\b", True),
        ("pattern", r"(a)\1", True),
        ("pattern", "(", True),
        ("pattern", r"^\d{3}-[a-z]+$", False),
        ("pattern", r"^[\w&&x]$", True),
        ("pattern", "^[+--]$", True),
        ("pattern", "^[&-]&&--[~]~$", False),
        ("pattern", "^(a{1000}){100}$", True),
        ("pattern", "^(?:a{1000}|b){100}$", False),
        ("pattern", "^[ab]{1,100000}$", False),
        ("const", "ab" * 30_000, True),
        ("const", "ab" * 1_000, False),
        ("enum", ["c", "ab" * 30_000], True),
        ("enum", ["c", "ab"], False),
    ],
)
def test_what_no_grammar_holds_is_found_by_asking_the_library(keyword, value, unheld):
    assert LLGuidance.cannot_hold(keyword, value) is unheld


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0),
        (r"^\d{3}-[a-z\]]{2}\.?$", 6),
        ("(?:ab|c){5}|xyz", 3),
        ("(?P<n>ab){2}(?i)c+d*", 5),
        ("((a{2}|b){3}c?){4}", 12),
        (r"\{3}\p{L}{4}\x41\u0041{2,}?", 10),
        ("[^]]{7}(", 7),
        ("(((a{100}){100}){100}){100}N", 100_000_001),
        ("[" * 100_000, 100_000),
    ],
)
def test_the_shortest_text_of_a_pattern_is_counted_in_one_reading(pattern: str, length: int) -> None:
    assert shortest_text(pattern) == length


OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": OBJECT}
TAG = {"begin": "<f>", "content": SCHEMA, "end": "</f>"}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG, {**TAG, "begin": "<ff>"}]}


def constant(text):
    return {"type": "const_string", "value": text}


@pytest.mark.parametrize(
    ("format", "allowed", "forbidden"),
    [
        ({"type": "or", "elements": [SEPARATED, SCHEMA]}, ['{"a":1}', '<f>{"a":2}</f>,<f>{"a":1}</f>'], ["x", "<f>x"]),
        (TRIGGERED, ["", "hi", 'x<f>{"a":1}</f> y<ff>{"a":2}</f>'], ["<f>x", "<fx"]),
        ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, ['hi<f>{"a":1}</f>'], ['<f>{"a":1}</f>x']),
        ({**SEPARATED, "stop_after_first": True}, ['<f>{"a":1}</f>'], ['<f>{"a":1}</f>,']),
        ({**SEPARATED, "at_least_one": False}, ["", '<f>{"a":1}</f>'], [","]),
        (
            {"type": "sequence", "elements": [constant('x/"'), {"type": "regex", "pattern": "[a/]+"}]},
            ['x/"a/'],
            ["x/a"],
        ),
        ({"type": "sequence", "elements": [constant("x"), {"type": "any_text"}]}, ["x", "xyz"], ["y"]),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, ["a", "b"], ["c"]),
        ({"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": [")", "]"]}, ["(x)", "(y]"], ["x"]),
        ({"type": "regex", "pattern": r"\d\w"}, ["7x"], ["٣x", "7é"]),
        ({"type": "json_schema", "json_schema": True}, ["7", "[true]"], ["x"]),
        ({"type": "or", "elements": [{"type": "json_schema", "json_schema": False}, SCHEMA]}, ['{"a":1}'], ["7"]),
    ],
)
def test_the_elements_of_a_structural_tag_are_held(format, allowed, forbidden, threaded):
    grammar = threaded.compile(StructuredOutputs(structural_tag={"format": format}))
    for text in allowed:
        matcher = grammar.matcher()
        assert matcher.advance(VOCABULARY.encode(text)) and matcher.is_accepting, text
    for text in forbidden:
        assert not grammar.matcher().advance(VOCABULARY.encode(text)), text


NOTHING = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0.2, "maximum": 0.8}}
IMPOSSIBLE = {"type": "tag", "begin": "<g>", "content": NOTHING, "end": "</g>"}


@pytest.mark.parametrize(
    ("format", "allowed"),
    [
        ({"type": "or", "elements": [NOTHING, SCHEMA]}, '{"a":1}'),
        ({"type": "or", "elements": [{**SEPARATED, "tags": [IMPOSSIBLE]}, SCHEMA]}, '{"a":1}'),
        ({**SEPARATED, "tags": [IMPOSSIBLE, *SEPARATED["tags"]]}, '<f>{"a":2}</f>'),
        ({**TRIGGERED, "triggers": ["<"], "tags": [IMPOSSIBLE, *TRIGGERED["tags"]]}, 'x<f>{"a":1}</f>'),
    ],
)
def test_an_alternative_that_no_text_fits_leaves_the_others(format, allowed, threaded):
    grammar = threaded.compile(StructuredOutputs(structural_tag={"format": format}))
    matcher = grammar.matcher()
    assert matcher.advance(VOCABULARY.encode(allowed)) and matcher.is_accepting
    assert not grammar.matcher().advance(VOCABULARY.encode("<g>1"))


@pytest.mark.parametrize(
    "format",
    [
        {"type": "or", "elements": [NOTHING]},
        {**SEPARATED, "tags": [IMPOSSIBLE]},
        {**TRIGGERED, "triggers": ["<"], "tags": [IMPOSSIBLE]},
    ],
)
def test_alternatives_of_which_no_text_fits_any_are_refused(format, threaded):
    with pytest.raises(RequestError, match="contains no integer values"):
        threaded.compile(StructuredOutputs(structural_tag={"format": format}))


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        (5, "format.type=None is not one of const_string, json_schema,"),
        ({"type": "or", "elements": []}, "format.elements=[] is not a list with something in it"),
        ({"type": "or", "elements": [constant(5)]}, "format.elements[0].value=5 is not a text"),
        ({"type": "json_schema"}, "format.json_schema=None is not a JSON schema"),
        ({"type": "json_schema", "json_schema": False}, "format.json_schema=false is a schema that no value fits"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, constant("x")]},
            "format.elements[0]: any_text stands in",
        ),
        ({**TRIGGERED, "triggers": ["<g"]}, 'no trigger begins the tag "<f>"'),
        ({**SEPARATED, "separator": 5}, "format.separator=5 is not a text"),
        ({"type": "tag", "begin": "<", "content": SCHEMA, "end": 5}, "format.end=5 is not a text"),
    ],
)
def test_what_is_no_element_of_a_structural_tag_is_refused_by_its_place(format, reason, threaded):
    with pytest.raises(RequestError) as error:
        threaded.compile(StructuredOutputs(structural_tag={"format": format}))
    assert str(error.value).startswith(reason)


def test_a_grammar_that_allows_nothing_half_way_says_so_in_plain_words(threaded):
    matcher = threaded.compile(StructuredOutputs(grammar='start: "x" b\nb: b')).matcher()
    assert matcher.advance(VOCABULARY.encode("x"))
    with pytest.raises(RequestError, match="no text fits it from here on"):
        matcher.fill(np.zeros(threaded.mask_bytes // 4, dtype=np.int32))


def test_a_text_that_a_grammar_forces_is_tokenized_once():
    vocabulary, asked = small_vocabulary(), []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return vocabulary.encode(text)

    counting = GrammarVocabulary(vocabulary.tokens, vocabulary.special_ids, vocabulary.stop_ids, encode)
    backend = LLGuidance(LLGuidanceConfig(num_threads=1), counting)
    schema = {"type": "object", "properties": {"a long key": {"type": "null"}}, "required": ["a long key"]}
    grammar = backend.compile(StructuredOutputs(json=schema, whitespace=False))
    for _ in range(3):
        matcher = grammar.matcher()
        for text in ('{"', "a", " ", "l", "o"):
            assert matcher.advance(vocabulary.encode(text)[:1])
            matcher.fill(np.zeros(backend.mask_bytes // 4, dtype=np.int32))
    assert len(asked) == len(set(asked)) > 1


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":[2,3]}', True),
        ('{ "a" : 1 , "b" : [ 2 ] }', True),
        ('{\r\n\t"a": 1,\n\n    "b": [\n        2\n    ]\n}', True),
        ('{  "a"', False),
        ('{ \n "a"', False),
        ('{\n\n\n"a"', False),
        ("{\n" + 33 * " ", False),
    ],
)
def test_a_model_that_is_fond_of_white_space_goes_on_with_its_answer(text, fits, threaded):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a", "b"],
    }
    tag = {"format": {"type": "tag", "begin": "", "content": {"type": "json_schema", "json_schema": schema}, "end": ""}}
    for wanted in ({"json": schema}, {"structural_tag": tag}):
        matcher = threaded.compile(StructuredOutputs(**wanted)).matcher()
        assert all(matcher.advance([token]) for token in VOCABULARY.encode(text)) is fits
