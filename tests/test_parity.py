"""The main job against transformers, token by token, and against itself over every way of computing a request."""

import json
import random
from pathlib import Path

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.checkpoint.checkpoint import load_tokenizer
from hookline.core.outputs import FinishReason
from hookline.plugins.models.qwen3 import Qwen3
from tests.hf_models import build, make_qwen3, one_prompt, run

BUNDLED = Path(__file__).parent.parent / "plugins/models/qwen3_tiny"
MAX_LOGIT_DIFFERENCE = 1e-4  # float32 sums in another order; larger would mean another computation


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def transformers_greedy(model, prompt, num_tokens):
    """Tokens and logits of transformers' own cached greedy decoding."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def our_logits(folder, tokens, first):
    """Logits of Qwen3 with the torch kernels, for the tokens from `first` on, in one prefill."""
    from hookline.core.checkpoint.load import load_checkpoint

    config = json.loads((Path(folder) / "config.json").read_text())
    model, kernels, cache = build(Qwen3, config)
    load_checkpoint(folder, model.weight_targets())
    return run(model, kernels, cache, one_prompt(tokens))[first:]


def random_prompts(vocab_size, lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
GRID = {
    "gqa_1": dict(num_attention_heads=4, num_key_value_heads=4),
    "gqa_2": dict(num_attention_heads=4, num_key_value_heads=2),
    "gqa_4": dict(num_attention_heads=4, num_key_value_heads=1),
    "gqa_8": dict(num_attention_heads=8, num_key_value_heads=1),
    "wide_heads": dict(head_dim=24, hidden_size=32, num_attention_heads=4),
    "narrow_heads": dict(head_dim=8, hidden_size=64, num_attention_heads=4),
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(tie_word_embeddings=False),
    "bias": dict(attention_bias=True),
    "linear_rope": dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "yarn_rope": dict(rope_parameters=YARN),
    "one_file": dict(max_shard_size="1GB"),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", GRID.values(), ids=GRID.keys())
def test_greedy_tokens_equal_transformers(options, tmp_path):
    reference = make_qwen3(tmp_path, **options)
    prompts = random_prompts(96, (1, 7, 40))
    expected = [transformers_greedy(reference, prompt, 64) for prompt in prompts]
    with LLM(str(tmp_path), device="cpu") as llm:
        outputs = llm.generate(prompts, greedy(64))
    for prompt, output, (tokens, logits_NV) in zip(prompts, outputs, expected, strict=True):
        assert output.token_ids == tokens
        ours_NV = our_logits(tmp_path, [*prompt, *tokens[:-1]], len(prompt) - 1)
        assert (ours_NV - logits_NV).abs().max() <= MAX_LOGIT_DIFFERENCE


@pytest.mark.slow
def test_the_bundled_checkpoint_equals_transformers_for_128_tokens():
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    prompt = load_tokenizer(BUNDLED).encode("import os\n\n\ndef walk(path):\n")
    tokens, logits_NV = transformers_greedy(reference, prompt, 128)
    with LLM(device="cpu") as llm:
        assert llm.generate(prompt, greedy(128))[0].token_ids == tokens
    ours_NV = our_logits(BUNDLED, [*prompt, *tokens[:-1]], len(prompt) - 1)
    assert (ours_NV - logits_NV).abs().max() <= MAX_LOGIT_DIFFERENCE


# ---------------------------------------------------------------------------------- one request, computed in many ways

WAYS = {
    "tiny_pool": dict(engine=dict(num_blocks=9, block_size=16)),
    "chunked_prompts": dict(engine=dict(max_num_batched_tokens=8, max_num_seqs=8)),
    "one_at_a_time": dict(engine=dict(max_num_seqs=1)),
    "no_prefix_caching": dict(engine=dict(prefix_caching=False)),
    "block_size_1": dict(engine=dict(block_size=1)),
    "block_size_256": dict(engine=dict(block_size=256)),
    "overlap": dict(engine=dict(overlap=True)),
    "overlap_tiny_pool": dict(engine=dict(overlap=True, num_blocks=9, block_size=16)),
    "overlap_chunked_prompts": dict(engine=dict(overlap=True, max_num_batched_tokens=8, max_num_seqs=8)),
    "block_size_1_tiny_pool": dict(engine=dict(block_size=1, num_blocks=130)),
}


def mixed_load():
    """Prompts of mixed lengths, some sharing prefixes; greedy and sampled, each with a seed."""
    prompts = random_prompts(96, (3, 17, 60, 33, 1, 48))
    prompts += [[*prompts[2][:48], 5], [*prompts[2][:48], 6, 7], prompts[2]]
    params = [
        SamplingParams(temperature=float(index % 2), max_tokens=20 + index, seed=index, ignore_eos=True)
        for index in range(len(prompts))
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
@pytest.mark.parametrize("scheduler", ["prefill_first", "chunked", "longest_first"])
@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_gets_the_tokens_each_request_gets_alone(folder, alone, scheduler, way):
    with LLM(folder, device="cpu", scheduler=scheduler, **WAYS[way]) as llm:
        outputs = llm.generate(*mixed_load())
    assert [output.token_ids for output in outputs] == alone
    if "tiny_pool" in way:
        assert sum(output.num_preemptions for output in outputs) >= 3


@pytest.mark.slow
def test_prefix_hits_give_the_same_tokens(folder, alone):
    prompts, params = mixed_load()
    with LLM(folder, device="cpu") as llm:
        llm.generate(prompts, params)
        again = llm.generate(prompts, params)
    assert [output.token_ids for output in again] == alone
    assert sum(output.num_cached_tokens for output in again) >= 16 * 10


def test_the_order_of_requests_does_not_matter(folder, alone):
    prompts, params = mixed_load()
    with LLM(folder, device="cpu") as llm:
        outputs = llm.generate(prompts[::-1], params[::-1])
    assert [output.token_ids for output in outputs[::-1]] == alone


def test_sampled_tokens_differ_between_seeds_and_repeat_with_one(folder):
    with LLM(folder, device="cpu") as llm:
        draws = [
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, seed=seed, ignore_eos=True))[0].token_ids
            for seed in (1, 1, 2)
        ]
    assert draws[0] == draws[1] != draws[2]


# ------------------------------------------------------------------------------------------------------- the front end


def test_text_ids_and_chat_prompts_are_served_together():
    with LLM(device="cpu") as llm:
        ids = llm.codec.encode("import os\n")
        chat = [{"role": "user", "content": "hello"}]
        text, by_ids, answer = llm.generate(["import os\n", ids, chat], greedy(8))
    assert text.token_ids == by_ids.token_ids
    assert text.prompt == "import os\n" and by_ids.prompt is None
    assert text.text and answer.text
    opening = llm.codec.encode("<|im_start|>assistant\n")
    assert answer.prompt_token_ids[-len(opening) :] == opening


def test_a_stop_token_ends_the_request_and_is_left_out_of_the_text():
    with LLM(device="cpu") as llm:
        free = llm.generate("import os\n", greedy(8))[0]
        stop = free.token_ids[3]
        output = llm.generate("import os\n", greedy(8, stop_token_ids=(stop,)))[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert output.text == llm.codec.decode(output.token_ids[:-1])


def test_a_bad_prompt_is_refused_alone():
    with LLM(device="cpu", engine=dict(max_model_len=64)) as llm:
        outputs = llm.generate(["import os\n", "", [1] * 64, [99999], "class "], greedy(4))
    assert [output.finish_reason == FinishReason.ERROR for output in outputs] == [False, True, True, True, False]
    assert "empty" in outputs[1].error and "max_model_len=64" in outputs[2].error and "99999" in outputs[3].error


def test_an_interrupted_generate_leaves_nothing_for_the_next_one():
    class Interrupts:
        def update(self, *counts):
            raise KeyboardInterrupt

        def close(self):
            pass

    with LLM(device="cpu") as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["import os\n"] * 3, greedy(20), progress=Interrupts())
        assert not llm.engine.has_work
        assert len(llm.generate("class ", greedy(4))) == 1


@pytest.mark.slow
def test_two_engines_live_side_by_side(folder):
    with LLM(device="cpu") as one, LLM(folder, device="cpu", seed=3) as other:
        first = one.generate("import os\n", greedy(6))[0].token_ids
        other.generate([[1, 2, 3]], greedy(6))
        assert one.generate("import os\n", greedy(6))[0].token_ids == first


@pytest.mark.slow
def test_random_weights_need_no_files_and_depend_on_the_seed_alone():
    def tokens(seed):
        shape = json.loads((BUNDLED / "config.json").read_text())
        model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": shape}
        with LLM(model=model, device="cpu", seed=seed) as llm:
            return llm.generate([[1, 2, 3]], greedy(8))[0].token_ids

    assert tokens(1) == tokens(1) != tokens(2)
