"""What model=transformers refuses and why, its names of tensors, and what it does not allocate."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.core.contracts import FullAttention, RecurrentState, Runtime, SlidingWindow, StateTensor
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite.driver import Chunk, ModelDriver
from hookline.core.testing.plain_kernels import PlainKernels
from tests.fuzzing import examples
from tests.lazily import Lazily
from tests.plugins.test_hostile_configs import CHANGES, CONFIG
from tests.transformers_cases import ALL_CASES, CASES, LATENT, SIZES

pytestmark = pytest.mark.slow  # importing what is tested takes seconds
CONFIG_MAPPING: Any = Lazily("transformers.models.auto.configuration_auto", "CONFIG_MAPPING")
TransformersModel: Any = Lazily("hookline.plugins.models.transformers.model", "TransformersModel")
without_shared: Any = Lazily("hookline.plugins.models.transformers.layers", "without_shared")
use_kernel_norms: Any = Lazily("hookline.plugins.models.transformers.layers", "use_kernel_norms")
is_plain_rms_norm: Any = Lazily("hookline.plugins.models.transformers.layers", "is_plain_rms_norm")


def config_of(model_type: str, **options: Any) -> dict[str, Any]:
    """The config.json of a small model."""
    config = CONFIG_MAPPING[model_type](**{**SIZES, **options})
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if not key.startswith("_")}


def case_of(name: str) -> dict[str, Any]:
    """Arguments of `config_of` for a case of tests/transformers_cases.py."""
    return {"model_type": ALL_CASES[name].model_type, **ALL_CASES[name].options}


needs_states = pytest.mark.skipif("mamba" not in CASES, reason="this transformers has a cache for each kind of state")


def refusal(config: dict[str, Any], num_ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        TransformersModel.spec(config)
        kernels = PlainKernels(None, None)  # type: ignore[arg-type]
        runtime = Runtime(torch.device("cpu"), torch.float32, LocalRanks(0, num_ranks), kernels)
        TransformersModel(config, runtime)
    assert "\n" not in str(error.value)
    return str(error.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prophetnet": (
        {"is_encoder_decoder": False, "is_decoder": True},
        "its forward takes no position_ids, as batches of several sequences need",
    ),
    "gpt_neo": ({}, "its attention does not go through transformers' attention interface"),
    "xglm": ({}, "it works on attention masks itself, and none is built here"),
    "xlstm": ({}, "its layers carry a state from token to token which is not in transformers' cache of states"),
    "recurrent_gemma": ({}, "conv_1d is a convolution, which mixes tokens outside of attention; it needs a model of"),
    "bert": ({}, "it is an encoder, whose tokens see later ones (is_decoder is false)"),
    "marian": ({}, "it is an encoder and a decoder (is_encoder_decoder), and only decoders are served"),
    "jetmoe": ({}, "its forward looks at values of tensors on the host, which a step must not wait for; it needs a"),
    "deepseek_v32": ({}, "its layers of type indexed_attention attend in a form of their own, neither fully nor in a"),
    "gemma": ({"use_bidirectional_attention": True}, "its attention is not causal"),
    "gemma2": ({"use_bidirectional_attention": True}, "its attention is not causal"),
    "gemma3": ({}, "it is made of several models (text_config), and only a decoder is served"),
    "clip": ({}, "does not support model_type = 'clip'; supported: models that transformers has as a causal language"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_with_the_reason(model_type: str) -> None:
    options, reason = REFUSED[model_type]
    plain = CONFIG_MAPPING[model_type](**options)
    values = json.loads(plain.to_json_string(use_diff=False))
    assert reason in refusal({key: value for key, value in values.items() if not key.startswith("_")})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model_type": "my_own", "auto_map": {"AutoModel": "my.py"}},
            "code that comes with a checkpoint (auto_map) is",
        ),
        ({"trust_remote_code": True}, "code that comes with a checkpoint is never run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "and only its LlamaForCausalLM is served"),
        (
            {"quantization_config": {"ignore": ["x" * 300], "quant_method": "awq", "bits": 4}},
            "does not support quantization_config = quant_method awq, 4 bits; supported: unquantised checkpoints",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"max_position_embeddings": -1}, "its max_position_embeddings is -1"),
        ({"num_attention_heads": "many"}, "num_attention_heads = 'many'"),
        ({"hidden_act": "no_such"}, "transformers cannot build it: KeyError"),
        ({"rope_parameters": {"rope_type": "no_such_rope"}}, "transformers cannot build it"),
        *(
            (
                {"rope_parameters": {"rope_type": kind, "factor": 1e308, "original_max_position_embeddings": 64}},
                "rope scaling with factor = 1e+308 makes 64 tokens more than 16777216; correct its config.json",
            )
            for kind in ("yarn", "linear", "dynamic")
        ),
        *(
            ({"rms_norm_eps": eps}, "a number between 0 and 1; correct its config.json")
            for eps in (1e30, -1.0, float("inf"))
        ),
        *(
            ({"rope_parameters": None, "rope_theta": theta}, "must be a number above 1, below 1e+30; correct its conf")
            for theta in (0, -1, 1, float("inf"), float("nan"), 1e308)
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(change: dict[str, Any], reason: str) -> None:
    assert reason in refusal({**config_of("llama"), **change})


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(model_type=st.sampled_from(["qwen3", "phi3", "gpt_neox", "gemma2"]), changes=CHANGES)
def test_any_config_is_read_or_refused_in_one_line(model_type: str, changes: dict[str, Any]) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if key not in ("model_type", "architectures")}
    try:
        spec = TransformersModel.spec({**config, "model_type": model_type})
    except ConfigError as error:
        line = " ".join(str(error).split())
        assert 0 < len(line) < 1500 and "Traceback" not in line
        return
    assert spec.num_layers >= 1 and spec.max_position >= 1 and spec.num_heads % spec.num_kv_heads == 0


def test_all_that_a_config_asks_for_and_is_not_served_is_told_at_once() -> None:
    config = json.loads(CONFIG_MAPPING["qwen4_exp"]().to_json_string(use_diff=False))
    told = refusal({**config, "architectures": ["MistralForCausalLM"]})
    assert "its architecture is 'MistralForCausalLM', and only its " in told
    assert "made of several models (text_config)" in told and "of type indexed_attention attend in a form" in told


@pytest.mark.parametrize(
    ("model_type", "name"), [("exaone", "ExaoneForCausalLM"), ("internlm3", "InternLM3ForCausalLM")]
)
def test_a_model_is_known_by_the_name_it_had_before_transformers_had_it(model_type: str, name: str) -> None:
    if model_type not in CONFIG_MAPPING.keys():
        pytest.skip(f"this transformers has no {model_type}")
    config = {**config_of(model_type), "architectures": [name], "auto_map": {"AutoModelForCausalLM": "its_own.Code"}}
    assert TransformersModel.spec(config).num_layers == 2
    told = refusal({**config, "architectures": ["MistralForCausalLM"]})
    assert "its architecture is 'MistralForCausalLM'" in told


def test_experts_whose_rows_are_no_multiple_of_16_bytes_are_served() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 36, "head_dim": 8}
    config = config_of("mixtral", **sizes)
    driver = ModelDriver(TransformersModel, config)
    assert driver.logits(Chunk(0, 0, [1, 2, 3])).isfinite().all()


def test_a_hybrid_whose_layers_all_attend_is_a_decoder_like_others() -> None:
    dense = config_of("granitemoehybrid", layer_types=["attention"] * 2, num_local_experts=0, mamba_n_heads=8)
    spec = TransformersModel.spec(dense)
    assert spec.num_layers == 2 and not spec.layers


@needs_states
def test_states_and_attention_are_layers_in_the_order_of_their_calls() -> None:
    kinds = [type(layer) for layer in TransformersModel.spec(config_of(**case_of("falcon_h1"))).layers]
    assert kinds == [RecurrentState, FullAttention] * 2


@needs_states
def test_a_state_has_the_dtype_that_the_model_keeps_it_in() -> None:
    mixer, *_ = TransformersModel.spec(config_of(**case_of("mamba2"))).layers
    assert mixer.lengths_on_host
    assert dict(mixer.tensors) == {
        "conv0.0": StateTensor((92, 4)),
        "recurrent0.0": StateTensor((6, 12, 5), "float32"),
    }


@needs_states
@pytest.mark.parametrize(("name", "forgets"), [("mamba", True), ("mamba2", False), ("qwen3_next", False)])
def test_a_module_that_leaves_its_state_out_of_a_chunk_is_found(name: str, forgets: bool) -> None:
    model = ModelDriver(TransformersModel, config_of(**case_of(name))).model
    states = [layer for layer in model.attention.layers if hasattr(layer, "forgets")]
    assert states and all(layer.forgets is forgets for layer in states)


@needs_states
def test_a_plan_that_splits_what_keeps_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(**case_of("mamba2"))
    plan = {"layers.*.mixer.in_proj": "colwise"}
    monkeypatch.setattr(CONFIG_MAPPING["mamba2"], "base_model_tp_plan", plan)
    assert "splits backbone.layers.0.mixer.in_proj, which keeps a state; take tp=1" in refusal(config, num_ranks=2)


def test_a_head_that_is_more_than_a_linear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    class ScaledHead(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    plain = modeling_llama.LlamaForCausalLM.__init__

    def scaled(self: Any, config: Any) -> None:
        plain(self, config)
        self.lm_head = ScaledHead(config.hidden_size, config.vocab_size, bias=False)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "__init__", scaled)
    told = refusal(config_of("llama", hidden_size=64))
    assert "its output head is a ScaledHead, and only a plain linear is served as one" in told


def test_a_step_that_the_real_layers_cannot_compute_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def looking(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * self.up_proj.in_features  # which a served linear does not have

    monkeypatch.setattr(LlamaMLP, "forward", looking)
    told = refusal(config_of("llama", intermediate_size=44))
    assert "its forward cannot be computed here: AttributeError" in told and "in_features" in told


def test_tensors_that_nothing_fills_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.__init__

    def keeping(self: Any, config: Any) -> None:
        plain(self, config)
        self.scales = [torch.ones(3)]

    monkeypatch.setattr(LlamaMLP, "__init__", keeping)
    assert "layers.0.mlp.scales is neither a parameter nor a buffer" in refusal(config_of("llama", hidden_size=48))


def test_a_cache_that_keeps_less_than_the_masks_show_is_refused() -> None:
    told = refusal(config_of("moshi", sliding_window=12))
    assert "its masks let a layer see every token, and its cache keeps 12 (sliding_window)" in told


def test_parameters_that_transformers_makes_off_the_meta_device_are_loaded() -> None:
    kernels = PlainKernels(None, None)  # type: ignore[arg-type]
    runtime = Runtime(torch.device("cpu"), torch.float32, LocalRanks(), kernels)
    targets = TransformersModel(config_of("diffllama"), runtime).weight_targets()
    assert targets["model.layers.0.self_attn.lambda_q1"].shape == (8,)


def test_without_a_tensor_parallel_plan_there_is_one_rank() -> None:
    assert "transformers has no tensor-parallel plan for it; take tp=1, not 2" in refusal(config_of("gpt2"), 2)


@pytest.mark.parametrize(
    ("name", "style"),
    [("layers.*.mlp.up_proj", "sideways"), ("layers.*.mlp", "moe_sideways"), ("norm.weight", "colwise")],
)
def test_a_plan_with_a_style_that_is_not_known_is_refused_by_name(
    name: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {**CONFIG_MAPPING["llama"].base_model_tp_plan, name: style}
    monkeypatch.setattr(CONFIG_MAPPING["llama"], "base_model_tp_plan", plan)
    place = f"model.{name}".replace("*", "0")
    assert f"its tensor-parallel plan has '{style}' for {place}; known are colwise," in refusal(config_of("llama"), 2)


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    assert "its plan for tp=2 cannot be computed here: RuntimeError" in refusal(
        config_of("cohere", use_qk_norm=True), 2
    )


def test_ranks_that_do_not_divide_the_features_are_refused() -> None:
    config = config_of("llama", intermediate_size=50)
    assert "tp=4 does not divide the output features of model.layers.0.mlp.gate_proj, 50" in refusal(config, 4)


def test_windows_of_the_layers_are_those_that_transformers_masks_have() -> None:
    case = CASES["cohere2"]
    spec = TransformersModel.spec(config_of(case.model_type, **case.options))
    assert spec.layers == (SlidingWindow(12), FullAttention())
    assert spec.attention_features == {"window"}
    assert TransformersModel.spec(config_of("qwen2", sliding_window=12, use_sliding_window=False)).layers == ()


def test_scale_and_softcap_are_asked_of_the_kernels_only_where_a_model_has_its_own() -> None:
    assert TransformersModel.spec(config_of("llama")).attention == frozenset()
    assert TransformersModel.spec(config_of("granite", attention_multiplier=0.3)).attention == {"scale"}
    gemma2 = CASES["gemma2"]
    assert TransformersModel.spec(config_of("gemma2", **gemma2.options)).attention == {"scale", "softcap"}


@pytest.mark.parametrize(("case", "scales"), [("longrope", (1.1180, 1.1180)), ("phimoe", (1.25, 1.5))])
def test_longrope_takes_its_long_factors_if_and_only_if_sequences_may_exceed_the_original_length(
    case: str, scales: tuple[float, float]
) -> None:
    config = config_of(CASES[case].model_type, **CASES[case].options)
    assert TransformersModel.spec(config).max_position == 1024
    positions_1T = torch.tensor([[3, 300]])
    for max_len, factors, scale in zip((256, 257), ([1.0, 1.1, 1.2, 1.3], [4.0] * 4), scales, strict=True):
        kernels = PlainKernels(None, None)  # type: ignore[arg-type]
        device, ranks = torch.device("cpu"), LocalRanks(0, 1)
        model = TransformersModel(config, Runtime(device, torch.float32, ranks, kernels, max_model_len=max_len))
        angles = positions_1T[0, :, None] / (torch.tensor(factors) * 10_000 ** (torch.arange(4) / 4))
        found, _ = model.decoder.rotary_emb(torch.zeros(1), positions_1T)
        torch.testing.assert_close(found[0, :, :4], angles.cos() * scale, rtol=1e-3, atol=1e-3)


def test_a_text_part_that_transformers_lists_nowhere_is_served_with_its_logits_scaled() -> None:
    config = config_of("granite4_vision_text", logits_scaling=4.0, attention_multiplier=0.3)
    assert TransformersModel.spec(config).attention == {"scale"}
    hidden_ND = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    logits = []
    for scaling in (1.0, 4.0):
        kernels = PlainKernels(None, None)  # type: ignore[arg-type]
        runtime = Runtime(torch.device("cpu"), torch.float32, LocalRanks(0, 1), kernels)
        model = TransformersModel({**config, "logits_scaling": scaling}, runtime)
        model.weight_targets()["lm_head.weight"].view.fill_(0.5)  # type: ignore[union-attr]
        logits.append(model.logits(hidden_ND))
    torch.testing.assert_close(logits[0], logits[1] * 4)
    with pytest.raises(ConfigError, match="causal language model"):
        TransformersModel.spec({**config, "model_type": "clip_text_model"})


class LargestTensor(TorchDispatchMode):
    """Counts the numbers in the largest tensor that an operation gives."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("name", ["phi3", "gemma2", "opt"])
