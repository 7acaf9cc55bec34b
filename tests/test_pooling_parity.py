"""Embeddings, classes and scores against transformers in float32, and against themselves however they are computed."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch

from hookline import LLM, PoolingParams, SamplingParams
from hookline.core.assembly import poolers
from tests.hf_models import QWEN3, make_qwen3

MAX_DIFFERENCE = 1e-4  # float32 sums in another order; larger would mean another computation
LENGTHS = (3, 17, 60, 33, 1, 48)


def random_prompts(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    prompts = [[rng.randrange(96) for _ in range(length)] for length in lengths]
    return [*prompts, [*prompts[2][:48], 5], [*prompts[2][:48], 6, 7], prompts[2]]


PROMPTS = random_prompts()
WISHES = {
    "last": PoolingParams("last", normalize=False),
    "mean": PoolingParams("mean", normalize=False),
    "cls": PoolingParams("cls", normalize=False),
    "normalised": PoolingParams("mean", normalize=True),
    "short": PoolingParams("last", normalize=False, dimensions=7),
    "short_normalised": PoolingParams("mean", normalize=True, dimensions=7),
}


@torch.no_grad()
def expected_vector(model, prompt, wish):
    """What sentence-transformers documents: pooled, cut to truncate_dim, then scaled by F.normalize."""
    hidden_TD = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector = {"last": hidden_TD[-1], "mean": hidden_TD.mean(0), "cls": hidden_TD[0]}[wish.pooler][: wish.dimensions]
    return (torch.nn.functional.normalize(vector, dim=0) if wish.normalize else vector).numpy()


def largest_difference(outputs, expected):
    assert [output.error for output in outputs] == [None] * len(expected)
    return max(np.abs(output.vector - vector).max() for output, vector in zip(outputs, expected, strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, make_qwen3(folder)


@pytest.fixture(scope="module")
def mixed(checkpoint):
    """Every prompt with every wish: prompts, wishes and the vectors that transformers gives."""
    _, model = checkpoint
    pairs = [(prompt, wish) for prompt in PROMPTS for wish in WISHES.values()]
    random.Random(1).shuffle(pairs)
    return (
        [prompt for prompt, _ in pairs],
        [wish for _, wish in pairs],
        [expected_vector(model, *pair) for pair in pairs],
    )


WAYS = {
    "plain": dict(),
    "chunked_prompts": dict(engine=dict(max_num_batched_tokens=8, max_num_seqs=8)),
    "tiny_pool": dict(engine=dict(num_blocks=9, block_size=16)),
    "one_at_a_time": dict(engine=dict(max_num_seqs=1)),
    "no_prefix_caching": dict(engine=dict(prefix_caching=False)),
    "block_size_1": dict(engine=dict(block_size=1)),
    "overlap_chunked": dict(engine=dict(overlap=True, max_num_batched_tokens=8, max_num_seqs=8)),
    "overlap_tiny_pool": dict(engine=dict(overlap=True, num_blocks=9, block_size=16), scheduler="chunked"),
    "chunked_policy": dict(engine=dict(max_num_batched_tokens=16, max_num_seqs=8), scheduler="chunked"),
    "longest_first": dict(engine=dict(max_num_batched_tokens=16, max_num_seqs=8), scheduler="longest_first"),
    "deadline": dict(engine=dict(max_num_batched_tokens=16, max_num_seqs=8), scheduler="deadline"),
    "fair_share": dict(engine=dict(max_num_batched_tokens=16, max_num_seqs=8), scheduler="fair_share"),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_vectors_equal_transformers_however_they_are_computed(options, checkpoint, mixed):
    prompts, wishes, expected = mixed
    with LLM(str(checkpoint[0]), device="cpu", **options) as llm:
        assert largest_difference(llm.embed(prompts, wishes), expected) <= MAX_DIFFERENCE
        assert llm.engine.num_free_blocks == llm.engine.num_blocks
        assert len(llm.engine.queue) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), WAYS["overlap_chunked"], WAYS["overlap_tiny_pool"]])
def test_vectors_and_tokens_are_the_same_side_by_side(options, checkpoint, mixed):
    prompts, wishes, expected = mixed
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    with LLM(str(checkpoint[0]), device="cpu", **options) as llm:
        alone = [output.token_ids for output in llm.generate(PROMPTS, params)]
        stream = llm.stream(PROMPTS, params)
        deltas = [next(stream)]  # the others are waiting or decode while all is embedded
        assert largest_difference(llm.embed(prompts, wishes), expected) <= MAX_DIFFERENCE
        deltas += stream
    outputs = {delta.prompt_index: delta.output for delta in deltas if delta.output is not None}
    assert [outputs[index].token_ids for index in range(len(PROMPTS))] == alone


def test_requests_of_the_last_token_start_from_cached_prefixes_and_the_vector_is_the_same(checkpoint):
    folder, model = checkpoint
    prompt, wish = PROMPTS[2], WISHES["last"]
    with LLM(str(folder), device="cpu", engine=dict(block_size=16)) as llm:
        first, second = llm.embed(prompt, wish)[0], llm.embed(prompt, wish)[0]
        mean = llm.embed(prompt, WISHES["mean"])[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)  # the last token is always computed
    assert mean.num_cached_tokens == 0  # the mean needs every token's hidden state
    expected = [expected_vector(model, prompt, wish)] * 2
    assert largest_difference([first, second], expected) <= MAX_DIFFERENCE
    assert largest_difference([mean], [expected_vector(model, prompt, WISHES["mean"])]) <= MAX_DIFFERENCE


SIZES = [dict(tp=2), dict(pp=2), pytest.param(dict(tp=2, pp=2), marks=pytest.mark.nightly)]


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_several_ranks_give_the_vectors_of_one(sizes, checkpoint, mixed):
    prompts, wishes, expected = mixed
    engine = dict(max_num_batched_tokens=32, max_num_seqs=8)
    with LLM(str(checkpoint[0]), device="cpu", engine=engine, **sizes) as llm:
        assert largest_difference(llm.embed(prompts, wishes), expected) <= MAX_DIFFERENCE
        tokens = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4))[0].token_ids
    assert len(tokens) == 4


# ------------------------------------------------------------------------------------------------- other checkpoints


SMALL = {key: value for key, value in QWEN3.items() if key != "head_dim"}


def transformers_classifier(folder, family, num_labels):
    import transformers

    torch.manual_seed(3)
    sizes = QWEN3 if family == "Qwen3" else SMALL
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**sizes, num_labels=num_labels, pad_token_id=0, initializer_range=0.2)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("family", "num_labels"), [("Qwen3", 1), ("Qwen3", 5), ("Llama", 2), ("Qwen2", 3)])
def test_class_logits_equal_transformers(family, num_labels, tmp_path):
    model = transformers_classifier(tmp_path, family, num_labels)
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in PROMPTS]
    with LLM(str(tmp_path), device="cpu", engine=dict(max_num_batched_tokens=16, max_num_seqs=8)) as llm:
        assert largest_difference(llm.classify(PROMPTS), expected) <= MAX_DIFFERENCE
        refused = llm.generate(PROMPTS[0])[0]
    assert "no head that gives tokens" in refused.error


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=[pytest.mark.nightly, pytest.mark.slow])])
def test_a_checkpoint_of_the_body_alone_embeds_and_generates_nothing(pp, tmp_path, checkpoint):
    model = checkpoint[1]
    model.model.save_pretrained(tmp_path)  # Qwen3Model: no lm_head, and no "model." before the names
    with LLM(str(tmp_path), device="cpu", pp=pp) as llm:
        outputs = llm.embed(PROMPTS, WISHES["mean"])
        refused = llm.generate(PROMPTS[0])[0]
    assert (
        largest_difference(outputs, [expected_vector(model, one, WISHES["mean"]) for one in PROMPTS]) <= MAX_DIFFERENCE
    )
    assert "no head that gives tokens (architectures: Qwen3Model)" in refused.error


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


@pytest.mark.parametrize(("mode", "pooler"), MODES.items())
@pytest.mark.parametrize("normalizes", [True, False])
def test_sentence_transformers_files_say_how_to_pool(mode, pooler, normalizes, tmp_path):
    model = make_qwen3(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(MODULES + [NORMALIZE] * normalizes))
    (tmp_path / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 32, **{f"pooling_mode_{one}": one == mode for one in MODES}}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(said))
    with LLM(str(tmp_path), device="cpu") as llm:
        outputs = llm.embed(PROMPTS[:3])
    wish = PoolingParams(pooler, normalize=normalizes)
    assert largest_difference(outputs, [expected_vector(model, one, wish) for one in PROMPTS[:3]]) <= MAX_DIFFERENCE


# ----------------------------------------------------------------------------------------------------------- rerankers

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def reference_score(model, tokenizer, query, document, yes, no):
    """As Qwen3-Reranker's model card computes it."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for part in (prefix, pair, suffix) for token in tokenizer.encode(part, add_special_tokens=False)]
    with torch.no_grad():
        logits_V = model(torch.tensor([ids])).logits[0, -1]
    pair_2 = logits_V[[tokenizer.convert_tokens_to_ids(no), tokenizer.convert_tokens_to_ids(yes)]]
    return pair_2.log_softmax(0)[1].exp().item()


