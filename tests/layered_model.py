"""The model of tests/layered.py: embedding, layers of the kinds that its config lists, a head.

layer_kinds: "full", a number of tokens for a window, "shared:LAYER", "state" or "none". A layer with a state keeps an
exponential moving average of each channel. Legend: as in core/contracts; D of a state is this rank's part of hidden.
"""

import torch

from hookline.core.contracts import (
    FullAttention,
    ModelSpec,
    NoCache,
    RecurrentState,
    Rope,
    SharedCache,
    SlidingWindow,
    StateTensor,
    WeightTarget,
)
from hookline.core.errors import ConfigError
from hookline.core.layers import (
    ColumnParallelLinear,
    FinalNorm,
    GatedMLP,
    ParallelHead,
    QKVParallelLinear,
    Residual,
    RowParallelLinear,
    StageLayers,
    VocabParallelEmbedding,
    rope_settings,
    rope_table,
    stage_input,
)

EPS = 1e-6
DECAY = 0.75
LAYERED_CONFIG = {
    "model_type": "layered",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "layer_kinds": [5, 5, 5, "full"],
}


def cache_of(kind, hidden_size):
    if isinstance(kind, int):
        return SlidingWindow(kind)
    if kind.startswith("shared:"):
        return SharedCache(int(kind.removeprefix("shared:")))
    states = (("mean", StateTensor((hidden_size,), "float32", split_dim=0)), ("count", StateTensor((1,), "int64")))
    return {"full": FullAttention(), "none": NoCache(), "state": RecurrentState(states)}[kind]


class LayeredModel:
    runs_in_stages = True

    def __init__(self, hf_config, runtime):
        spec = self.spec(hf_config)
        settings = rope_settings(hf_config)
        rope = Rope(rope_table(settings, spec.head_dim, settings.max_position).to(runtime.device))
        self.embed = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, runtime)

        def layer(index):
            return Layer(f"layers.{index}", spec, make_mixer(index, spec.layers[index], spec, rope, runtime), runtime)

        self.layers = StageLayers(layer, len(spec.layers), runtime)
        self.norm = FinalNorm(spec.hidden_size, EPS, runtime)
        self.head = ParallelHead(spec.vocab_size, spec.hidden_size, runtime)
        self.runtime = runtime

    @classmethod
    def spec(cls, hf_config):
        if hf_config.get("model_type") != "layered" or hf_config.get("tie_word_embeddings"):
            raise ConfigError(f"not a layered model with a head: model_type {hf_config.get('model_type')!r}")
        heads, kv_heads = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
        hidden, layers = (
            hf_config["hidden_size"],
            [cache_of(one, hf_config["hidden_size"]) for one in hf_config["layer_kinds"]],
        )
        return ModelSpec(
            len(layers), heads, kv_heads, hidden // heads, hidden, hf_config["vocab_size"],
            rope_settings(hf_config).max_position, tuple(layers),
        )  # fmt: skip

    def forward(self, token_ids_T, positions_T, attend):
        residual = Residual(stage_input(self.embed, token_ids_T, attend), EPS, self.runtime)
        for layer in self.layers:
            layer(residual, attend)
        return self.norm(residual)

    def logits(self, hidden_ND):
        return self.head(hidden_ND)

    def weight_targets(self):
        ends = {**self.embed.targets("embed"), **self.norm.targets("norm"), **self.head.targets("head")}
        return ends | self.layers.targets("layers")


class Layer:
    """x + mixer(norm(x)), if it has one, then x + feed_forward(norm(x))."""

    def __init__(self, name, spec, mixer, runtime):
        size = spec.hidden_size
        self.name, self.mixer = name, mixer
        self.mixer_norm_D, self.mlp_norm_D = torch.empty(2, size, device=runtime.device, dtype=runtime.dtype)
        self.output = RowParallelLinear(size, size, runtime)
        self.mlp = GatedMLP(size, 2 * size, runtime, what="2 * hidden_size")

    def __call__(self, residual, attend):
        if self.mixer is not None:
            residual.add(self.mixer(residual.norm(self.mixer_norm_D), attend), through=self.output)
        residual.add(residual.norm(self.mlp_norm_D), through=self.mlp)

    def weight_targets(self):
        mixer = {}
        if self.mixer is not None:
            mixer = {
                f"{self.name}.mixer_norm.weight": WeightTarget.whole(self.mixer_norm_D, init="ones"),
                **self.output.targets(f"{self.name}.output"),
                **self.mixer.targets(self.name),
            }
        mlp_norm = {f"{self.name}.mlp_norm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones")}
        return mixer | mlp_norm | self.mlp.targets(self.name, "gate", "up", "down")


def make_mixer(index, layer, spec, rope, runtime):
    if isinstance(layer, NoCache):
        return None
    kind = {SharedCache: SharedAttention, RecurrentState: MovingAverage}.get(type(layer), Attention)
    return kind(index, spec, rope, runtime)


class Attention:
    def __init__(self, index, spec, rope, runtime):
        self.index, self.rope = index, rope
        self.qkv = QKVParallelLinear(spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, runtime)

    def __call__(self, x_TD, attend):
        return attend(self.index, self.qkv(x_TD), self.rope)

    def targets(self, name):
        return self.qkv.targets(f"{name}.q", f"{name}.k", f"{name}.v")


class SharedAttention:
    def __init__(self, index, spec, rope, runtime):
        self.index, self.rope = index, rope
        self.q = ColumnParallelLinear(spec.hidden_size, spec.num_heads * spec.head_dim, runtime)

    def __call__(self, x_TD, attend):
        return attend(self.index, self.q(x_TD), self.rope)

    def targets(self, name):
        return self.q.targets(f"{name}.q")


class MovingAverage:
    """h = DECAY * h + (1 - DECAY) * x, token by token, as one product. Waits for no device; the count is of tokens."""

    def __init__(self, index, spec, rope, runtime):
        self.index = index
        self.into = ColumnParallelLinear(spec.hidden_size, spec.hidden_size, runtime)

    def __call__(self, x_TD, attend):
        rows, into_TD = attend.states(self.index), self.into(x_TD).float()
        mean_RD, count_R1 = rows.tensors["mean"], rows.tensors["count"]
        starts_B, ends_B = rows.query_starts_B1[:-1].long(), rows.query_starts_B1[1:].long()
        place_T = torch.arange(len(x_TD), device=x_TD.device)
        row_T = (place_T[:, None] >= ends_B).sum(1)
        age_TT = place_T[:, None] - place_T
        is_past_TT = (age_TT >= 0) & (row_T[:, None] == row_T)
        weight_TT = (1 - DECAY) * DECAY ** age_TT.clamp(min=0) * is_past_TT
        old_BD = mean_RD.index_select(0, rows.rows_B).float()
        faded_T1 = DECAY ** (place_T - starts_B.index_select(0, row_T) + 1).unsqueeze(1)
        mean_TD = weight_TT @ into_TD + faded_T1 * old_BD.index_select(0, row_T)
        last_BD = mean_TD.index_select(0, (ends_B - 1).clamp(min=0))
        new_BD = torch.where((ends_B > starts_B).unsqueeze(1), last_BD, old_BD)
        mean_RD.index_copy_(0, rows.rows_B, new_BD.to(mean_RD.dtype))
        count_B1 = count_R1.index_select(0, rows.rows_B) + (ends_B - starts_B).unsqueeze(1)
        count_R1.index_copy_(0, rows.rows_B, count_B1)
        return mean_TD.to(x_TD.dtype)

    def targets(self, name):
        return self.into.targets(f"{name}.into")
