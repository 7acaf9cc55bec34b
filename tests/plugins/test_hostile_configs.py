"""Whatever a checkpoint's JSON files hold, it is read or refused in one line: no traceback, hang or memory eaten."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hookline.core.checkpoint.checkpoint import resolve
from hookline.core.contracts import SlidingWindow
from hookline.core.errors import HooklineError
from hookline.core.layers import rope_table
from hookline.plugins.models.gemma3 import Gemma3
from hookline.plugins.models.gemma4 import Gemma4
from hookline.plugins.models.gpt_oss import GptOss
from hookline.plugins.models.llama import Llama
from hookline.plugins.models.olmo2 import Olmo2
from hookline.plugins.models.qwen2 import Qwen2
from hookline.plugins.models.qwen3 import Qwen3
from hookline.plugins.models.qwen3_5 import Qwen3_5
from hookline.plugins.models.qwen3_config import read_config
from hookline.plugins.models.qwen3_moe import Qwen3Moe
from hookline.plugins.models.qwen3_next import Qwen3Next
from tests.fuzzing import examples
from tests.small_models import CONFIGS

CONFIG = json.loads((Path(__file__).parents[2] / "plugins/models/qwen3_tiny/config.json").read_text())
MOE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
}
KEYS = sorted({*MOE, "rope_scaling", "rope_parameters", "rope_theta", "eos_token_id", "layer_types", "mlp_only_layers"})
MORE_KEYS = (*KEYS, "partial_rotary_factor", "sliding_window", "sliding_window_pattern", "max_window_layers",
             "use_sliding_window", "query_pre_attn_scalar", "rope_local_base_freq", "swiglu_limit", "text_config",
             "attention_bias", "quantization_config")  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, True, 1e308])
)
LEAVES = st.one_of(st.none(), NUMBERS, st.text(max_size=20), st.sampled_from(["${oc.env:HOME}", "???", "\x1b[31m"]))
SCALING = st.dictionaries(
    st.sampled_from(["type", "rope_type", "factor", "attention_factor", "beta_fast", "mscale", "rope_theta",
                     "original_max_position_embeddings", "truncate", "low_freq_factor", "high_freq_factor"]),
    st.one_of(LEAVES, st.sampled_from(["yarn", "linear", "dynamic", "default", "llama3"])),
    max_size=5,
)  # fmt: skip
MAPPINGS = st.dictionaries(st.text(max_size=8), LEAVES, max_size=2)
VALUES = st.one_of(LEAVES, st.lists(LEAVES, max_size=3), SCALING, MAPPINGS)
CHANGES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)
GENERATION = st.dictionaries(
    st.sampled_from(["eos_token_id", "temperature", "top_k", "top_p", "do_sample", "repetition_penalty", "x"]),
    VALUES,
    max_size=4,
)
CLASSES = {
    **dict.fromkeys(("llama", "mistral", "phi3"), Llama),
    "qwen2_window": Qwen2,
    "olmo2": Olmo2,
    "gemma3": Gemma3,
    **dict.fromkeys(("gemma4", "gemma4_per_layer"), Gemma4),
    "gpt_oss": GptOss,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen3_5,
    "qwen3_5_moe": Qwen3_5,
}
BY_TYPE = st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), SCALING, max_size=2)
TYPES = st.lists(st.sampled_from(["full_attention", "sliding_attention", "x", 1]), max_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@hypothesis_settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_config_of_the_other_models_is_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    keys = st.sampled_from(sorted({*CONFIGS[name], *MORE_KEYS}))
    changes = data.draw(st.dictionaries(keys, st.one_of(VALUES, BY_TYPE, TYPES), max_size=4))
    try:
        spec = CLASSES[name].spec({**CONFIGS[name], **changes})
    except HooklineError as error:
        line = " ".join(str(error).split())
        assert 0 < len(line) < 1500 and "Traceback" not in line
        return
    assert 1 <= spec.num_layers <= 10_000 and 1 <= spec.max_position and spec.num_heads % spec.num_kv_heads == 0
    assert len(spec.cache_layers) == spec.num_layers
    assert all(layer.num_tokens >= 1 for layer in spec.layers if isinstance(layer, SlidingWindow))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Qwen3, Qwen3Moe])
@hypothesis_settings(max_examples=examples(500), deadline=None)
@given(changes=CHANGES, generation=GENERATION)
def test_any_config_is_read_or_refused_in_one_line(tmp_path_factory, model, changes, generation) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    folder.mkdir(exist_ok=True)
    config = {**(CONFIG if model is Qwen3 else MOE), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    try:
        checkpoint = resolve(str(folder))
        spec = model.spec(checkpoint.config)
        if model is Qwen3 and spec.head_dim <= 1024:
            assert rope_table(read_config(checkpoint.config).rope, spec.head_dim, 8).isfinite().all()
    except HooklineError as error:
        line = " ".join(str(error).split())
        assert 0 < len(line) < 1500 and "Traceback" not in line
        return
    assert 1 <= spec.num_layers <= 10_000 and 1 <= spec.max_position and spec.num_heads % spec.num_kv_heads == 0