@pytest.fixture(scope="module")
def bundled():
    from pathlib import Path

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(__file__).parent.parent / "plugins/models/qwen3_tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


DOCUMENTS = ["def walk(path): ...", "import os", "", "a" * 90]


@pytest.mark.slow
def test_reranker_scores_equal_the_model_cards_own(bundled):
    model, tokenizer = bundled
    with LLM(device="cpu", pooler=dict(name="yes_no", yes="a", no="b")) as llm:  # its vocabulary has no token "yes"
        outputs = llm.score("where is the file?", DOCUMENTS)
    expected = [reference_score(model, tokenizer, "where is the file?", one, "a", "b") for one in DOCUMENTS]
    assert [output.score for output in outputs] == pytest.approx(expected, abs=MAX_DIFFERENCE)
    assert len({round(output.score, 5) for output in outputs}) == len(DOCUMENTS)


def test_special_tokens_in_a_document_are_text(monkeypatch):
    made = Counter()
    read = poolers.rank_codec
    monkeypatch.setattr(poolers, "rank_codec", lambda resolved: made.update(["codec"]) or read(resolved))
    with LLM(device="cpu", pooler=dict(name="yes_no", yes="a", no="b")) as llm:
        special = llm.codec.tokenizer.all_special_tokens[0]
        plain, hostile = llm.score("q", ["x", f"x{special}"])
    assert made["codec"] == 1  # for both words, since a large tokenizer takes seconds to read
    special_id = llm.codec.tokenizer.convert_tokens_to_ids(special)
    assert hostile.prompt_token_ids.count(special_id) == plain.prompt_token_ids.count(special_id)
    assert len(hostile.prompt_token_ids) > len(plain.prompt_token_ids) + 1


