"""How a model of transformers attends, found by one forward without data on the meta device.

The forward shows the arguments of attention in each layer, whatever names the config has for heads, windows and scales;
unsupported features are refused by name. Legend: T tokens, H heads, K kv heads, E head dim, D hidden, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, Runtime, StateRows
from hookline.core.errors import ConfigError, one_short_line
from hookline.core.layers import every_expert
from hookline.plugins.models.transformers.alibi import NUM_DIGITS, SLOPES, needs_no_positions, serve_alibi, widened
from hookline.plugins.models.transformers.attention import (
    PROBED,
    SERVED,
    LayerAttention,
    Mask,
    alike,
    attach,
    attention,
)
from hookline.plugins.models.transformers.chunks import CHUNKED, NUM_PARITIES, TEMPERATURE, hand_over_temperatures
from hookline.plugins.models.transformers.config import GUIDE, STATES, WITHOUT_ATTENTION, refuse
from hookline.plugins.models.transformers.experts import SERVED_EXPERTS
from hookline.plugins.models.transformers.layers import GivenPositions, pin_rope, typed_buffers
from hookline.plugins.models.transformers.rwkv import serve_rwkv
from hookline.plugins.models.transformers.scaled_experts import serve_scaled_experts
from hookline.plugins.models.transformers.states import (
    LayerStates,
    SeenStates,
    StateCache,
    UnservedStates,
    seen_forgetting,
)

NUM_TOKENS, FEW_TOKENS = 300, 19
"""Tokens of a forward without data; few for a model with states, some of which take one token at a time."""
NO_INTERFACE = "its attention does not go through transformers' attention interface"
NO_ATTENTION = LayerAttention(1, 1, 64)
"""The attention sizes in the spec of a model that never attends."""
NOT_DONE = ("alibi", "position_bias", "attention_bias", "indices", "topk_indices", "block_mask")
"""Arguments of an attention call that change its scores and that no kernels support."""


@dataclass(frozen=True)
class Facts:
    """The facts that a probing forward found. hidden_size: of the decoder's result. vocab_size: columns of the logits.

    layers: modules that attend or keep a state, in the order of the calls. uncalled: linears of the decoder that are
    not called, whose weights the model may use directly. cache_name: the argument in which a decoder with states takes
    its cache. unused: the decoder's modules that no token passes, such as towers for images; they are left out.
    """

    layers: tuple[LayerAttention | LayerStates, ...]
    hidden_size: int
    vocab_size: int
    uncalled: tuple[str, ...] = ()
    cache_name: str = ""
    unused: tuple[str, ...] = ()

    @property
    def attends(self) -> bool:
        """Whether any layer does."""
        return any(isinstance(layer, LayerAttention) for layer in self.layers)

    @property
    def attention(self) -> LayerAttention:
        """The heads of every layer that attends; if none does, any that fit."""
        return next((layer for layer in self.layers if isinstance(layer, LayerAttention)), NO_ATTENTION)

    @property
    def stateful(self) -> list[str]:
        """Names of the decoder's modules that keep states."""
        return list(dict.fromkeys(layer.module for layer in self.layers if isinstance(layer, LayerStates)))


