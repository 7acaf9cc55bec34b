"""Any causal decoder of transformers, its attention over core's paged KV cache, its linears sharded by its own plan.

transformers has the network. probe.py finds out which of its models can be served, and attention.py passes their
attention to core. Legend: T tokens, N rows whose logits are wanted, D hidden, V vocabulary (of this rank).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hookline.core.contracts import Attend, FullAttention, ModelSpec, Runtime, WeightTarget
from hookline.plugins.models.transformers.attention import LayerAttention, PagedAttention, attach
from hookline.plugins.models.transformers.chunks import hand_over_temperatures
from hookline.plugins.models.transformers.config import max_position, original_length, read_config, refuse
from hookline.plugins.models.transformers.experts import (
    DOWN,
    PACKED,
    SUMMED,
    ServedExperts,
    attach_experts,
    rank_shape,
)
from hookline.plugins.models.transformers.layers import (
    LINEAR_STYLES,
    REPLICATED,
    GivenPositions,
    Plan,
    ServedHead,
    ServedLinear,
    is_linear,
    marked,
    padded_embedding,
    pin_rope,
    rank_part,
    share_modules,
    typed_buffers,
    use_kernel_norms,
    without_shared,
)
from hookline.plugins.models.transformers.probe import (
    AttendWithoutData,
    Facts,
    decoder_name,
    has_states,
    meta_model,
    num_trial_tokens,
    probe,
    refuse_left_on_meta,
    split,
    takes_positions,
    tried,
    without_data,
)
from hookline.plugins.models.transformers.scaled_experts import (
    TRANSPOSED_STYLES,
    ScaledExperts,
    stored_apart,
    stored_transposed,
)
from hookline.plugins.models.transformers.states import StateCache, serve_states
from hookline.plugins.models.transformers.taps import last_norm, shown_layers
from hookline.plugins.models.transformers.weights import StoredNames, parameter_targets, refuse_other_forms

_log = logging.getLogger("hookline")
SPARSITY = "activation_sparsity"
"""The attribute of Gemma 3n's MLPs that compare each activation with the mean of all, for which every rank needs all.
"""


class TransformersModel:
    """A decoder of transformers and its head. Implements core's Model, RenamesTensors and FitsTargets."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        read = config, _, facts = _read(json.dumps(hf_config, sort_keys=True))
        trial = TransformersModel.__new__(TransformersModel)
        trial._build(*read, without_data(runtime))
        trial._run_without_data(config.model_type, facts)
        self._build(*read, runtime)
        original = original_length(config)
        if original is not None and runtime.max_model_len > original and runtime.ranks.rank == 0:
            _log.info(
                "longrope: long factors for every request, since engine.max_model_len=%d may exceed the original %d "
                "tokens; set engine.max_model_len=%d for the short ones",
                *(runtime.max_model_len, original, original),
            )
        if runtime.device.type != "meta":  # where a command that loads no weights builds it
            for module in (self.decoder, self.model):
                refuse_left_on_meta(module, config.model_type)

    def _build(
        self, config: PreTrainedConfig, model_class: type[PreTrainedModel], facts: Facts, runtime: Runtime
    ) -> None:
        model = meta_model(config, model_class)
        unused = without_shared(model, [f"{decoder_name(model)}.{name}" for name in facts.unused])
        for name in unused:
            model.set_submodule(name, nn.Module())
        share_modules(model)
        plan = Plan(_plan(model, runtime), facts.attention.num_kv_heads)
        self.names = StoredNames(model, unused)
        if runtime.weights is not None:
            runtime.weights.rename(self.names.name)
        self.targets, head = _served(model, plan, runtime, facts)
        share_modules(model)  # once more, since linears have been replaced
        refuse_other_forms(self.names, self.targets)
        self.targets |= _allocate(model, self.names, plan, runtime)
        self.targets = self.names.join_parts(self.targets)
        self._fill_tied_bias(model)
        self.names.known = set(self.targets)
        self.decoder, self.given = split(model)
        hand_over_temperatures(self.decoder)
        use_kernel_norms(self.decoder, runtime)
        self.cache = {facts.cache_name: StateCache(config)} if facts.cache_name else {}
        self.attention = PagedAttention(facts.layers, runtime.ranks, self.cache.get(facts.cache_name))
        attach(self.decoder, self.attention)
        for name in facts.stateful:
            serve_states(self.decoder.get_submodule(name), self.attention.with_states)
        self.takes_positions, self.positions = takes_positions(self.decoder), GivenPositions()
        self.positions.serve(self.decoder)
        attach_experts(self.decoder, ServedExperts(runtime, sums=SUMMED in plan.styles.values()))
        self.model = model
        self.num_columns = head.part.size

    def _fill_tied_bias(self, model: PreTrainedModel) -> None:
        """Give a head the bias that its model holds beside it, as BERT's does."""
        ties = getattr(model, "all_tied_weights_keys", None) or {}
        for name, source in ties.items():
            if name.endswith(".bias") and {name, source} <= self.targets.keys():
                self.targets[source], self.targets[name] = self.targets[name], WeightTarget.ignored()

    def _run_without_data(self, model_type: str, facts: Facts) -> None:
        """Compute a step without data, so that a model which cannot be computed is refused at the start.

        Raises: ConfigError with the first fault.
        """
        size = self.attention.ranks.size
        ones_T = torch.ones(num_trial_tokens(self.model.config), dtype=torch.long, device="meta")
        what = "forward" if size == 1 else f"plan for tp={size}"
        attend: Any = AttendWithoutData(facts.layers, size)
        hidden_TD = tried(lambda: self.forward(ones_T, ones_T, attend), model_type, what)
        tried(lambda: self.logits(hidden_TD), model_type, "logits")

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model."""
        config, _, facts = _read(json.dumps(hf_config, sort_keys=True))
        first, caches = facts.attention, tuple(layer.cache for layer in facts.layers)
        attending = [layer for layer in facts.layers if isinstance(layer, LayerAttention)]
        features = {feature for layer in attending for feature in layer.form.features}
        if any(layer.has_sinks for layer in attending):
            features.add("sinks")
        return ModelSpec(
            num_layers=len(facts.layers),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            max_position=max_position(config, attends=facts.attends),
            layers=caches if set(caches) != {FullAttention()} else (),
            attention=frozenset(features),
        )

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        return self.targets

    def targets_for(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightTarget]:
        """See FitsTargets."""
        return self.names.as_stored(self.targets, shapes)

    def tensor_name(self, stored: str) -> str | None:
        """See RenamesTensors."""
        return self.names.name(stored)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        self.attention.begin(attend, positions_T)
        self.positions.positions_T = positions_T
        inputs = {"input_ids": token_ids_T.unsqueeze(0), **self.cache}
        if self.takes_positions:
            inputs["position_ids"] = positions_T.unsqueeze(0)
        with shown_layers(self.decoder, len(self.attention.layers), attend):
            output = self.decoder(**inputs, attention_mask=None, use_cache=False)
        hidden_TD: Tensor = output[0][0]
        return hidden_TD

    def final_norm(self, stream_XD: Tensor) -> Tensor:
        """See NormsStreams."""
        normed_XD: Tensor = last_norm(self.decoder)(stream_XD)
        return normed_XD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        self.given.hidden_ND = hidden_ND
        like_ids_1N = hidden_ND[:, 0].unsqueeze(0)  # nothing but its shape is looked at
        logits_NV: Tensor = self.model(input_ids=like_ids_1N, use_cache=False).logits[0]
        self.given.hidden_ND = None
        if self.num_columns < logits_NV.shape[1]:
            logits_NV[:, self.num_columns :].fill_(-torch.inf)
        return logits_NV


@lru_cache(maxsize=8)
def _read(hf_config: str) -> tuple[PreTrainedConfig, type[PreTrainedModel], Facts]:
    config, model_class = read_config(json.loads(hf_config))
    facts = probe(config, model_class)
    max_position(config, attends=facts.attends)
    return config, model_class, facts


def _plan(model: PreTrainedModel, runtime: Runtime) -> dict[str, str]:
    """The tensor-parallel plan, under the names of the causal model; empty for a single rank.

    Raises: ConfigError if the model has none and there are several ranks, or for a style that is not known here.
    """
    if runtime.ranks.size == 1:
        return {}
    prefix, config = decoder_name(model), model.config
    own = getattr(config, "base_model_tp_plan", None) or {}
    if not own:
        refuse(
            config.model_type, f"transformers has no tensor-parallel plan for it; take tp=1, not {runtime.ranks.size}"
        )
    plan = {f"{prefix}.{name}": style for name, style in own.items()}
    for name, module in model.named_modules():
        if getattr(module, SPARSITY, 0.0):
            linears = re.sub(r"\d+", "*", f"{name}.")
            plan = {key: style for key, style in plan.items() if not key.startswith(linears)}
        if isinstance(module, ScaledExperts):
            keys = [re.sub(r"\d+", "*", f"{name}.{key}") for key in module._parameters]
            plan |= {key: TRANSPOSED_STYLES.get(plan[key], plan[key]) for key in keys if key in plan}
    return plan


def _served(
    model: PreTrainedModel, plan: Plan, runtime: Runtime, facts: Facts
) -> tuple[dict[str, WeightTarget], ServedHead]:
    """Put our linears and our head into their places; returns where their tensors and the embedding's go."""
    untyped: Any = model
    head, embedding = untyped.get_output_embeddings(), untyped.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    is_tied = head.weight is embedding.weight
    targets = {f"{names[embedding]}.weight": WeightTarget.whole(padded_embedding(embedding, runtime))}
    served_head = ServedHead(names[head], head, runtime, embedding.weight if is_tied else None)
    model.set_submodule(names[head], served_head)
    targets |= served_head.targets()
    stateful, unused = (
        tuple(f"{decoder_name(model)}.{name}" for name in names) for names in (facts.stateful, facts.uncalled)
    )
    for module, name in names.items():
        style = plan.style(name)
        if style not in (None, *REPLICATED) and any(name.startswith(f"{keeper}.") for keeper in stateful):
            refuse(model.config.model_type, f"its tensor-parallel plan splits {name}, which keeps a state; take tp=1")
        if name in unused:
            continue
        if runtime.weights is not None and isinstance(module, Conv1D):
            why = (
                f"{name} is a Conv1D, whose matrix checkpoints hold transposed, and no quantization reads or makes one"
            )
            refuse(model.config.model_type, why, "serve an unquantised checkpoint without quantization=")
        if is_linear(module) and module is not head and not _stays_float32(model, f"{name}.weight"):
            if style not in (None, *LINEAR_STYLES):
                _refuse_style(model, name, style)
            linear = ServedLinear(name, module, style, plan, runtime)
            model.set_submodule(name, linear)
            targets |= linear.targets()
        elif style not in (None, *REPLICATED, SUMMED) and module is not embedding:
            _refuse_style(model, name, style)
    return targets, served_head


