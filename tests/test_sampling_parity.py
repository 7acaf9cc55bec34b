"""Sampling parameters through the engine: against transformers token by token, and over every way of computing."""

import random
from pathlib import Path

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.checkpoint.checkpoint import load_tokenizer
from tests.hf_models import make_qwen3

BUNDLED = Path(__file__).parent.parent / "plugins/models/qwen3_tiny"
WAYS = {
    "plain": dict(),
    "tiny_pool": dict(num_blocks=9, block_size=16),
    "chunked_prompts": dict(max_num_batched_tokens=8, max_num_seqs=8),
    "one_at_a_time": dict(max_num_seqs=1),
    "overlap_tiny_pool": dict(overlap=True, num_blocks=9, block_size=16),
    "overlap_chunked_prompts": dict(overlap=True, max_num_batched_tokens=8, max_num_seqs=8),
}


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def bundled():
    with LLM(device="cpu") as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dict(repetition_penalty=1.4), dict(repetition_penalty=1.4)),
        (dict(repetition_penalty=0.8), dict(repetition_penalty=0.8)),
        (dict(bad_words=[[668], [609, 794, 1085]]), dict(bad_words_ids=[[668], [609, 794, 1085]])),
        (dict(logit_bias={362: -4.0, 300: 3.5}), dict(sequence_bias={(362,): -4.0, (300,): 3.5})),
        (
            dict(repetition_penalty=1.2, bad_words=[[668]], logit_bias={300: 2.0}),
            dict(repetition_penalty=1.2, bad_words_ids=[[668]], sequence_bias={(300,): 2.0}),
        ),
    ],
    ids=lambda options: "+".join(options),
)
def test_greedy_tokens_equal_transformers_under_its_processors(reference, bundled, ours, theirs):
    prompt = load_tokenizer(BUNDLED).encode("import os\n\n\ndef walk(path):\n")
    sequences = reference.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0, **theirs
    )
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, **ours)
    plain = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    found, without = bundled.generate([prompt, prompt], [params, plain])
    assert found.token_ids == sequences[0, len(prompt) :].tolist()
    assert found.token_ids != without.token_ids