def test_no_mask_is_ever_built(name: str) -> None:
    """A causal mask over the tokens of a step would have T * T numbers."""
    driver = ModelDriver(TransformersModel, config_of(CASES[name].model_type, **CASES[name].options))
    num_tokens = 2048
    token_ids_T, positions_T = torch.full((num_tokens,), 5), torch.arange(num_tokens) % 256
    width = driver.spec.num_heads * driver.spec.head_dim

    def attend(layer: int, qkv_TC: torch.Tensor, *_: Any) -> torch.Tensor:
        return qkv_TC[:, :width].clone()

    with torch.inference_mode(), LargestTensor() as seen:
        driver.model.forward(token_ids_T, positions_T, attend)
    assert num_tokens * 32 <= seen.largest < num_tokens * num_tokens / 4


def test_a_checkpoint_of_the_decoder_alone_has_its_prefix_added_and_old_buffers_left_out() -> None:
    """As GPT-2's on the hub."""
    model = ModelDriver(TransformersModel, config_of("gpt2")).model
    assert model.tensor_name("h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
    assert model.tensor_name("transformer.wte.weight") == "transformer.wte.weight"
    assert model.tensor_name("h.0.attn.bias") is None
    assert model.tensor_name("no.such.weight") == "no.such.weight"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_layers_that_draft_tokens_are_left_out_whatever_the_number_of_layers(model_type: str) -> None:
    sizes = {**LATENT, "num_key_value_heads": 6} if model_type == "deepseek_v3" else {}
    config = config_of(model_type, **sizes, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
    model = ModelDriver(TransformersModel, {**config, "num_nextn_predict_layers": 1}).model
    assert model.tensor_name("model.layers.2.eh_proj.weight") is None
    name = "model.layers.3.eh_proj.weight"
    assert model.tensor_name(name) == name, "there is one such layer"


def test_the_matrices_of_single_experts_fill_the_merged_tensor() -> None:
    driver = ModelDriver(TransformersModel, config_of("mixtral", num_local_experts=4))
    name = driver.model.tensor_name("model.layers.1.block_sparse_moe.experts.3.w3.weight")
    merged = driver.model.decoder.layers[1].mlp.experts.gate_up_proj
    view = driver.targets[name].view
    assert view is not None and view.shape == (48, 32)
    assert view.data_ptr() == merged[3, 48:].data_ptr()


def test_norms_of_the_plain_form_go_to_the_kernels_and_others_stay() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert is_plain_rms_norm(LlamaRMSNorm(8))
    assert not is_plain_rms_norm(Gemma2RMSNorm(8))


def test_norms_of_one_class_are_tried_one_by_one() -> None:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    both = torch.nn.Sequential(Gemma3nRMSNorm(8), Gemma3nRMSNorm(8, with_scale=False))
    x_TD = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    before_TD = both(x_TD)
    use_kernel_norms(both, Runtime(torch.device("cpu"), torch.float32, LocalRanks(), PlainKernels(None, None)))  # type: ignore[arg-type]
    assert "forward" in vars(both[0]) and "forward" not in vars(both[1])
    torch.testing.assert_close(both(x_TD), before_TD)


def test_a_module_that_no_layer_runs_stays_if_it_lends_its_weights_or_has_another_layers() -> None:
    model: Any = torch.nn.Module()
    names = ["a.adapters.1", "a.vision", "b.adapters", "b.adapter"]
    assert without_shared(model, names) == names
    model.all_tied_weights_keys = {"b.adapters.1.0.weight": "a.adapters.1.0.weight"}
    assert without_shared(model, names) == ["a.vision", "b.adapter"]