def _allocate(model: PreTrainedModel, names: StoredNames, plan: Plan, runtime: Runtime) -> dict[str, WeightTarget]:
    """Give all other parameters and buffers memory, and the buffers their values; returns where tensors go."""
    targets: dict[str, WeightTarget] = {}
    untyped: Any = model
    embedding = untyped.get_input_embeddings()
    for module_name, module in model.named_modules():
        module.__dict__.pop("_is_hf_initialized", None)
        if isinstance(module, ServedLinear | ServedHead):
            continue
        for key, value in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{module_name}.{key}".removeprefix(".")
            if value is None or (module is embedding and key == "weight"):
                continue
            style, shape, part = plan.style(name), value.shape, None
            if style in (PACKED, DOWN) and plan.style(module_name) == SUMMED:
                features = shape[1] // 2 if style == PACKED else shape[-1]
                part = rank_part(features, runtime, f"the features of the experts of {module_name}")
                shape = rank_shape(shape, style, part.size)
            elif style not in (None, *REPLICATED):
                _refuse_style(model, name, style)
            is_parameter = key in module._parameters
            is_typed = is_parameter or (has_states(model.config) and key in typed_buffers(module))
            dtype = runtime.dtype if is_typed and not _stays_float32(model, name) else value.dtype
            memory = torch.empty(shape, dtype=dtype, device=runtime.device)
            if not is_parameter and dtype.is_floating_point:
                memory.fill_(torch.nan)  # so that values which transformers does not compute again are never taken
            if not is_parameter and not value.is_meta:
                memory.copy_(value)
            if is_parameter:
                module._parameters[key] = nn.Parameter(marked(memory), requires_grad=False)
            else:
                module._buffers[key] = memory
            if is_parameter or key not in module._non_persistent_buffers_set:
                if isinstance(module, ScaledExperts):
                    is_packed = key == "gate_up_proj"
                    apart = stored_apart(module_name, memory, part, is_packed=is_packed)
                    names.forms.append((apart, {name: stored_transposed(memory, part, is_packed=is_packed)}))
                    targets |= apart
                else:
                    targets |= parameter_targets(names, name, memory, part, 0 if style == PACKED else 1)
    model.initialize_weights()  # type: ignore[no-untyped-call]
    pin_rope(model, runtime.max_model_len)
    return targets


def _stays_float32(model: PreTrainedModel, name: str) -> bool:
    return any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in model._keep_in_fp32_modules_strict or ())


def _refuse_style(model: PreTrainedModel, name: str, style: str | None) -> NoReturn:
    known = ", ".join(LINEAR_STYLES)
    why = f"its tensor-parallel plan has '{style}' for {name}; known are {known}, for linears: take tp=1"
    refuse(model.config.model_type, why)