@pytest.mark.slow
def test_every_draw_is_one_that_transformers_warpers_leave(reference, bundled):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    from transformers import RepetitionPenaltyLogitsProcessor as Repetition

    prompt = load_tokenizer(BUNDLED).encode("class Stack:\n")
    params = SamplingParams(
        temperature=1.5, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.3, max_tokens=64, seed=5, ignore_eos=True
    )
    tokens = bundled.generate([prompt], params)[0].token_ids
    warpers = LogitsProcessorList(
        [
            Repetition(1.3),
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    everything = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits_TV = reference(everything).logits[0]
    ranks = []
    for place, token in enumerate(tokens, start=len(prompt)):
        left_V = warpers(everything[:, :place], logits_TV[place - 1 : place].clone())[0]
        assert left_V[token] > -torch.inf
        ranks.append(int((left_V > left_V[token]).sum()))
    assert max(ranks) > 2  # they were draws, not the largest each time


# ---------------------------------------------------------------------------------- one request, computed in many ways

PARAMETERS = (
    dict(top_k=5),
    dict(top_p=0.6),
    dict(min_p=0.4, temperature=2.5),
    dict(repetition_penalty=1.4, temperature=0),
    dict(presence_penalty=1.0, frequency_penalty=0.7),
    dict(logit_bias={4: 3.0}, allowed_token_ids=list(range(40))),
    dict(bad_words=[[7], [4, 5], [5, 4]], top_k=30),
    dict(min_tokens=6),
    dict(),
    dict(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=-0.2),
)


def mixed_load():
    """Prompts of mixed lengths, some sharing prefixes; every parameter is used by some."""
    rng = random.Random(7)
    prompts = [[rng.randrange(96) for _ in range(length)] for length in (3, 17, 60, 33, 1, 48)]
    prompts += [[*prompts[2][:48], 5], [*prompts[2][:48], 6, 7], prompts[2], prompts[5]]
    params = [
        SamplingParams(max_tokens=20 + index, seed=index, ignore_eos=index != 7, **options)
        for index, options in enumerate(PARAMETERS)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(folder):
    """What each request gets in an engine of its own."""
    tokens = []
    for prompt, params in zip(*mixed_load(), strict=True):
        with LLM(folder, device="cpu") as llm:
            tokens.append(llm.generate([prompt], params)[0].token_ids)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["prefill_first", "chunked"])
@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_gets_the_tokens_each_request_gets_alone(folder, alone, scheduler, way):
    with LLM(folder, device="cpu", scheduler=scheduler, engine=WAYS[way]) as llm:
        outputs = llm.generate(*mixed_load())
        again = llm.generate(*(each[::-1] for each in mixed_load()))  # other rows, and prefixes in the cache
    assert [output.token_ids for output in outputs] == alone
    assert [output.token_ids for output in again[::-1]] == alone
    if "tiny_pool" in way:
        assert sum(output.num_preemptions for output in outputs) >= 3


@pytest.mark.slow
def test_each_parameter_changes_the_tokens(folder, alone):
    prompts, params = mixed_load()
    with LLM(folder, device="cpu") as llm:
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            plain = SamplingParams(
                temperature=one.temperature, max_tokens=one.max_tokens, seed=one.seed, ignore_eos=one.ignore_eos
            )
            same = llm.generate([prompt], plain)[0].token_ids == alone[index]
            assert same == (PARAMETERS[index] in ({}, {"min_tokens": 6})), PARAMETERS[index]


def test_a_row_of_the_table_forgets_the_parameters_of_its_last_request(folder):
    plain, strange = (
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **options)
        for options in ({}, {"repetition_penalty": 3.0, "allowed_token_ids": [1, 2, 3]})
    )
    with LLM(folder, device="cpu", engine=dict(max_num_seqs=2)) as llm:
        before = llm.generate([[1, 2, 3]], plain)[0].token_ids
        llm.generate([[4, 5], [6, 7]], strange)
        # A processor still runs for the row beside it, so what the last owner asked for would show.
        first, second = llm.generate([[1, 2, 3], [4, 5]], [plain, strange])
    assert first.token_ids == before
    assert set(second.token_ids) <= {1, 2, 3}


# ------------------------------------------------------------------------------------------------------------ defaults


def test_the_generation_config_fills_what_is_left_open_and_explicit_values_win(tmp_path, caplog):
    make_qwen3(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 1, "top_p": 0.9}'
    )
    with caplog.at_level("INFO", logger="hookline"), LLM(str(tmp_path), device="cpu") as llm:
        open_, greedy, all_tokens = llm.generate(
            [[1, 2, 3]] * 3,
            [
                SamplingParams(seed=1),
                SamplingParams(seed=1, temperature=0),
                SamplingParams(seed=1, temperature=5, top_k=0),
            ],
        )
    assert open_.token_ids == greedy.token_ids != all_tokens.token_ids
    assert "generation_config.json decides: temperature=0.6, top_k=1, top_p=0.9" in caplog.text


def test_a_bad_generation_config_is_named(tmp_path):
    from hookline.core.errors import CheckpointError

    make_qwen3(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match=r"generation_config.json: sampling.top_p=7 must be a number above 0"):
        LLM(str(tmp_path), device="cpu")


def test_texts_in_bad_words_are_found_at_a_beginning_and_after_a_space(bundled):
    greedy = dict(temperature=0, max_tokens=24, ignore_eos=True)
    free = bundled.generate("import os\n\n\ndef walk(path):\n", SamplingParams(**greedy))[0].text
    word = "path"
    assert f" {word} " in free
    found = bundled.generate("import os\n\n\ndef walk(path):\n", SamplingParams(**greedy, bad_words=(word,)))[0]
    forms = [token for form in (word, f" {word}") for token in bundled.codec.encode_word(form)]
    assert found.error is None and len(forms) == 2
    assert not set(forms) & set(found.token_ids)


def test_too_many_bad_words_are_told_as_what_they_become(bundled):
    many, long = (f"w{number}" for number in range(600)), "漢" * 3000
    for words, told in ((tuple(many), "its 600 words are 1200 sequences"), ((long,), "its 1 words are 2 sequences")):
        assert told in bundled.generate("x", SamplingParams(max_tokens=1, bad_words=words))[0].error