class GivenHidden(nn.Module):
    """Replaces the decoder in a causal model and returns the hidden states that it was given: (N, D).

    So the causal model's own forward computes their logits, with all operations behind its head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_ND: Tensor | None = None

    @property
    def decoder(self) -> GivenHidden:
        """OPT's causal model calls its model's decoder."""
        return self

    def forward(self, *_: Any, **__: Any) -> GivenOutput:
        """The hidden states, with a batch dimension."""
        assert self.hidden_ND is not None
        return GivenOutput(self.hidden_ND.unsqueeze(0))


class GivenOutput:
    """The result of a decoder's forward, as causal models read it: only hidden states are set."""

    def __init__(self, hidden_1ND: Tensor) -> None:
        self.last_hidden_state = hidden_1ND

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def meta_model(config: PreTrainedConfig, model_class: Any) -> PreTrainedModel:
    """The causal model without memory for its parameters, which are float32.

    Not by transformers' own way: that sets torch's default dtype, which all threads of a process share.

    Raises: ConfigError if transformers cannot build it, or has its attention not replaced.
    """
    if getattr(model_class, "is_remote_code", lambda: False)():
        refuse(config.model_type, "code that comes with a checkpoint is never run")
    if config.model_type == "falcon":
        import hookline.plugins.models.transformers.falcon  # noqa: F401 - puts its attention where transformers looks
    try:
        with torch.device("meta"):
            config._attn_implementation, config._experts_implementation = SERVED, SERVED_EXPERTS
            model: Any = model_class(config).eval()
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (SERVED,):
            refuse(config.model_type, NO_INTERFACE, GUIDE)
        refuse(config.model_type, f"transformers cannot build it: {one_short_line(error)}")
    serve_alibi(model, attention)
    serve_scaled_experts(model)
    serve_rwkv(model)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        kind = "missing" if head is None else f"a {type(head).__name__}"
        refuse(config.model_type, f"its output head is {kind}, and only a plain linear is served as one", GUIDE)
    decoder_name(model)
    built: PreTrainedModel = model
    return built


