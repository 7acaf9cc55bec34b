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

from hookline.core.assembly.resolve import resolve
from hookline.core.assembly.speculation import TargetModel
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


EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
"""A head's config.json, without the sizes that the model has."""


def eagle_config(model: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """The config.json of a head for a model."""
    return {**EAGLE, "vocab_size": model["vocab_size"], "hidden_size": model["hidden_size"], **changed}


def eagle_weights(config: Mapping[str, Any], model_hidden: int, num_streams: int = 3) -> Weights:
    """Random tensors of a head, without an embedding."""
    torch.manual_seed(1)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    kv, drawn = config.get("num_key_value_heads", heads) * size, config.get("draft_vocab_size", config["vocab_size"])
    shapes = {
        "fc": (hidden, num_streams * model_hidden),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (drawn, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return {
        **{f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()},
        **{f"{name}.weight": 1 + torch.randn(hidden) * 0.2 for name in norms},
        "d2t": torch.arange(drawn) * (config["vocab_size"] // drawn - 1),
        "t2d": torch.zeros(config["vocab_size"], dtype=torch.bool),
    }


def eagle_entries(
    config: Mapping[str, Any], weights: Weights, embedding_VH: Tensor, tokens_T: Tensor, hidden_TH: Tensor
) -> Tensor:
    """All entries of a request at once: the layer's stream (T, H)."""
    eps, heads, kv_heads = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    of = {name.removeprefix("midlayer.").removesuffix(".weight"): one for name, one in weights.items()}
    normed_TH = rms(hidden_TH, of["hidden_norm"], eps)
    x_TC = torch.cat([rms(embedding_VH[tokens_T], of["input_layernorm"], eps), normed_TH], -1)
    q, k, v = (
        (x_TC @ of[f"self_attn.{name}_proj"].T).unflatten(1, (count, -1)).transpose(0, 1)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    half = q.shape[-1] // 2
    angle_TF = torch.arange(len(tokens_T))[:, None] * config["rope_theta"] ** (-torch.arange(half) / half)
    turn_TF = torch.polar(torch.ones_like(angle_TF), angle_TF)
    q, k = (torch.complex(x[..., :half], x[..., half:]) * turn_TF for x in (q, k))
    score_HTT = (q @ k.conj().transpose(1, 2)).real / (2 * half) ** 0.5
    mask_TT = torch.full(score_HTT.shape[1:], -torch.inf).triu(1)
    attended_TC = ((score_HTT + mask_TT).softmax(-1) @ v).transpose(0, 1).flatten(1)
    first_TH = normed_TH if config.get("norm_before_residual") else hidden_TH
    stream_TH = first_TH + attended_TC @ of["self_attn.o_proj"].T
    inner_TH = rms(stream_TH, of["post_attention_layernorm"], eps)
    gated_TF = torch.nn.functional.silu(inner_TH @ of["mlp.gate_proj"].T) * (inner_TH @ of["mlp.up_proj"].T)
    return stream_TH + gated_TF @ of["mlp.down_proj"].T


def save_repeating(model: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """A model of Llama's form whose next token depends on the last one alone, and a head that is always right of it.

    The head's attention sees the newest entry alone, by keys and queries that no other distance agrees with, and its
    values are the embedding, less the hidden state that the layer adds to.
    """
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    base = transformers_model(model)
    with torch.no_grad():
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding_VD = base.model.embed_tokens.weight
        embedding_VD[:] = torch.randn(vocab, hidden)
        embedding_VD[:, 0] = 0
        embedding_VD *= ((hidden - 1) / embedding_VD.square().sum(-1, keepdim=True)).sqrt()
        embedding_VD[:, 0] = 1
    base.save_pretrained(folder / "model")
    config = eagle_config(model, num_key_value_heads=4)
    weights, eye_HH = eagle_weights(config, hidden), torch.eye(hidden)
    ones_2H = torch.zeros(hidden, 2 * hidden)
    ones_2H.unflatten(0, (4, 2, -1))[:, 0, :, 0] = 30
    changed = {
        "fc": eye_HH.repeat(1, 3) / 3,
        "self_attn.q_proj": ones_2H,
        "self_attn.k_proj": ones_2H.clone(),
        "self_attn.v_proj": torch.cat([eye_HH, -eye_HH], 1),
        "self_attn.o_proj": eye_HH.clone(),
        "mlp.down_proj": torch.zeros(hidden, config["intermediate_size"]),
        "input_layernorm": torch.ones(hidden),
        "hidden_norm": torch.ones(hidden),
        "norm": base.model.norm.weight.detach().clone(),
        "lm_head": base.lm_head.weight.detach().flip(0),
    }
    for name, tensor in changed.items():
        own = name if name in ("fc", "norm", "lm_head") else f"midlayer.{name}"
        weights[f"{own}.weight"] = tensor
    weights["d2t"] = vocab - 1 - 2 * torch.arange(vocab)
    save_weights(config, weights, folder / "head")
    return folder / "model", folder / "head"
