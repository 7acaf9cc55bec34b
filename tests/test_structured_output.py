"""Structured output with the bundled checkpoint: every completion parses and validates, however it is computed."""

from __future__ import annotations

import json
import re
import time

import jsonschema
import pytest
from hypothesis import settings

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.outputs import FinishReason
from hookline.core.run.command import main
from tests.schemas import random_schema

NUM_SCHEMAS = 500 if settings.default.max_examples >= 5000 else 20  # pytest --hypothesis-profile=nightly
PROMPT = 'data = json.loads("""'
SIZES = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 768, "cpu_cache_gib": 0.2}
MODES = {
    "plain": {},
    "overlap and preemption": {"engine": {"overlap": True, "num_blocks": 50, "block_size": 8}},
    "two ranks": {"tp": 2, "engine": {"overlap": True}},
}


def params_of(seed: int) -> SamplingParams:
    asked = StructuredOutputs(json=random_schema(seed), whitespace=seed % 5 == 0)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=600, structured_outputs=asked)


@pytest.fixture(scope="module", params=list(MODES))
def mode(request, ranks_are_forked):
    options = MODES[request.param]
    engine = {**SIZES, **options.get("engine", {})}
    with LLM(device="cpu", seed=0, tp=options.get("tp", 1), engine=engine) as llm:
        yield request.param, llm


@pytest.fixture(scope="module")
def plain():
    with LLM(device="cpu", engine=SIZES) as llm:
        yield llm


@pytest.mark.slow
def test_every_completion_of_random_schemas_parses_and_validates(mode):
    name, llm = mode
    first = list(MODES).index(name) * NUM_SCHEMAS
    seeds = range(first, first + (NUM_SCHEMAS // 2 if name == "two ranks" and NUM_SCHEMAS < 500 else NUM_SCHEMAS))
    prompts = [f"x{seed} = {seed}\n" * 4 + PROMPT for seed in seeds]  # nothing to share, so that memory runs out
    outputs = llm.generate(prompts, [params_of(seed) for seed in seeds])
    cut_short = 0
    for seed, output in zip(seeds, outputs, strict=True):
        assert output.finish_reason is not FinishReason.ERROR, (seed, output.error)
        if output.finish_reason is FinishReason.LENGTH:
            cut_short += 1
            continue
        value = json.loads(output.text)
        jsonschema.Draft202012Validator(random_schema(seed)).validate(value)
    assert cut_short <= NUM_SCHEMAS // 20, f"{cut_short} did not end"
    if name == "overlap and preemption":
        assert sum(output.num_preemptions for output in outputs) > 0


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yé"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "json": (StructuredOutputs(json=SCHEMA), r'\{\s*"a"\s*:\s*\d{1,2}\s*,\s*"b"\s*:\s*"(x|yé)"\s*\}'),
    "compact json": (StructuredOutputs(json=SCHEMA, whitespace=False), r'\{"a":\d{1,2},"b":"(x|yé)"\}'),
    "regex": (StructuredOutputs(regex="[0-9]{3}-[a-zé]{2}"), "[0-9]{3}-[a-zé]{2}"),
    "choice": (StructuredOutputs(choice=["yes", "no", "maybe not"]), "yes|no|maybe not"),
    "Lark": (StructuredOutputs(grammar='start: "a" B "c"\nB: /[xy]{1,5}/'), "a[xy]{1,5}c"),
    "GBNF": (StructuredOutputs(grammar='root ::= "a" b b "c"\nb ::= "x" | "y"'), "a[xy][xy]c"),
    "tags": (
        StructuredOutputs(
            structural_tag={"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
        ),
        r"(?s)[^<]*(<f>.*</f>[^<]*)*",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_form_is_kept_at_any_temperature(plain, form, temperature):
    asked, pattern = FORMS[form]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=48, structured_outputs=asked, n=2)
    for one in plain.generate("x = ", params)[0].completions:
        assert one.error is None
        if one.finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, one.text), one.text


def test_the_text_of_a_stream_is_whole_and_so_is_that_of_token_by_token(plain):
    params = SamplingParams(seed=3, max_tokens=60, structured_outputs={"choice": ["yes", "never again"]})
    deltas = list(plain.stream("x = ", params))
    assert "".join(delta.text for delta in deltas) == deltas[-1].output.text
    assert deltas[-1].output.text in ("yes", "never again")


def test_logprobs_are_the_model_s_own_and_penalties_choose_among_what_fits(plain):
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=0, allowed_token_ids=plain.codec.encode("7"))
    (expected,) = plain.generate("x = ", free)[0].logprobs
    asked = {"regex": "7"}
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=2, repetition_penalty=1.5, structured_outputs=asked)
    (output,) = plain.generate("x = ", params)
    assert output.text == "7" and len(output.logprobs) == len(output.token_ids)
    assert output.logprobs[0].logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert len(output.logprobs[0].top) == 2


