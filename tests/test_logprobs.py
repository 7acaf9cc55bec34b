"""Log-probabilities against transformers, and over every way of computing a request."""

import math
from pathlib import Path

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.checkpoint.checkpoint import load_tokenizer
from tests.hf_models import make_qwen3
from tests.test_sampling_parity import WAYS, mixed_load

BUNDLED = Path(__file__).parent.parent / "plugins/models/qwen3_tiny"
TOLERANCE = 1e-4  # float32 sums in another order
PROMPT = "import os\n\n\ndef walk(path):\n"


@pytest.fixture(scope="module")
def expected_logprobs():
    """Log-probabilities (T, V) of every token that follows, by transformers' own forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()

    def score(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return score


def check_scores(scores, tokens, expected_TV, num_top):
    """scores[i] is about tokens[i], whose distribution is expected_TV[i]."""
    assert len(scores) == len(tokens)
    for one, token, expected_V in zip(scores, tokens, expected_TV, strict=True):
        assert one.token_id == token
        assert abs(one.logprob - float(expected_V[token])) < TOLERANCE
        assert len(one.top) == num_top
        values, ids = expected_V.topk(num_top) if num_top else (torch.empty(0), torch.empty(0))
        for (found_id, found), id_, value in zip(one.top, ids.tolist(), values.tolist(), strict=True):
            assert abs(found - value) < TOLERANCE
            assert found_id == id_ or abs(float(expected_V[found_id]) - value) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0, logprobs=5),
        dict(temperature=1.3, seed=3, logprobs=0),
        dict(temperature=1.3, seed=3, logprobs=20, top_k=30, repetition_penalty=1.3, logit_bias={300: 5.0}),
        dict(temperature=0, logprobs=3, min_tokens=8, stop_token_ids=(258, 362)),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_model_itself(expected_logprobs, options):
    prompt = load_tokenizer(BUNDLED).encode(PROMPT)
    with LLM(device="cpu") as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=40, **options))[0]
    expected_TV = expected_logprobs([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
    check_scores(output.logprobs, output.token_ids, expected_TV, options["logprobs"])
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("engine", [dict(), dict(max_num_batched_tokens=5, max_num_seqs=4)], ids=str)
def test_prompt_logprobs_equal_a_scored_forward_pass_also_when_the_prompt_is_in_the_cache(expected_logprobs, engine):
    prompt = load_tokenizer(BUNDLED).encode(PROMPT * 4)
    expected_TV = expected_logprobs(prompt)
    with LLM(device="cpu", engine=dict(block_size=4, **engine)) as llm:
        for _ in range(2):
            params = SamplingParams(max_tokens=2, prompt_logprobs=2, temperature=0)
            output = llm.generate([prompt], params)[0]
            assert output.prompt_logprobs[0] is None and output.logprobs is None
            check_scores(output.prompt_logprobs[1:], prompt[1:], expected_TV[:-1], 2)
            assert output.num_cached_tokens == 0
        assert llm.generate([prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens > 0


def test_a_prompt_of_one_token_has_nothing_to_score():
    with LLM(device="cpu") as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs == [None]


def test_all_of_a_small_vocabulary_can_be_scored(tmp_path):
    make_qwen3(tmp_path, vocab_size=12)
    with LLM(str(tmp_path), device="cpu") as llm:
        params = SamplingParams(max_tokens=3, logprobs=12, prompt_logprobs=7, ignore_eos=True)
        output = llm.generate([[1, 2, 3]], params)[0]
    for one in output.logprobs:
        assert sorted(id_ for id_, _ in one.top) == list(range(12))
        assert abs(sum(math.exp(logprob) for _, logprob in one.top) - 1) < TOLERANCE
    assert [len(one.top) for one in output.prompt_logprobs[1:]] == [7, 7]


def test_scores_of_long_prompts_are_computed_piece_by_piece(expected_logprobs, monkeypatch):
    monkeypatch.setattr("hookline.core.worker.results.scores.ROWS_AT_ONCE", 3)
    prompt = load_tokenizer(BUNDLED).encode(PROMPT)
    with LLM(device="cpu") as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=1))[0]
    check_scores(output.prompt_logprobs[1:], prompt[1:], expected_logprobs(prompt)[:-1], 0)
    assert len(output.logprobs) == 1


def scored_load():
    """The mixed load of the parity tests, in which some requests want scores of some kind."""
    from dataclasses import replace

    prompts, params = mixed_load()
    wanted = [dict(logprobs=3), {}, dict(prompt_logprobs=1), dict(logprobs=0, prompt_logprobs=0), dict(logprobs=1)]
    return prompts, [replace(one, **wanted[index % 5]) for index, one in enumerate(params)]


@pytest.fixture(scope="module")
def alone(folder):
    found = []
    for prompt, params in zip(*scored_load(), strict=True):
        with LLM(folder, device="cpu") as llm:
            found.append(llm.generate([prompt], params)[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["prefill_first", "chunked"])
@pytest.mark.parametrize("way", WAYS)
def test_scores_do_not_depend_on_the_way_a_request_is_computed(folder, alone, scheduler, way):
    with LLM(folder, device="cpu", scheduler=scheduler, engine=WAYS[way]) as llm:
        outputs = llm.generate(*scored_load())
    for output, expected in zip(outputs, alone, strict=True):
        assert output.token_ids == expected.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            found, wanted = getattr(output, name), getattr(expected, name)
            assert (found is None) == (wanted is None)
            for one, other in zip(found or (), wanted or (), strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < TOLERANCE
                    assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.slow
def test_scores_are_written_to_json(tmp_path):
    import json

    from hookline.core.run.command import main

    path = tmp_path / "out.jsonl"
    sampling = ["sampling.max_tokens=2", "sampling.logprobs=1", "sampling.prompt_logprobs=0"]
    assert main(["prompt=import os", "device=cpu", f"output={path}", *sampling]) == 0
    line = json.loads(path.read_text())
    assert [one["token_id"] for one in line["logprobs"]] == line["token_ids"]
    assert line["prompt_logprobs"][0] is None and line["prompt_logprobs"][1]["top"] == []
