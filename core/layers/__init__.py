"""Building blocks of models: tensor-parallel layers, residual stream, stages, rotary tables, config.json readers."""

from hookline.core.distributed.partition import even_part as even_part
from hookline.core.layers.clamped_experts import (
    ClampedExperts as ClampedExperts,
    plain_clamped_expert_mlp as plain_clamped_expert_mlp,
)
from hookline.core.layers.config_values import ConfigValues as ConfigValues, layer_caches as layer_caches
from hookline.core.layers.expert_products import (
    every_expert as every_expert,
    plain_expert_mlp as plain_expert_mlp,
)
from hookline.core.layers.experts import (
    ParallelExperts as ParallelExperts,
    SoftmaxRouter as SoftmaxRouter,
    plain_route_experts as plain_route_experts,
    with_shared_experts as with_shared_experts,
)
from hookline.core.layers.linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    GatedMLP as GatedMLP,
    MergedColumnParallelLinear as MergedColumnParallelLinear,
    QKVParallelLinear as QKVParallelLinear,
    ReplicatedLinear as ReplicatedLinear,
    RowParallelLinear as RowParallelLinear,
)
from hookline.core.layers.norm import WholeQKNorm as WholeQKNorm
from hookline.core.layers.recurrent import (
    plain_gated_delta_rule as plain_gated_delta_rule,
    plain_short_convolution as plain_short_convolution,
)
from hookline.core.layers.residual import Residual as Residual, SummedBlock as SummedBlock
from hookline.core.layers.rope import rope_table as rope_table
from hookline.core.layers.rope_config import RopeSettings as RopeSettings, rope_settings as rope_settings
from hookline.core.layers.stage import (
    FinalNorm as FinalNorm,
    StageLayers as StageLayers,
    stage_input as stage_input,
    tapped as tapped,
    tapped_stream as tapped_stream,
)
from hookline.core.layers.vocab import (
    ParallelHead as ParallelHead,
    VocabParallelEmbedding as VocabParallelEmbedding,
    vocab_part as vocab_part,
)
from hookline.core.layers.weights import PLAIN as PLAIN, empty_parameter as empty_parameter, head_weight as head_weight
