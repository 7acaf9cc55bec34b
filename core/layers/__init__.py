"""What models are made of: tensor-parallel layers, the residual stream, stages, rotary tables, config.json readers."""

from hookline.core.distributed.partition import even_part
from hookline.core.layers.clamped_experts import ClampedExperts, plain_clamped_expert_mlp
from hookline.core.layers.config_values import ConfigValues, layer_caches
from hookline.core.layers.expert_products import every_expert, plain_expert_mlp, wanted_experts
from hookline.core.layers.experts import ParallelExperts, SoftmaxRouter, plain_route_experts
from hookline.core.layers.linear import (
    ColumnParallelLinear,
    GatedMLP,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from hookline.core.layers.norm import WholeQKNorm
from hookline.core.layers.recurrent import plain_gated_delta_rule, plain_short_convolution
from hookline.core.layers.residual import Residual, SummedBlock
from hookline.core.layers.rope import rope_table
from hookline.core.layers.rope_config import RopeSettings, rope_settings
from hookline.core.layers.stage import FinalNorm, StageLayers, stage_input
from hookline.core.layers.taps import tapped, tapped_stream
from hookline.core.layers.vocab import ParallelHead, VocabParallelEmbedding, vocab_part
from hookline.core.layers.weights import PLAIN, empty_parameter, head_weight

__all__ = [
    "PLAIN",
    "ClampedExperts",
    "ColumnParallelLinear",
    "ConfigValues",
    "FinalNorm",
    "GatedMLP",
    "MergedColumnParallelLinear",
    "ParallelExperts",
    "ParallelHead",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "Residual",
    "RopeSettings",
    "RowParallelLinear",
    "SoftmaxRouter",
    "StageLayers",
    "SummedBlock",
    "VocabParallelEmbedding",
    "WholeQKNorm",
    "empty_parameter",
    "even_part",
    "every_expert",
    "head_weight",
    "layer_caches",
    "plain_clamped_expert_mlp",
    "plain_expert_mlp",
    "plain_gated_delta_rule",
    "plain_route_experts",
    "plain_short_convolution",
    "rope_settings",
    "rope_table",
    "stage_input",
    "tapped",
    "tapped_stream",
    "vocab_part",
    "wanted_experts",
]
