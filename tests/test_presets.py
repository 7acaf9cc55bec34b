"""The shipped presets, with the plugins they stand on: the command line and the library must agree on them."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hookline.core.assembly.resolve import chosen
from hookline.core.config.compose import compose
from hookline.core.config.settings import ENGINE_KEYS, EngineConfig, validate
from hookline.core.contracts import AttentionSpec, Runtime
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF, Preset, default_options, presets_in, yaml_values
from hookline.core.run.settings import RunKeys
from hookline.core.testing.plain_kernels import PlainKernels

PRESETS = presets_in(CONF, "hookline")
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
QWEN3 = {
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B", 28, 1024, 16, 3072, True),
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", 28, 2048, 16, 6144, True),
    "qwen3_4b": ("Qwen/Qwen3-4B", 36, 2560, 32, 9728, True),
    "qwen3_8b": ("Qwen/Qwen3-8B", 36, 4096, 32, 12288, False),
    "qwen3_14b": ("Qwen/Qwen3-14B", 40, 5120, 40, 17408, False),
    "qwen3_32b": ("Qwen/Qwen3-32B", 64, 5120, 64, 25600, False),
}
QWEN3_MOE = {
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", 48, 2048, 32, 768),
    "qwen3_235b_a22b": ("Qwen/Qwen3-235B-A22B", 94, 4096, 64, 1536),
}

PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_248_023_552,
    "smollm2_135m": 134_515_008,
    "qwen2_5_7b": 7_615_616_512,
    "olmo2_7b": 7_298_617_344,
    "gemma3_4b": 3_880_263_168,
    "gpt_oss_20b": 20_914_757_184,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "qwen3_6_35b_a3b": 34_660_610_688,
    "qwen3_6_27b": 26_895_998_464,
}


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.load(environ={})


@pytest.fixture(autouse=True)
def work_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def composed(host: PluginHost, *arguments: str) -> Any:
    tree = compose(list(arguments), host, RunKeys)[0].tree
    return validate({key: tree[key] for key in ENGINE_KEYS}, host)


def test_without_arguments_command_line_and_library_agree(host: PluginHost) -> None:
    assert composed(host) == validate({}, host)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_command_line_and_library_agree_on_a_preset(host: PluginHost, preset: Preset) -> None:
    assert composed(host, f"{preset.kind}={preset.name}") == validate({preset.kind: preset.name}, host)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_changes_something(host: PluginHost, name: str) -> None:
    config = composed(host, f"experiment={name}")
    assert config.engine != EngineConfig() or config.scheduler.name != default_options()["scheduler"]


@pytest.mark.parametrize("name", QWEN3)
def test_a_model_preset_holds_the_published_sizes(host: PluginHost, name: str) -> None:
    config = validate({"model": name}, host).model.config
    shape = config.random_shape
    sizes = (shape["num_hidden_layers"], shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"])
    assert (config.checkpoint, *sizes, shape["tie_word_embeddings"]) == QWEN3[name]
    assert (shape["num_key_value_heads"], shape["head_dim"], shape["vocab_size"]) == (8, 128, 151936)
    assert (shape["rope_theta"], shape["max_position_embeddings"], shape["rms_norm_eps"]) == (1e6, 40960, 1e-6)


@pytest.mark.parametrize("name", QWEN3_MOE)
def test_a_preset_of_a_model_with_experts_holds_the_published_sizes(host: PluginHost, name: str) -> None:
    option = validate({"model": name}, host).model
    shape = option.config.random_shape
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "moe_intermediate_size")
    assert (option.config.checkpoint, *(shape[key] for key in keys)) == QWEN3_MOE[name]
    assert (shape["num_experts"], shape["num_experts_per_tok"], shape["norm_topk_prob"]) == (128, 8, True)
    assert (shape["num_key_value_heads"], shape["head_dim"], shape["vocab_size"]) == (4, 128, 151936)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_as_many_parameters_as_the_published_model(host: PluginHost, name: str) -> None:
    import torch

    option = validate({"model": name}, host).model
    model_class = chosen(option).load()
    spec = model_class.spec(option.config.random_shape)
    sizes = AttentionSpec(1, 1, spec.head_dim, 16, 1, 1, 1, torch.device("meta"), torch.bfloat16)
    runtime = Runtime(sizes.device, sizes.dtype, LocalRanks(), PlainKernels(None, sizes), option.config)
    targets = model_class(option.config.random_shape, runtime).weight_targets().values()
    assert sum(prod(target.shape) for target in targets if target.view is not None) == PARAMETERS[name]


def test_the_greedy_preset_is_greedy(host: PluginHost) -> None:
    assert validate({"sampler": "greedy"}, host).sampler.config.greedy is True


def test_files_are_read_as_omegaconf_reads_them(tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text("\ufeffa: 1e3\nb: 2024-01-02\nc: on\nd: 010\ne: ${a}\nf: [~, 1_0, .5, 1:30]\n", encoding="utf-8")
    plain = tmp_path / "plain.yaml"
    plain.write_text("\ufeffa: 1e3\nb: 2024-01-02\nc: on\nd: 010\nf: [~, 1_0, .5, 1:30]\n", encoding="utf-8")
    for path in [odd, plain, *CONF.rglob("*.yaml")]:
        assert repr(yaml_values(path)) == repr(OmegaConf.to_container(OmegaConf.load(path))), path
    for value in (
        "1e3",
        "+1E3",
        ".5e+3",
        "1.e5",
        "'1e5'",
        "2024-01-02",
        "1_0.5",
        "0x1f",
        "1:30",
        "-.inf",
        "!!str 5",
        "1.5",
    ):
        plain.write_text(f"a: {value}\n{value}: [{value}]\nb: &b {{c: yes}}\nd: {{<<: *b, e: ~}}\n")
        assert repr(yaml_values(plain)) == repr(OmegaConf.to_container(OmegaConf.load(plain))), value
    for wrong in ("a: 1\na: 2\n", "a: !!set {b}\n", "a: [\n"):
        odd.write_text(wrong)
        with pytest.raises((YAMLError, OmegaConfBaseException)):
            yaml_values(odd)
