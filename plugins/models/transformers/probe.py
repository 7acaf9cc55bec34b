"""How a model of transformers attends, found by one forward without data on the meta device.

Whatever the config calls its heads, windows and scales, the forward shows what is asked of attention in each layer, and
what this engine does not do is refused by name. Legend: T tokens, H heads, K kv heads, E head dim, D hidden, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, Ranks, Runtime
from hookline.core.errors import ConfigError, one_short_line
from hookline.plugins.models.transformers.attention import PROBED, SERVED, LayerAttention, Mask, attach
from hookline.plugins.models.transformers.config import STATES, refuse
from hookline.plugins.models.transformers.experts import SERVED_EXPERTS
from hookline.plugins.models.transformers.layers import pin_rope

NUM_TOKENS = 300
NO_INTERFACE = "its attention does not go through transformers' attention interface"
NOT_DONE = ("alibi", "position_bias", "attention_bias", "indices", "topk_indices", "block_mask")
"""Arguments of an attention call that change its scores, and which no kernels here know."""


@dataclass(frozen=True)
class Facts:
    """What a forward showed. hidden_size: of what leaves the decoder; vocab_size: columns of the logits."""

    layers: tuple[LayerAttention, ...]
    hidden_size: int
    vocab_size: int


class GivenHidden(nn.Module):
    """Stands in a causal model's place of the decoder and returns hidden states that it was given: (N, D).

    So the causal model's own forward computes logits of them, whatever it does after its head.
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
    """What a decoder's forward returns, as causal models read it: only hidden states are set."""

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
            refuse(config.model_type, NO_INTERFACE)
        refuse(config.model_type, f"transformers cannot build it: {one_short_line(error)}")
    if not isinstance(model.get_output_embeddings(), nn.Linear) or model.base_model is model:
        refuse(config.model_type, "it has no decoder with an output head")
    built: PreTrainedModel = model
    return built


def _probed(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The same with parameters of bfloat16, in which everything must work that works in float32."""
    model = meta_model(config, model_class)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def split(model: PreTrainedModel) -> tuple[nn.Module, GivenHidden]:
    """Take the decoder out of its causal model, and put what stands for it in its place."""
    decoder, given = model.base_model, GivenHidden()
    module: Any
    for module in decoder.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it would ask the device for token ids
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    setattr(model, model.base_model_prefix, given)
    return decoder, given


def probe(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Facts:
    """Run the model once without data, and see how each layer attends.

    Raises: ConfigError with the reason if it cannot be served.
    """
    model = _probed(config, model_class)
    decoder, given = split(model)
    pin_rope(decoder)
    if any(isinstance(one, nn.Conv1d) for one in decoder.modules()):
        refuse(config.model_type, STATES)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        refuse(config.model_type, "its forward takes no position_ids, as batches of several sequences need")
    seen = _Seen(config.model_type)
    attach(decoder, seen)
    ones = torch.ones(1, NUM_TOKENS, dtype=torch.long, device="meta")
    model.config._attn_implementation = PROBED
    _run(decoder, config.model_type, input_ids=ones, attention_mask=ones, position_ids=ones, use_cache=False)
    layers = tuple(seen.layers)
    if not layers:
        refuse(config.model_type, NO_INTERFACE)
    if len(layers) < config.num_hidden_layers:
        which = f"{len(layers)} of {config.num_hidden_layers}"
        refuse(config.model_type, f"only {which} of its layers attend through transformers' attention interface")
    model.config._attn_implementation = SERVED
    hidden_TD = _run(decoder, config.model_type, input_ids=ones, position_ids=ones, use_cache=False)
    given.hidden_ND = hidden_TD
    logits_TV = _run(model, config.model_type, input_ids=ones, use_cache=False, what="logits")
    _refuse_unlike(config.model_type, layers)
    return Facts(layers, hidden_TD.shape[-1], logits_TV.shape[-1])


def check_ranks(
    run: Callable[[PreTrainedModel, Runtime], Any], config: PreTrainedConfig, model_class: Any, ranks: Ranks
) -> None:
    """Run this rank's part of the model once without data: whether what its plan shards fits together.

    run: puts the rank's layers into a model. Raises: ConfigError with what does not fit.
    """
    runtime = Runtime(torch.device("meta"), torch.bfloat16, _Shapes(ranks.rank, ranks.size), _Products())  # type: ignore[arg-type]
    model = _probed(config, model_class)
    run(model, runtime)
    decoder, _ = split(model)
    pin_rope(decoder)
    attach(decoder, lambda query, *_, **__: query.transpose(1, 2))
    ones = torch.ones(1, NUM_TOKENS, dtype=torch.long, device="meta")
    _run(
        decoder, config.model_type, what=f"plan for tp={ranks.size}", input_ids=ones, position_ids=ones, use_cache=False
    )


@dataclass(frozen=True)
class _Shapes:
    """A rank among others that are not there: its collectives give tensors of the right shape."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_last(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, -1)


class _Products:
    """Kernels for linears alone."""

    linear = staticmethod(functional.linear)


class _Seen:
    """Attention that computes nothing and keeps what each layer asked for."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.layers: list[LayerAttention] = []

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
        (_, num_heads, _, head_dim), num_kv_heads = query.shape, key.shape[1]
        if key.shape[2] != query.shape[2]:
            refuse(self.model_type, "it attends over other keys than one of each token")
        if value.shape != key.shape or key.shape[-1] != head_dim:
            sizes = f"{head_dim}, {key.shape[-1]} and {value.shape[-1]}"
            refuse(self.model_type, f"its queries, keys and values have unlike head dims or counts ({sizes})")
        window = self._window(mask, options)
        for name in NOT_DONE:
            if options.get(name) is not None:
                refuse(self.model_type, f"its attention takes {name}")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            refuse(self.model_type, "its attention is not causal")
        form = _form(options.get("scaling"), options.get("softcap"), head_dim)
        self.layers.append(LayerAttention(num_heads, num_kv_heads, head_dim, window, form, sinks_H is not None))
        return query.transpose(1, 2)

    def _window(self, mask: Any, options: Mapping[str, Any]) -> int | None:
        if mask is None:
            return options.get("sliding_window")
        fault = mask.fault if isinstance(mask, Mask) else "it uses a mask of its own making"
        if fault is not None:
            refuse(self.model_type, fault)
        window: int | None = mask.window
        return window


def _form(scaling: float | None, softcap: float | None, head_dim: int) -> AttentionForm:
    usual = head_dim**-0.5
    is_usual = scaling is None or abs(scaling - usual) <= 1e-6 * usual
    form = AttentionForm(None if is_usual else float(scaling or 0), softcap or None)
    return form if form.features else PLAIN_ATTENTION


def _run(module: nn.Module, model_type: str, *, what: str = "forward", **inputs: Any) -> Tensor:
    try:
        with torch.no_grad():
            output = module(**inputs)
    except ConfigError:
        raise
    except Exception as error:
        if Mask.__name__ in str(error):
            refuse(model_type, "it works on attention masks itself, and none is built here")
        refuse(model_type, f"its {what} needs what is not here: {one_short_line(error)}")
    result: Tensor = output[0] if isinstance(output, tuple) else output.get("logits", output.get("last_hidden_state"))
    return result[0]


def _refuse_unlike(model_type: str, layers: tuple[LayerAttention, ...]) -> None:
    sizes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(sizes) > 1:
        refuse(model_type, f"its layers have unlike heads (heads, kv heads, head dim): {sorted(sizes)}")
    ((num_heads, num_kv_heads, _),) = sizes
    if num_heads % num_kv_heads:
        refuse(model_type, f"num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = {num_heads}")
