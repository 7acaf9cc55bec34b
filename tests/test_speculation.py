"""Tokens and log-probabilities with drafts are those without, whoever drafts, in float32 on the CPU."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.contracts import DraftCounts
from hookline.core.errors import PluginError
from hookline.core.outputs import RequestOutput
from hookline.core.plugin import sources
from tests.doc_pages import ROOT, commands, run_here

PROMPTS = [
    "Once upon a time there was a cat. Once upon a time there was a dog. Once upon a",
    "def f(x):\n  return x\n\ndef g(x):\n  return x\n\ndef h",
    "one two three one two three one two",
    "The",
]
TEXT = "The cat sat on the mat. It was a warm day. The dog ran to the door.\n"
SAMPLED = {"temperature": 0.8, "seed": 5}
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
}


@pytest.fixture(autouse=True)
def _drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {point.name for point in importlib.metadata.entry_points(group="hookline")}
    ours = [] if "drafters" in installed else ["hookline.plugins.drafters"]
    monkeypatch.setenv(sources.DEVELOPMENT_VARIABLE, ",".join([*ours, "tests.odd_drafters", "hookline_corpus"]))
    monkeypatch.syspath_prepend(str(ROOT / "examples/hookline-corpus"))


def _answers(
    drafter: Any, params: dict[str, Any], engine: dict[str, Any], **keys: Any
) -> tuple[list[RequestOutput], list[RequestOutput], LLM]:
    """Those of PROMPTS, twice: the second time their prefixes are in the cache. The LLM is closed."""
    with LLM(device="cpu", dtype="float32", drafter=drafter, engine={"max_model_len": 160, **engine}, **keys) as llm:
        sampling = SamplingParams(max_tokens=40, **params)
        return llm.generate(PROMPTS, sampling), llm.generate(PROMPTS, sampling), llm


def _counts(llm: LLM) -> DraftCounts:
    assert llm.engine.speculation is not None
    return llm.engine.speculation


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


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[list[RequestOutput], list[RequestOutput]]]:
    """Answers without a drafter, by the case; made when first asked for."""
    return {}


def _equal(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    assert _tokens(ours) == _tokens(theirs)
    for mine, other in zip(_logprobs(ours), _logprobs(theirs), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine[0] == other[0] and mine[1] == pytest.approx(other[1], abs=1e-4)
            assert [id_ for id_, _ in mine[2:]] == [id_ for id_, _ in other[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["suffix", "ngram", "corpus", "random", "raising"])
@pytest.mark.parametrize("case", CASES)
def test_answers_with_drafts_are_those_without(case: str, drafter: str, plain: dict[str, Any], tmp_path: Path) -> None:
    params, engine = CASES[case]
    if case not in plain:
        plain[case] = _answers(None, params, engine)[:2]
    chosen: Any = drafter
    if drafter == "corpus":
        whole = [PROMPTS[index] + output.text for index, output in enumerate(plain[case][0])]
        (tmp_path / "corpus.txt").write_text("\n".join(whole), encoding="utf-8")
        tokenizer = ROOT / "plugins/models/qwen3_tiny/tokenizer.json"
        chosen = {"name": "corpus", "corpus": str(tmp_path / "corpus.txt"), "tokenizer": str(tokenizer)}
    *found, llm = _answers(chosen, params, engine)
    for ours, theirs in zip(found, plain[case], strict=True):
        _equal(ours, theirs)
    counts = _counts(llm)
    if case not in ("no room", "a form"):
        assert counts.num_drafted > 0
    if drafter in ("suffix", "corpus") and case in ("greedy", "processors", "preemption", "chunks"):
        assert counts.num_kept > 10
    if case == "preemption":
        assert any(output.num_preemptions for output in found[0])
    if case == "greedy":
        assert any(output.num_cached_tokens for output in found[1])
    if case == "a form":
        assert counts.num_drafted == 0 and counts.no_drafts["structured outputs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["nonsense", "writing"])
def test_answers_of_drafters_that_break_their_contract_are_those_without(drafter: str, plain: dict[str, Any]) -> None:
    params, engine = CASES["greedy"]
    if "greedy" not in plain:
        plain["greedy"] = _answers(None, params, engine)[:2]
    _equal(_answers(drafter, params, engine)[0], plain["greedy"][0])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize(
    ("drafter", "case"),
    [("suffix", "sampled"), ("suffix", "processors"), ("suffix", "preemption"), ("random", "completions")],
)
def test_answers_of_several_ranks_are_those_without_drafts(case: str, drafter: str, keys: dict[str, int]) -> None:
    params, engine = CASES[case]
    with_drafts, *_, llm = _answers(drafter, params, engine, **keys)
    _equal(with_drafts, _answers(None, params, engine, **keys)[0])
    counts = _counts(llm)
    assert counts.num_drafted > 0 and (drafter == "random" or counts.num_kept > 0)


@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        ("raising", "fails in propose: RuntimeError: no idea"),
        ("nonsense", "breaks its contract in propose: it proposed what is not at most"),
        ("writing", "fails in propose: ValueError: assignment destination is read-only"),
        ("short", "breaks its contract in propose_all: it returned 3 proposals for 4 requests"),
    ],
)
def test_a_drafter_that_fails_is_named_once(drafter: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hookline"):
        _answers(drafter, {"temperature": 0.0}, {})
    warnings = [one.getMessage() for one in caplog.records if "go on without its drafts" in one.getMessage()]
    assert len(warnings) == 1 and told in warnings[0] and f"drafter '{drafter}'" in warnings[0]


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("def add(a, b):\n    return a + b\n\n" * 3, id="code"),
        pytest.param(TEXT + TEXT + TEXT[:24], id="text", marks=pytest.mark.slow),
    ],
)
def test_copying_gives_the_same_tokens_in_less_than_half_as_many_steps(prompt: str) -> None:
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
    with LLM(device="cpu", dtype="float32") as llm:
        [plain] = llm.generate([prompt], params)
    with LLM(device="cpu", dtype="float32", drafter={"name": "suffix", "k": 4}) as llm:
        [output] = llm.generate([prompt], params)
        counts = _counts(llm)
    num_steps = len(output.token_ids) - counts.num_kept
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) >= 2 * num_steps


@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_counts_end_where_a_request_ends(place: int) -> None:
    """Each decode gives one token and those of the drafts that it kept, also where it ends between drafts."""
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    code = "def add(a, b):\n    return a + b\n\n" * 3
    with LLM(device="cpu", dtype="float32", drafter={"name": "suffix", "k": 4}) as llm:
        [whole] = llm.generate([code], SamplingParams(**params))
        last = list(dict.fromkeys(whole.token_ids))[4 + place]
    with LLM(device="cpu", dtype="float32", drafter={"name": "suffix", "k": 4}) as llm:
        [output] = llm.generate([code], SamplingParams(**params, stop_token_ids=[last]))
        counts = _counts(llm)
    assert output.finish_reason == "stop"
    num_tokens = whole.token_ids.index(last) + 1
    assert num_tokens == 1 + sum(counts.no_drafts.values()) + counts.drafted[0] + counts.num_kept


def test_a_request_whose_drafts_are_wrong_pauses_longer_and_longer() -> None:
    random = {"name": "random", "k": 2, "adaptive": True}
    with LLM(device="cpu", dtype="float32", drafter=random) as llm:
        llm.generate(["The"], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        counts = _counts(llm)
    assert counts.no_drafts["paused"] > 80 and counts.num_drafted < 30


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
def test_steps_overlap_while_drafts_pause(params: dict[str, Any]) -> None:
    plain = _answers(None, params, {})[0]
    outputs, again, llm = _answers({"name": "random", "k": 2, "adaptive": True}, params, {"overlap": True})
    counts = _counts(llm)
    assert _tokens(outputs) == _tokens(again) == _tokens(plain)
    assert counts.no_drafts["overlap"] > 50 and counts.num_drafted > 10


def test_steps_overlap_while_nothing_is_proposed() -> None:
    params = {"temperature": 0.0}
    outputs, _, llm = _answers({"name": "suffix", "min_match": 60, "max_match": 64}, params, {"overlap": True})
    counts = _counts(llm)
    assert _tokens(outputs) == _tokens(_answers(None, params, {})[0])
    assert counts.no_drafts["overlap"] > 50 and counts.no_drafts["no proposal"] > 50


def test_steps_overlap_that_have_no_room_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.core.engine.step_loop.DRAFT_TOKENS", (7,))
    params = {"temperature": 0.0}
    outputs, _, llm = _answers("suffix", params, {"overlap": True})
    assert _tokens(outputs) == _tokens(_answers(None, params, {})[0])
    assert _counts(llm).no_drafts["overlap"] > 50


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