def decoder_name(model: PreTrainedModel) -> str:
    """The attribute of a causal model that holds its decoder.

    Raises: ConfigError if there is none.
    """
    for name in (model.base_model_prefix, "model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    refuse(model.config.model_type, "its causal model does not have the decoder in a module of its own", GUIDE)


def _probed(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The model on the meta device with parameters of bfloat16, in which it must work as it does in float32."""
    model = meta_model(config, model_class)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules() if has_states(config) else ():
        for key in typed_buffers(module):
            module._buffers[key] = module._buffers[key].to(torch.bfloat16)  # type: ignore[union-attr]
    return model


def split(model: PreTrainedModel) -> tuple[nn.Module, GivenHidden]:
    """Take the decoder out of its causal model, and put a GivenHidden in its place."""
    decoder, given = getattr(model, decoder_name(model)), GivenHidden()
    for key, value in vars(decoder).items():
        if isinstance(value, int | float) and key not in vars(given):
            setattr(given, key, value)  # multipliers of the logits, as Falcon-H1's
    module: Any
    for module in decoder.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it would ask the device for token ids
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    setattr(model, decoder_name(model), given)
    return decoder, given


def probe(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Facts:
    """Run the model once without data, and see how each layer attends.

    Raises: ConfigError with the reason if it cannot be served.
    """
    model = _probed(config, model_class)
    decoder, given = split(model)
    pin_rope(decoder)
    hand_over_temperatures(decoder)
    positions = ["position_ids"] if takes_positions(decoder) else []
    seen = _Seen(config, is_encoder=getattr(config, "is_decoder", True) is False)
    attach(decoder, seen)
    num_tokens = num_trial_tokens(config)
    ones = torch.ones(1, num_tokens, dtype=torch.long, device="meta")
    counted = GivenPositions()
    counted.positions_T, places = ones[0], bool(positions) or needs_no_positions(decoder) or counted.serve(decoder)
    model.config._attn_implementation = PROBED
    seen_all = torch.ones(
        1, num_tokens, dtype=torch.long
    )  # with values: models of several kinds of layers look at them
    masks: Any = seen_all if positions else None
    if CHUNKED in (getattr(config, "layer_types", None) or ()):  # whose masks look at values of the forward's own
        masks = create_masks_for_generate(config, torch.empty(1, num_tokens, 0), None, None)
    inputs: dict[str, Any] = {"input_ids": ones, "use_cache": False} | dict.fromkeys(positions, ones)
    cache_name = "cache" if has_states(config) and "cache" in inspect.signature(decoder.forward).parameters else ""
    if not cache_name:
        _refuse_uncounted(config, model_class, places)
    if cache_name:
        inputs[cache_name] = cache = StateCache(config)
        seen.states = SeenStates(decoder, cache, seen.layers, torch.bfloat16)
    linears = {module: name for name, module in decoder.named_modules() if type(module) is nn.Linear}
    called: set[nn.Module] = set()
    hooks = [one.register_forward_pre_hook(lambda module, _: called.add(module)) for one in decoder.modules()]
    try:
        _run(decoder, config.model_type, attention_mask=masks, **inputs)
    except UnservedStates as error:
        refuse(config.model_type, str(error), GUIDE)
    for hook in hooks:
        hook.remove()
    if seen.states is not None:
        seen.states.stop()
    _refuse_unseen(config, decoder, seen.layers, called, places)
    model.config._attn_implementation = SERVED
    num_layers = len(seen.layers)
    with seen_forgetting(decoder, inputs.get(cache_name), seen.layers):
        hidden_TD = _run(decoder, config.model_type, **inputs)
    layers = tuple(seen.layers[:num_layers])
    given.hidden_ND = hidden_TD
    logits_TV = _run(model, config.model_type, input_ids=ones, use_cache=False, what="logits")
    uncalled = tuple(name for linear, name in linears.items() if linear not in called)
    attending = [layer for layer in layers if isinstance(layer, LayerAttention)]
    _refuse_shorter_caches(config, attending)
    attending = _alike(config.model_type, attending)
    layers = tuple(attending.pop(0) if isinstance(layer, LayerAttention) else layer for layer in layers)
    return Facts(layers, hidden_TD.shape[-1], logits_TV.shape[-1], uncalled, cache_name, _unused(decoder, called))


def takes_positions(decoder: nn.Module) -> bool:
    """Whether a decoder takes the position of each token in its sequence."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


def num_trial_tokens(config: PreTrainedConfig) -> int:
    """Tokens of a forward without data."""
    return FEW_TOKENS if has_states(config) else NUM_TOKENS


def has_states(config: PreTrainedConfig) -> bool:
    """Whether transformers' cache for this model has states."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # of sizes that do not fit, which the forward tells
        return False
    return any(hasattr(layer, "recurrent_states") for layer in layers)


def _unused(decoder: nn.Module, called: set[nn.Module]) -> tuple[str, ...]:
    """Names of the largest modules with modules of their own of which none was called."""
    found: list[str] = []
    for name, module in decoder.named_modules():
        is_idle = any(module.children()) and called.isdisjoint(module.modules())
        if name and is_idle and not name.startswith(tuple(f"{one}." for one in found)):
            found.append(name)
    return tuple(found)


def _refuse_uncounted(config: PreTrainedConfig, model_class: type[PreTrainedModel], places: bool) -> None:
    """Refuse models that need no forward to be refused: with other states, or without position_ids.

    places: whether the decoder takes position_ids.
    """
    if getattr(model_class, "_is_stateful", False) and not getattr(config, "layer_types", None):
        refuse(config.model_type, f"its layers {STATES}", GUIDE)
    if not places:
        refuse(config.model_type, "its forward takes no position_ids, as batches of several sequences need", GUIDE)


def _refuse_unseen(
    config: PreTrainedConfig, decoder: nn.Module, layers: list[Any], called: set[nn.Module], places: bool
) -> None:
    """Refuse a model that mixes tokens elsewhere than where it attends or keeps a state, where that can be seen.

    called: modules of the decoder, without towers that only images or sounds pass.
    """
    keepers = tuple({f"{layer.module}." for layer in layers if isinstance(layer, LayerStates)})
    for name, module in decoder.named_modules():
        is_called = isinstance(module, nn.Conv1d) and decoder.get_submodule(name.rpartition(".")[0]) in called
        if is_called and not name.startswith(keepers):
            refuse(config.model_type, f"{name} is a convolution, which mixes tokens outside of attention", GUIDE)
    if not layers:
        refuse(config.model_type, NO_INTERFACE, GUIDE)
    alone = [kind for kind in getattr(config, "layer_types", None) or () if kind in WITHOUT_ATTENTION]
    skipped = getattr(config, "cross_attention_layers", None) or ()  # of Mllama: without an image nothing passes them
    expected = getattr(config, "decoder_layers", config.num_hidden_layers) - len(alone) - len(skipped)
    if len(layers) < expected:
        which = f"{len(layers)} of {expected}"
        refuse(config.model_type, f"only {which} of its layers attend through transformers' attention interface", GUIDE)
    if not places and any(isinstance(layer, LayerAttention) for layer in layers):
        refuse(config.model_type, "its forward takes no position_ids, as batches of several sequences need", GUIDE)


def without_data(runtime: Runtime) -> Runtime:
    """A Runtime on the meta device for the same rank, with kernels and collectives that compute only shapes."""
    ranks = _Shapes(runtime.ranks.rank, runtime.ranks.size)
    return replace(
        runtime,
        device=torch.device("meta"),
        dtype=torch.bfloat16,  # on the meta device grouped products have no other
        ranks=ranks,  # type: ignore[arg-type]
        kernels=_Products(),  # type: ignore[arg-type]
        weights=None,
    )


def refuse_left_on_meta(model: nn.Module, model_type: str) -> None:
    """Refuse a model with tensors that are neither parameters nor buffers, which nothing fills.

    Raises: ConfigError with the name of one.
    """
    for name, module in model.named_modules():
        kept = {**vars(module), **module._parameters, **module._buffers}
        for key, value in kept.items():
            values = (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            )
            if key[:1] != "_" and any(isinstance(one, Tensor) and one.is_meta for one in values):
                refuse(model_type, f"{name}.{key} is neither a parameter nor a buffer, and is not filled")


@dataclass(frozen=True)
class _Shapes:
    """A rank among others that are not there: its collectives give tensors of the right shape."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_last(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, -1)


class AttendWithoutData:
    """Core's Attend on the meta device: gives shapes. size: ranks."""

    def __init__(self, layers: tuple[LayerAttention | LayerStates, ...], size: int) -> None:
        self.layers, self.size = layers, size

    def __call__(self, index: int, qkv_TC: Tensor, *_: Any) -> Tensor:
        layer = self.layers[index]
        assert isinstance(layer, LayerAttention)
        return qkv_TC[:, : max(1, layer.num_heads // self.size) * layer.head_dim]

    def states(self, index: int) -> StateRows:
        layer = self.layers[index]
        assert isinstance(layer, LayerStates)
        row_1 = torch.zeros(1, dtype=torch.long, device="meta")
        tensors = {
            name: torch.empty(1, *form.shape, dtype=getattr(torch, form.dtype or "bfloat16"), device="meta")
            for name, form in layer.cache.tensors
        }
        starts = np.array([0, FEW_TOKENS], dtype=np.int32)
        return StateRows(tensors, row_1, torch.from_numpy(starts), torch.ones(1) > 0, 0, FEW_TOKENS, starts)


class _Products:
    """The kernels that served models of transformers use, giving shapes."""

    linear = staticmethod(functional.linear)

    @staticmethod
    def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if weight_D.shape != x_TD.shape[-1:]:
            raise ValueError(f"a norm of {list(weight_D.shape)} over {x_TD.shape[-1]} features")
        return torch.empty_like(x_TD)

    @staticmethod
    def expert_mlp(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
        return every_expert(x_TD, expert_TA, weight_TA, gate_up_XFD[:1], down_XDF[:1])


class _Seen:
    """Attention that computes nothing and records each layer's arguments."""

    def __init__(self, config: PreTrainedConfig, *, is_encoder: bool) -> None:
        self.model_type, self.is_encoder = config.model_type, is_encoder
        self.longest = getattr(config, "max_position_embeddings", None)
        self.layers: list[Any] = []
        self.states: SeenStates | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        *,
        module: nn.Module,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        if self.states is not None:
            self.states.attends()
        (_, num_heads, _, head_dim), num_kv_heads = query.shape, key.shape[1]
        if key.shape[2] != query.shape[2]:
            refuse(self.model_type, "it attends over other keys than one of each token", GUIDE)
        value_dim = value.shape[-1]
        if value.shape[:-1] != key.shape[:-1] or key.shape[-1] != head_dim:
            sizes = f"{head_dim}, {key.shape[-1]} and {value_dim}"
            refuse(self.model_type, f"its queries, keys and values have unlike head dims or counts ({sizes})", GUIDE)
        window = self._window(mask, options)
        for name in NOT_DONE:
            if options.get(name) is not None:
                refuse(self.model_type, f"its attention takes {name}", GUIDE)
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            refuse(self.model_type, "its attention is not causal", GUIDE)
        form = _form(options.get("scaling"), options.get("softcap"), head_dim)
        chunk = window if isinstance(mask, Mask) and mask.is_chunked else None
        if chunk is not None and form.softcap is not None:
            refuse(self.model_type, "it attends in chunks with soft caps", GUIDE)
        if SLOPES in options or chunk is not None:
            num_more = NUM_PARITIES if chunk is not None else NUM_DIGITS
            head_dim, form = widened(head_dim, num_more), replace(form, scale=form.scale or head_dim**-0.5)
        if value_dim > head_dim:
            head_dim, form = value_dim, replace(form, scale=form.scale or head_dim**-0.5)
        temperature = getattr(module, TEMPERATURE, None)
        layer = LayerAttention(num_heads, num_kv_heads, head_dim, window, form, sinks_H is not None)
        self.layers.append(replace(layer, chunk=chunk, temperature=temperature))
        return query.new_empty(*query.transpose(1, 2).shape[:-1], value_dim)

    def _window(self, mask: Any, options: Mapping[str, Any]) -> int | None:
        if mask is None:
            return options.get("sliding_window")
        fault = mask.fault if isinstance(mask, Mask) else "it uses a mask of its own making"
        if fault is not None and self.is_encoder:
            fault = "it is an encoder, whose tokens see later ones (is_decoder is false)"
        if fault is not None:
            refuse(self.model_type, fault, GUIDE)
        window: int | None = mask.window
        if mask.is_chunked and self.longest is not None and window is not None and window >= self.longest:
            return None  # no sequence leaves the first chunk
        return window


def _form(scaling: float | None, softcap: float | None, head_dim: int) -> AttentionForm:
    usual = head_dim**-0.5
    is_usual = scaling is None or abs(scaling - usual) <= 1e-6 * usual
    form = AttentionForm(None if is_usual else float(scaling or 0), softcap or None)
    return form if form.features else PLAIN_ATTENTION


def tried(compute: Callable[[], Tensor], model_type: str, what: str) -> Tensor:
    """The result of `compute`, which runs on tensors without data.

    Raises: ConfigError with the reason if it fails. what: the name of the computation in the error.
    """
    try:
        with torch.no_grad():
            return compute()
    except (ConfigError, UnservedStates):
        raise
    except Exception as error:
        told = one_short_line(error)
        if Mask.__name__ in str(error):
            refuse(model_type, "it works on attention masks itself, and none is built here", GUIDE)
        if "meta tensor" in told or "torch.nonzero" in told:
            refuse(
                model_type, f"its {what} looks at values of tensors on the host, which a step must not wait for", GUIDE
            )
        refuse(model_type, f"its {what} cannot be computed here: {told}", GUIDE)


def _run(module: nn.Module, model_type: str, *, what: str = "forward", **inputs: Any) -> Tensor:
    output: Any = tried(lambda: module(**inputs), model_type, what)
    result: Tensor = output[0] if isinstance(output, tuple) else output.get("logits", output.get("last_hidden_state"))
    return result[0]


def _alike(model_type: str, layers: list[LayerAttention]) -> list[LayerAttention]:
    sizes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    for num_heads, num_kv_heads, _ in sizes:
        if num_heads % num_kv_heads:
            refuse(
                model_type, f"num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = {num_heads}"
            )
    try:
        return alike(layers)
    except ValueError:
        refuse(model_type, f"its layers have unlike heads (heads, kv heads, head dim): {sorted(sizes)}", GUIDE)


def _refuse_shorter_caches(config: PreTrainedConfig, layers: list[LayerAttention]) -> None:
    """Refuse a layer whose mask sees more than its cache keeps.

    transformers' tokens depend on how a prompt is cut then.
    """
    length = getattr(config, "max_position_embeddings", None)
    caches = [cache for cache in DynamicCache(config=config).layers if hasattr(cache, "keys")]  # without states
    for layer, cache in zip(layers, caches, strict=False):
        kept = getattr(cache, "sliding_window", None)
        if isinstance(kept, int) and (layer.window or kept + 1) > kept and not (length and length <= kept):
            seen = "every token" if layer.window is None else f"{layer.window} tokens"
            refuse(
                config.model_type,
                f"its masks let a layer see {seen}, and its cache keeps {kept} (sliding_window)",
                GUIDE,
            )