def test_a_stop_string_ends_a_structured_completion(plain):
    params = SamplingParams(seed=1, max_tokens=60, stop=("-",), structured_outputs={"regex": "[0-9]{3}-[a-z]{2}"})
    (output,) = plain.generate("x = ", params)
    assert re.fullmatch("[0-9]{3}", output.text) and output.stop_reason == "-"


def test_a_grammar_begins_behind_a_text(plain):
    asked = StructuredOutputs(choice=["42", "7"], after="\n")
    outputs = plain.generate(
        ["x = "] * 6, [SamplingParams(seed=s, max_tokens=60, structured_outputs=asked) for s in range(6)]
    )
    ended = [output.text for output in outputs if output.finish_reason is FinishReason.STOP]
    assert ended and all(text.partition("\n")[2] in ("42", "7") for text in ended)


HOSTILE = [
    {"regex": "(ab"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(.*a.{200})"},
    {"json": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}},
    {"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}},
    {"json": {"$ref": "#"}},
    {"json": {"type": "object", "properties": {"a": {"$ref": "https://nowhere.invalid/x"}}, "required": ["a"]}},
    {"json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}},
    {"grammar": "root ::= " + "(" * 3000},
    {"grammar": "start: missing"},
    {"structural_tag": {"structures": []}},
]


@pytest.mark.slow
def test_hostile_forms_end_alone_and_in_time(plain):
    quiet = [SamplingParams(seed=seed, max_tokens=12) for seed in range(3)]
    alone = [output.token_ids for output in plain.generate(["x = "] * 3, quiet)]
    for asked in HOSTILE:
        hostile = SamplingParams(seed=1, max_tokens=4, structured_outputs=asked)
        started = time.process_time()
        first, *others = plain.generate(["x = "] * 4, [hostile, *quiet])
        assert time.process_time() - started < 4.0, asked  # the others' twelve tokens included
        assert [output.token_ids for output in others] == alone, asked
        if first.finish_reason is FinishReason.ERROR:
            assert first.error.isprintable() and first.error.startswith("sampling.structured_outputs."), first.error
            assert len(first.error) < 700


@pytest.mark.slow
def test_prompts_files_and_the_command_line_take_it(tmp_path, capsys):
    line = {"prompt": "x = ", "max_tokens": 9, "structured_outputs": {"regex": "[ab]{3}"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    output = tmp_path / "out.jsonl"
    common = [f"prompts_file={tmp_path}/prompts.jsonl", f"output={output}", "device=cpu", "engine.cpu_cache_gib=0.2"]
    assert main(common) == 0
    assert re.fullmatch("[ab]{3}", json.loads(output.read_text())["text"])
    output.unlink()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x = "}) + "\n")
    assert main([*common, 'sampling.structured_outputs.choice=["a, ${b}", "c=d"]']) == 0
    assert json.loads(output.read_text())["text"] in ("a, ${b}", "c=d")
    assert main([*common, "sampling.structured_outputs.rejex=a"]) == 2
    assert "Did you mean 'sampling.structured_outputs.regex'?" in capsys.readouterr().err


def test_a_schema_from_python_is_closed_and_what_cannot_be_held_is_warned_of(plain, caplog):
    tags = {"type": "array", "items": {"enum": ["x"]}, "maxItems": 2, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}
    asked = StructuredOutputs(json=schema, whitespace=False)
    output = plain.generate("x = ", SamplingParams(seed=1, temperature=1.0, max_tokens=64, structured_outputs=asked))[0]
    assert output.finish_reason is FinishReason.STOP and list(json.loads(output.text)) == ["tags"]
    assert (
        "leave out what they cannot hold: sampling.structured_outputs.json.properties.tags.uniqueItems" in caplog.text
    )


def test_without_a_back_end_the_extra_is_named(plain, monkeypatch):
    from hookline.core.plugin import needs

    with LLM(device="cpu", engine=SIZES) as llm:
        monkeypatch.setattr(
            needs, "_missing_packages", lambda wanted: [one for one in wanted.packages if one == "llguidance"]
        )
        assert llm.generate("x = ", SamplingParams(max_tokens=1))[0].error is None
        (output,) = llm.generate("x = ", SamplingParams(structured_outputs={"regex": "a"}))
    assert output.error == (
        "sampling.structured_outputs needs a grammar back end (grammars 'llguidance': package 'llguidance' is not "
        'installed); pip install "hookline[grammar]" brings one'
    )
