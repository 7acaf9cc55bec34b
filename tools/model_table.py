"""Writes docs/models.md from the registry and the presets: which architectures there are, and what each of them does.

Run `python tools/model_table.py` after registering a model or a preset; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.core.config.settings import validate
from hookline.core.contracts import FullAttention, ModelSpec, RecurrentState, SlidingWindow
from hookline.core.distributed.partition import even_part, head_parts
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF, presets_in

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RANKS = (1, 2, 4, 8, 16)
"""Numbers of ranks that are tried."""
SIZES = ("intermediate_size", "moe_intermediate_size")
"""Keys of sizes that ranks must divide."""
HEAD = """# Models

Generated from the registry by `python tools/model_table.py`; a test keeps it true. `model=NAME` chooses one by name;
with `model=auto` a checkpoint is served by the model that claims the `architectures` of its config.json. Whatever a
checkpoint asks for and a model does not implement is refused by name, before a weight is read.

Each model equals transformers token by token, in float32, on random small checkpoints: alone, in crowds, in
chunks, after preemptions, from the prefix cache, at `tp=2` (`tests/test_model_parity.py`, `tests/test_parity.py`). `pp`
says which can be cut into [stages](several_gpus.md#stages-pp2).

As with transformers, what a checkpoint stores decides: where its config.json ties the head to the embedding,
another head that is stored is served, with a warning, and a head that is stored alone is the embedding, too.
Buffers that models no longer store (`rotary_emb.inv_freq`, causal masks, `position_ids`) are left out. Layers
that draft tokens are loaded for [`drafter=mtp`](speculation.md#heads-that-read-the-models-hidden-states).

Of a checkpoint that also sees or hears (`text_config` in its config.json), the language model alone is served, by the
model that claims the checkpoint or its language model, else by `transformers`: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Mistral
3, Ministral 3, InternVL, LLaVA, SmolVLM, GLM-4V, Gemma 3 and 4, Aya Vision, LFM2-VL, Kimi K2.5, Voxtral,
Phi-4-multimodal, Qwen2.5-Omni and Qwen3-Omni (the thinker), PaddleOCR-VL, DeepSeek-OCR 2, Granite 4 Vision and others.
Towers, projectors, talkers and layers that draft tokens are not loaded. A request with an image is
refused. Tokens equal transformers' own of the same folder (`tests/test_wrapped_parity.py`).

| model | checkpoints it claims | `pp` | what it is |
|---|---|---|---|
"""
PRESETS_HEAD = """
## Presets

Read from their published sizes; `kernels=` lists the entries that serve one. Checkpoints may be
[quantised](quantization.md).

| preset | checkpoint | layers | asks of attention | head dim | `tp=` | `kernels=` |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Shown:
    """A preset and the spec that its published sizes give."""

    name: str
    checkpoint: str
    config: dict[str, Any]
    spec: ModelSpec


def page() -> str:
    """The whole file."""
    host = PluginHost.load(environ={})
    return HEAD + _lines(_models(host)) + PRESETS_HEAD + _lines(_presets(host))


def _lines(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _models(host: PluginHost) -> Iterator[tuple[str, ...]]:
    for entry in sorted(host.registry.of_kind("model"), key=lambda entry: entry.name):
        claims = ", ".join("all others" if name == "*" else f"`{name}`" for name in entry.architectures)
        stages = "yes" if getattr(entry.load(), "runs_in_stages", False) else "no"
        yield f"`{entry.name}`", claims or "none", stages, entry.help


def _presets(host: PluginHost) -> Iterator[tuple[str, ...]]:
    for shown in _shown(host):
        spec = shown.spec
        asks = ", ".join(sorted(spec.attention_features)) or "nothing"
        tp, kernels = ", ".join(map(str, _ranks(shown))), ", ".join(_kernels(host, spec))
        yield f"`{shown.name}`", f"`{shown.checkpoint}`", _layers(spec), asks, str(spec.head_dim), tp, kernels


def _shown(host: PluginHost) -> Iterator[Shown]:
    for preset in presets_in(CONF, "hookline"):
        if preset.kind == "model":
            option = validate({"model": preset.name}, host).model
            entry = host.choose("model", option.name)
            spec = entry.load().spec(option.config.random_shape)
            yield Shown(preset.name, option.config.checkpoint, option.config.random_shape, spec)


def _layers(spec: ModelSpec) -> str:
    """How many layers keep what, e.g. 5 full, 29 of 1024 tokens."""
    kinds = {FullAttention: "full", RecurrentState: "with a state"}
    windows = [layer.num_tokens for layer in spec.cache_layers if isinstance(layer, SlidingWindow)]
    named = [kinds[type(layer)] for layer in spec.cache_layers if type(layer) in kinds]
    counted = [f"{named.count(kind)} {kind}" for kind in dict.fromkeys(named)]
    return ", ".join([*counted, *(f"{windows.count(size)} of {size} tokens" for size in dict.fromkeys(windows))])


def _ranks(shown: Shown) -> list[int]:
    """The numbers of ranks that split its heads and its feed-forwards."""
    return [size for size in RANKS if _is_split(shown, LocalRanks(0, size))]


def _is_split(shown: Shown, ranks: LocalRanks) -> bool:
    try:
        head_parts(shown.spec.num_heads, shown.spec.num_kv_heads, ranks)
        for key in SIZES:
            even_part(shown.config.get(key, 0), ranks, key)
    except ConfigError:
        return False
    return True


def _kernels(host: PluginHost, spec: ModelSpec) -> Iterator[str]:
    for entry in host.registry.of_kind("kernels"):
        takes_any = not entry.needs.head_dims or spec.value_dim is not None
        fits = takes_any or spec.head_dim in entry.needs.head_dims
        if fits and spec.attention_features <= set(entry.needs.attention):
            yield f"`{entry.name}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
