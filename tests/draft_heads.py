"""Checkpoints that carry a head for drafts, and what such a head guesses in plain torch.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hookline.core.assembly.draft_target import TargetModel
from hookline.core.assembly.resolve import resolve
from hookline.core.config.settings import validate
from hookline.core.plugin.host import PluginHost
from tests.small_models import transformers_model

Weights = dict[str, Tensor]
Entries = Callable[[Tensor, Tensor], Tensor]
"""entries(tokens_T, hidden_TH): all entries of a request at once, (T, H)."""


def save_weights(config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """A folder with this config.json and these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def save_nextn(
    config: Mapping[str, Any], folder: Path, change: Callable[[Weights], None] | None = None
) -> tuple[Weights, Entries]:
    """A checkpoint of DeepSeek's family with a layer behind the last one: its tensors, and what the layer computes.

    The layer is the last one of transformers' model of one layer more. change: the tensors, before they are saved.
    """
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    kinds = {"mlp_layer_types": [*config["mlp_layer_types"], "sparse"]} if "mlp_layer_types" in config else {}
    larger = transformers_model({**config, "num_hidden_layers": number + 1, **kinds})
    larger.save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, name = load_file(folder / "model.safetensors"), f"model.layers.{number}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{name}.{norm}.weight"] = 1 + torch.randn(hidden) * 0.2
    weights[f"{name}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.3
    if change is not None:
        change(weights)
    own = {key: config[key] for key in kinds}
    save_weights({**stated, "num_hidden_layers": number, "num_nextn_predict_layers": 1, **own}, weights, folder)
    return weights, partial(_nextn_entries, larger.model, name, weights, config.get("rms_norm_eps", 1e-6))


def _nextn_entries(larger: Any, name: str, weights: Weights, eps: float, tokens_T: Tensor, hidden_TD: Tensor) -> Tensor:
    """All entries at once, (T, D) behind the layer's norm. hidden_TD: of the model behind its norm, or of the layer."""
    token_TD = rms(weights["model.embed_tokens.weight"][tokens_T], weights[f"{name}.enorm.weight"], eps)
    both_TD = torch.cat([token_TD, rms(hidden_TD, weights[f"{name}.hnorm.weight"], eps)], -1)
    x_1TD = (both_TD @ weights[f"{name}.eh_proj.weight"].T).unsqueeze(0)
    positions_1T = torch.arange(len(tokens_T)).unsqueeze(0)
    mask_TT = torch.full((len(tokens_T), len(tokens_T)), -torch.inf).triu(1)
    out = larger.layers[-1](
        x_1TD,
        attention_mask=mask_TT[None, None],
        position_ids=positions_1T,
        position_embeddings=larger.rotary_emb(x_1TD, positions_1T),
    )
    out_1TD = out[0] if isinstance(out, tuple) else out
    return rms(out_1TD.view(len(tokens_T), -1), weights[f"{name}.shared_head.norm.weight"], eps)


def target_of(model: str, folder: Path, drafter: Any, **keys: Any) -> TargetModel:
    """The model of a checkpoint as a drafter sees it, on the CPU in float32."""
    host = PluginHost.load()
    tree = {"model": {"name": model, "checkpoint": str(folder)}, "device": "cpu", "dtype": "float32", **keys}
    return TargetModel(resolve(validate({**tree, "drafter": drafter}, host), host))


def rms(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm."""
    return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D


def repeat_layer(weights: Weights) -> None:
    """Make the layer behind the last one of a model of one layer draft what the model draws, whatever it attends to.

    The next token then depends on the last one alone, and the layer computes of its embedding what the model does.
    """
    embedding_VD = weights["model.embed_tokens.weight"]
    embedding_VD += embedding_VD.abs().sum(-1, keepdim=True) == 0  # transformers makes that of the padding zero
    embedding_VD /= embedding_VD.square().mean(-1, keepdim=True).sqrt()
    for name in list(weights):
        if ".self_attn.o_proj." in name:
            weights[name] = torch.zeros_like(weights[name])
        if name.startswith("model.layers.0."):
            weights[name.replace("layers.0.", "layers.1.")] = weights[name].clone()
    hidden = embedding_VD.shape[1]
    weights["model.layers.1.eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    weights["model.layers.1.enorm.weight"] = torch.ones(hidden)
    weights["model.layers.1.shared_head.norm.weight"] = weights["model.norm.weight"].clone()