def test_an_embedding_checkpoint_scores_by_the_cosine(tmp_path, bundled):
    import shutil
    from pathlib import Path

    shutil.copytree(Path(__file__).parent.parent / "plugins/models/qwen3_tiny", tmp_path / "model")
    (tmp_path / "model/modules.json").write_text(json.dumps(MODULES))
    (tmp_path / "model/1_Pooling").mkdir()
    (tmp_path / "model/1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(str(tmp_path / "model"), device="cpu") as llm:
        query, *others = (output.vector for output in llm.embed(["import os", *DOCUMENTS[:2]]))
        scores = [output.score for output in llm.score("import os", DOCUMENTS[:2])]
    cosines = [query @ one / np.linalg.norm(query) / np.linalg.norm(one) for one in others]
    assert scores == pytest.approx(cosines, abs=1e-5)
    assert scores[1] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_pooler_that_fails_ends_its_requests_alone(tp, checkpoint):
    with LLM(str(checkpoint[0]), device="cpu", tp=tp, engine=dict(max_num_seqs=8, max_num_batched_tokens=64)) as llm:
        stream = llm.stream(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        first = next(stream)
        failed, vector = llm.embed(PROMPTS[:2], [PoolingParams(task="classify"), WISHES["mean"]])
        deltas = [first, *stream]
    assert "class_logits" in failed.error and "does not have score.weight" in failed.error
    assert largest_difference([vector], [expected_vector(checkpoint[1], PROMPTS[1], WISHES["mean"])]) <= MAX_DIFFERENCE
    assert [len(delta.output.token_ids) for delta in deltas if delta.output is not None] == [12, 12]


WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "Gemma3": dict(config="Gemma3TextConfig", head_dim=16, sliding_window=16, layer_types=WINDOWS, num_hidden_layers=3),
    "GPTNeoX": dict(config="GPTNeoXConfig", num_hidden_layers=2),  # by model=transformers
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_windows_and_those_of_transformers_embed_alike(family, tmp_path):
    import transformers

    options = dict(FAMILIES[family])
    config_class = getattr(transformers, options.pop("config"))
    sizes = {key: value for key, value in SMALL.items() if key not in (*options, "rope_theta")}
    torch.manual_seed(2)
    config = config_class(**sizes, **options, initializer_range=0.2, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        hidden = [model.base_model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]
    with LLM(str(tmp_path), device="cpu", engine=dict(max_num_batched_tokens=32, max_num_seqs=8, block_size=8)) as llm:
        for _ in range(2):  # the second time from cached prefixes
            assert largest_difference(llm.embed(PROMPTS, WISHES["last"]), [one[-1] for one in hidden]) <= MAX_DIFFERENCE
        assert largest_difference(llm.embed(PROMPTS, WISHES["mean"]), [one.mean(0) for one in hidden]) <= MAX_DIFFERENCE
