"""Tokens and log-probabilities with drafts are those without, whoever drafts, in float32 on the CPU."""

from __future__ import annotations

import importlib.metadata
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import groupby, product
from typing import Any
from unittest.mock import patch

import pytest

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.contracts import DraftCounts
from hookline.core.errors import PluginError
from hookline.core.outputs import RequestOutput
from hookline.core.plugin import sources
from hookline.core.speculation.depth import DraftDepth
from hookline.core.speculation.speculation import Speculation
from tests.doc_pages import ROOT, commands, run_here

PROMPTS = [
    "Once upon a time there was a cat. Once upon a time there was a dog. Once upon a",
    "def f(x):\n  return x\n\ndef g(x):\n  return x\n\ndef h",
    "one two three one two three one two",
    "The",
]
TEXT = "The cat sat on the mat. It was a warm day. The dog ran to the door.\n"
SAMPLED = {"temperature": 0.8, "seed": 5}
LETTERS = StructuredOutputs(regex="[a-z ,.]{10,80}")
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
RECORDS = StructuredOutputs(json={"type": "array", "minItems": 2, "maxItems": 6, "items": RECORD}, whitespace=False)
ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
SMALL = {"max_model_len": 160}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0, "logprobs": 3}, {}),
    "sampled": ({**SAMPLED, "logprobs": 0}, {}),
    "processors": (
        {"temperature": 0.3, "seed": 3, "top_p": 0.8, "repetition_penalty": 1.1, "logit_bias": {7: -5.0}},
        {},
    ),
    "penalties": ({**SAMPLED, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.05, "logprobs": 2}, {}),
    "bad words": ({"temperature": 0.0, "bad_words": ["time", "return x"]}, {}),
    "stop strings": ({"temperature": 0.0, "stop": ["was a", "x)"], "logprobs": 0}, {}),
    "min_tokens": ({**SAMPLED, "min_tokens": 20, "logprobs": 0}, {}),
    "prompt log-probabilities": ({"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1}, {}),
    "completions": ({**SAMPLED, "n": 3, "logprobs": 1}, {}),
    "preemption": (
        {**SAMPLED, "logprobs": 1},
        {"num_blocks": 9, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64},
    ),
    "chunks": ({"temperature": 0.0, "logprobs": 1}, {"max_num_seqs": 4, "max_num_batched_tokens": 10}),
    "no room": ({"temperature": 0.0}, {"max_num_seqs": 4, "max_num_batched_tokens": 4}),
    "short blocks": ({"temperature": 0.0}, {"block_size": 1}),
    "overlap": ({**SAMPLED, "logprobs": 0}, {"overlap": True}),
    "a form": ({"temperature": 0.0, "structured_outputs": StructuredOutputs(regex="(ab|ba){1,8}")}, {}),
    "a sampled form": ({**SAMPLED, "logprobs": 1, "structured_outputs": LETTERS}, {}),
    "records": ({"temperature": 0.3, "seed": 4, "n": 2, "logprobs": 2, "structured_outputs": RECORDS}, {}),
    "a form behind a text": (
        {
            "temperature": 0.0,
            "min_tokens": 20,
            "frequency_penalty": 0.1,
            "structured_outputs": StructuredOutputs(regex="( cat| dog){2,30}", after=" a"),
        },
        {},
    ),
}
for _name in ("preemption", "chunks", "no room", "short blocks", "overlap"):
    _form = StructuredOutputs(regex="[a-z ,.]{100,200}") if _name == "preemption" else LETTERS
    CASES[f"a form, {_name}"] = {**CASES[_name][0], "structured_outputs": _form}, CASES[_name][1]
KEPT = {
    "suffix": {"greedy", "processors", "preemption", "chunks", "a form", "records", "a form, chunks"},
    "corpus": {"greedy", "processors", "preemption", "chunks"},
}
"""Cases in which a drafter is right more than ten times."""


@pytest.fixture(autouse=True)
def _drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {point.name for point in importlib.metadata.entry_points(group="hookline")}
    ours = [] if "drafters" in installed else ["hookline.plugins.drafters"]
    monkeypatch.setenv(sources.DEVELOPMENT_VARIABLE, ",".join([*ours, "tests.odd_drafters", "hookline_corpus"]))
    monkeypatch.syspath_prepend(str(ROOT / "examples/hookline-corpus"))


Answers = tuple[list[RequestOutput], list[RequestOutput]]
"""Those of PROMPTS, and the same again."""


class _Shared:
    """LLMs that cases share: one without a drafter and one with, each until another configuration is asked for."""

    def __init__(self) -> None:
        self._open: dict[bool, tuple[Any, LLM]] = {}
        self._plain: dict[str, list[RequestOutput]] = {}
        self._drafted: dict[str, dict[str, tuple[Answers, DraftCounts]]] = {}

    def llm(self, drafter: Any, engine: dict[str, Any], **keys: Any) -> LLM:
        """On the CPU in float32; open until the next one."""
        asked, is_plain = (drafter, engine, keys), drafter is None
        if is_plain not in self._open or self._open[is_plain][0] != asked:
            self._close(is_plain)
            self._open[is_plain] = asked, LLM(drafter=drafter, engine={**SMALL, **engine}, **ON_CPU, **keys)
        return self._open[is_plain][1]

    def close(self) -> None:
        """Close what is open."""
        for is_plain in list(self._open):
            self._close(is_plain)

    def _close(self, is_plain: bool) -> None:
        if is_plain in self._open:
            self._open.pop(is_plain)[1].close()

    def plain(self, params: dict[str, Any], engine: dict[str, Any]) -> list[RequestOutput]:
        """Those of PROMPTS without a drafter and without a prefix in the cache; computed when first asked for."""
        key = repr((params, engine))
        if key not in self._plain:
            llm = self.llm(None, engine)
            llm.engine.pool.reset_cache()
            self._plain[key] = llm.generate(PROMPTS, SamplingParams(max_tokens=40, **params))
        return self._plain[key]

    def drafted(
        self, drafter: Any, cases: Sequence[str], engine: dict[str, Any], **keys: Any
    ) -> dict[str, tuple[Answers, DraftCounts]]:
        """Answers of cases with drafts, and what became of these: all cases run at once, when first asked for."""
        key = repr((drafter, cases, engine, keys))
        if key not in self._drafted:
            self._drafted[key] = _answers_together(self.llm(drafter, engine, **keys), cases)
        return self._drafted[key]


@pytest.fixture(scope="module")
def shared() -> Iterator[_Shared]:
    held = _Shared()
    yield held
    held.close()


def _answers(llm: LLM, params: dict[str, Any]) -> Answers:
    """Those of PROMPTS, twice: the second time their prefixes are in the cache, which is empty at first."""
    sampling = SamplingParams(max_tokens=40, **params)
    llm.engine.pool.reset_cache()
    return llm.generate(PROMPTS, sampling), llm.generate(PROMPTS, sampling)


def _answers_together(llm: LLM, cases: Sequence[str]) -> dict[str, tuple[Answers, DraftCounts]]:
    """`_answers` of each case, and its drafts. Steps mix the cases; none finds another's prefixes in the cache."""
    llm.engine.pool.reset_cache()
    params = [SamplingParams(max_tokens=40, **CASES[case][0]) for case in cases for _ in PROMPTS]
    of = [case for case in cases for _ in PROMPTS]
    before = _counts(llm)
    with _counted_by_case() as counts:
        twice = [
            llm.generate(PROMPTS * len(cases), params, cache_salt=of, tags=[{"case": case} for case in of])
            for _ in range(2)
        ]
    assert "structured outputs" not in _since(before, llm).no_drafts
    first, again = ([outputs[at : at + len(PROMPTS)] for at in range(0, len(of), len(PROMPTS))] for outputs in twice)
    return {case: ((ours, second), counts[case]) for case, ours, second in zip(cases, first, again, strict=True)}


@contextmanager
def _counted_by_case() -> Iterator[dict[str, DraftCounts]]:
    """What becomes of drafts meanwhile, by the request's tag `case`."""
    counts, count_step = defaultdict[str, DraftCounts](DraftCounts), Speculation.count_step

    def _count(self: Speculation, rows: Any, num_kept: Any) -> None:
        count_step(self, rows, num_kept)
        for row in rows:
            counts[row.request.tags["case"]].add(row.num_behind, num_kept[row.request.id])

    with patch.object(Speculation, "count_step", _count):
        yield counts


def _counts(llm: LLM) -> DraftCounts:
    """A copy of what the drafts came to so far."""
    assert llm.engine.speculation is not None
    return deepcopy(llm.engine.speculation)


def _since(before: DraftCounts, llm: LLM) -> DraftCounts:
    """What they came to since then."""
    counts = _counts(llm)
    for now, then in ((counts.drafted, before.drafted), (counts.kept, before.kept)):
        now[: len(then)] = [one - other for one, other in zip(now, then, strict=False)]
    counts.no_drafts = {why: count - before.no_drafts.get(why, 0) for why, count in counts.no_drafts.items()}
    return counts


def _tokens(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.completions
    ]


def _logprobs(outputs: list[RequestOutput]) -> Iterator[Any]:
    for output in outputs:
        drawn = [one for completion in output.completions for one in completion.logprobs or ()]
        for one in [*drawn, *(output.prompt_logprobs or ())]:
            yield None if one is None else (one.token_id, one.logprob, *one.top)


def _equal(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    assert _tokens(ours) == _tokens(theirs)
    for mine, other in zip(_logprobs(ours), _logprobs(theirs), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine[0] == other[0] and mine[1] == pytest.approx(other[1], abs=1e-4)
            assert [id_ for id_, _ in mine[2:]] == [id_ for id_, _ in other[2:]]


def _by_engine() -> list[tuple[dict[str, Any], list[str]]]:
    """The settings of the engine, each with its cases, which share LLMs."""
    settings = [repr(engine) for _, engine in CASES.values()]
    ordered = sorted(CASES, key=lambda case: settings.index(repr(CASES[case][1])))
    return [(engine, list(cases)) for engine, cases in groupby(ordered, lambda case: CASES[case][1])]


def _together(case: str) -> list[str]:
    """The cases that run with this one: those of its engine, but alone where blocks are few enough to preempt it."""
    return [case] if "preemption" in case else [one for one in CASES if CASES[one][1] == CASES[case][1]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, shared: _Shared) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A drafter that knows the answers of all cases with these settings of the engine."""
    chosen: dict[str, dict[str, Any]] = {}

    def _choose(engine: dict[str, Any]) -> dict[str, Any]:
        if repr(engine) not in chosen:
            path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
            answers = [shared.plain(params, engine) for params, settings in CASES.values() if settings == engine]
            whole = [PROMPTS[index] + output.text for outputs in answers for index, output in enumerate(outputs)]
            path.write_text("\n".join(whole), encoding="utf-8")
            tokenizer = ROOT / "plugins/models/qwen3_tiny/tokenizer.json"
            chosen[repr(engine)] = {"name": "corpus", "corpus": str(path), "tokenizer": str(tokenizer)}
        return chosen[repr(engine)]

    return _choose


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "case"),
    [pair for _, cases in _by_engine() for pair in product(("suffix", "ngram", "corpus", "random", "raising"), cases)],
)
def test_answers_with_drafts_are_those_without(
    drafter: str, case: str, shared: _Shared, corpus: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    params, engine = CASES[case]
    chosen = corpus(engine) if drafter == "corpus" else drafter
    found, counts = shared.drafted(chosen, _together(case), engine)[case]
    for ours in found:
        _equal(ours, shared.plain(params, engine))
    if "no room" not in case and (drafter, case) != ("random", "a form"):
        assert counts.num_drafted > 0
    if case in KEPT.get(drafter, ()):
        assert counts.num_kept > 10
    if "preemption" in case:
        assert any(output.num_preemptions for output in found[0])
    if case == "greedy":
        assert any(output.num_cached_tokens for output in found[1])


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize(
    ("keys", "drafter", "case", "together"),
    [
        (keys, drafter, case, cases)
        for keys in ({"tp": 2}, {"pp": 2})
        for drafter, cases in (
            ("suffix", ["sampled", "processors", "a sampled form"]),
            ("suffix", ["preemption"]),
            ("suffix", ["a form, preemption"]),
            ("random", ["completions", "records"]),
        )
        for case in cases
    ],
)
def test_answers_of_several_ranks_are_those_of_one_without_drafts(
    case: str, together: list[str], drafter: str, keys: dict[str, int], shared: _Shared
) -> None:
    params, engine = CASES[case]
    found, counts = shared.drafted(drafter, together, engine, **keys)[case]
    for ours in found:
        _equal(ours, shared.plain(params, engine))
    assert counts.num_drafted > 0 and (drafter == "random" or counts.num_kept > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        ("raising", "fails in propose: RuntimeError: no idea"),
        ("nonsense", "breaks its contract in propose: it proposed what is not at most"),
        ("writing", "fails in propose: ValueError: assignment destination is read-only"),
        ("short", "breaks its contract in propose_all: it returned 3 proposals for 4 requests"),
    ],
)
def test_a_drafter_that_fails_is_named_once_and_changes_no_token(
    drafter: str, told: str, shared: _Shared, caplog: pytest.LogCaptureFixture
) -> None:
    params, engine = CASES["greedy"]
    plain = shared.plain(params, engine)
    with caplog.at_level(logging.WARNING, "hookline"), LLM(drafter=drafter, engine=SMALL, **ON_CPU) as llm:
        for ours in _answers(llm, params):
            _equal(ours, plain)
    warnings = [one.getMessage() for one in caplog.records if "go on without its drafts" in one.getMessage()]
    assert len(warnings) == 1 and told in warnings[0] and f"drafter '{drafter}'" in warnings[0]


SUFFIX4 = {"name": "suffix", "k": 4}
LONG = {"max_model_len": 320}
CODE = "def add(a, b):\n    return a + b\n\n" * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(CODE, id="code"),
        pytest.param(TEXT + TEXT + TEXT[:24], id="text", marks=pytest.mark.slow),
    ],
)
def test_copying_gives_the_same_tokens_in_less_than_half_as_many_steps(prompt: str, shared: _Shared) -> None:
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
    [plain] = shared.llm(None, LONG).generate([prompt], params)
    llm = shared.llm(SUFFIX4, LONG)
    before = _counts(llm)
    [output] = llm.generate([prompt], params)
    num_steps = len(output.token_ids) - _since(before, llm).num_kept
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) >= 2 * num_steps


@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_counts_end_where_a_request_ends(place: int, shared: _Shared) -> None:
    """Each decode gives one token and those of the drafts that it kept, also where it ends between drafts."""
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    llm = shared.llm(SUFFIX4, LONG)
    [whole] = llm.generate([CODE], SamplingParams(**params))
    last = list(dict.fromkeys(whole.token_ids))[4 + place]
    before = _counts(llm)
    [output] = llm.generate([CODE], SamplingParams(**params, stop_token_ids=[last]))
    counts = _since(before, llm)
    assert output.finish_reason == "stop"
    num_tokens = whole.token_ids.index(last) + 1
    assert num_tokens == 1 + sum(counts.no_drafts.values()) + counts.drafted[0] + counts.num_kept


@pytest.mark.slow
def test_a_request_whose_drafts_are_wrong_pauses_longer_and_longer() -> None:
    random = {"name": "random", "k": 2, "adaptive": True}
    with LLM(device="cpu", dtype="float32", drafter=random) as llm:
        llm.generate(["The"], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        counts = _counts(llm)
    assert counts.no_drafts["paused"] > 80 and counts.num_drafted < 30


@pytest.mark.slow
@pytest.mark.parametrize("length", [pytest.param(1.0, marks=pytest.mark.slow), 2.25, 5.0])
def test_a_pretended_length_is_the_mean_and_is_told(length: float, caplog: pytest.LogCaptureFixture) -> None:
    sampling = SamplingParams(max_tokens=101, temperature=0.0, ignore_eos=True)
    drafter = {"name": "synthetic", "k": 4, "length": length}
    with (
        caplog.at_level(logging.WARNING, "hookline"),
        LLM(device="cpu", dtype="float32", drafter=drafter, engine={"max_model_len": 160}) as llm,
    ):
        outputs = llm.generate(PROMPTS, sampling)
        counts = _counts(llm)
    assert all(len(output.token_ids) == 101 for output in outputs)
    assert sum(counts.kept) / counts.drafted[0] == pytest.approx(length - 1, rel=0.05)
    assert counts.pretended_length == length
    assert any("answers are not the model's" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("fields", "told"), [({"length": 6.0}, "from 1 to 1 \\+ drafter.k=5"), ({"k": 0}, "at least 1")]
)
def test_a_length_that_cannot_be_is_refused(fields: dict[str, float], told: str) -> None:
    with pytest.raises(Exception, match=told):
        LLM(device="cpu", drafter={"name": "synthetic", **fields})


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {**SAMPLED, "stop": ["was a"]}], ids=["greedy", "sampled"])
def test_steps_overlap_while_drafts_pause(params: dict[str, Any], shared: _Shared) -> None:
    llm = shared.llm({"name": "random", "k": 2, "adaptive": True}, {"overlap": True})
    before = _counts(llm)
    outputs, again = _answers(llm, params)
    counts = _since(before, llm)
    assert _tokens(outputs) == _tokens(again) == _tokens(shared.plain(params, {}))
    assert counts.no_drafts["overlap"] > 50 and counts.num_drafted > 10


def test_steps_overlap_while_nothing_is_proposed(shared: _Shared) -> None:
    llm = shared.llm({"name": "suffix", "min_match": 60, "max_match": 64}, {"overlap": True})
    outputs, _ = _answers(llm, {"temperature": 0.0})
    counts = _counts(llm)
    assert _tokens(outputs) == _tokens(shared.plain({"temperature": 0.0}, {}))
    assert counts.no_drafts["overlap"] > 50 and counts.no_drafts["no proposal"] > 50


@pytest.mark.slow
def test_steps_overlap_that_have_no_room_for_drafts(shared: _Shared) -> None:
    llm = shared.llm("suffix", {"overlap": True, "max_num_seqs": 4, "max_num_batched_tokens": 7})
    before = _counts(llm)
    outputs, _ = _answers(llm, {"temperature": 0.0})
    assert _tokens(outputs) == _tokens(shared.plain({"temperature": 0.0}, {}))
    assert _since(before, llm).no_drafts["overlap"] > 50


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {**SAMPLED, "stop": ["was a"]}], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_how_many_drafts_steps_have(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, shared: _Shared
) -> None:
    """Whatever steps took, and whichever number of drafts pays therefore."""
    depths = list[int]()

    def _choose(self: DraftDepth, num_rows: int, most: int, step: int) -> int:
        depths.append(min(most, step * step // 3 % 5))
        return depths[-1]

    def _weighing(*arguments: Any, **keys: Any) -> Speculation:
        return Speculation(*arguments, **{**keys, "weighs_costs": True})

    monkeypatch.setattr(DraftDepth, "choose", _choose)
    monkeypatch.setattr("hookline.core.assembly.speculation.Speculation", _weighing)
    with LLM(drafter="suffix", engine={**SMALL, "overlap": True}, **ON_CPU) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, **params))
        counts = _counts(llm)
    assert _tokens(outputs) == _tokens(shared.plain(params, {}))
    assert set(depths) > {0, 1, 3} and counts.num_kept > 5 and counts.no_drafts["overlap"] > 5


def test_what_hidden_states_are_asked_for_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"drafter 'suffix' .* does not fit: engine\.taps is set"):
        LLM(device="cpu", drafter="suffix", engine={"taps": [0]})


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"k": 0}, r"drafter\.k=0 must be at least 1"), ({"max_match": 1}, r"drafter\.max_match=1 must be at least 2")],
)
def test_fields_out_of_range_are_refused(fields: dict[str, int], told: str) -> None:
    with pytest.raises(Exception, match=told):
        LLM(device="cpu", drafter={"name": "ngram", **fields})


@pytest.mark.slow
def test_the_page_of_speculation_has_a_command_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = commands(ROOT / "docs/speculation.md")
    assert run_here(command, monkeypatch) == 0


def test_metrics_count_drafts_by_position() -> None:
    with LLM(device="cpu", dtype="float32", drafter="suffix", observers=["prometheus"]) as llm:
        llm.generate(PROMPTS[2:3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        counts, text = _counts(llm), llm.observers["prometheus"].text()
        for name, values in (("draft", counts.drafted), ("accepted", counts.kept)):
            for place, count in enumerate(values):
                start = f"hookline_spec_decode_{name}_tokens_per_pos_total{{"
                (line,) = [one for one in text.splitlines() if one.startswith(start) and f'position="{place}"' in one]
                assert float(line.split()[-1]) == count
        assert counts.num_drafted > 0
