import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from hookline.core.batch.settings import BatchKeys
from hookline.core.bench.settings import BenchKeys
from hookline.core.chat.settings import ChatKeys
from hookline.core.config import settings as config_module
from hookline.core.config.compose import compose
from hookline.core.config.schema import documented, plain_defaults
from hookline.core.config.settings import ENGINE_KEYS, EngineConfig, validate
from hookline.core.contracts import FromSamplingParams, bounded
from hookline.core.errors import ConfigError, PluginError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF, default_options
from hookline.core.plugin.registry import KINDS
from hookline.core.run.settings import RUN_KEYS, RunKeys
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.settings import ServeKeys
from hookline.core.simulate.settings import SimulateKeys
from tests.core.plugin_fakes import (
    OPTIONS,
    PatientConfig,
    TinyConfig,
    full_plugin,
    host_with,
    offering_presets,
    plugin_module,
    preset_package,
    registering,
)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    return host_with(full_plugin())


def message(tree: dict[str, Any], host: PluginHost) -> str:
    with pytest.raises((ConfigError, PluginError)) as error:
        validate(tree, host)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what comes out


def test_prepared_sampling_is_checked_as_requests_are(host: PluginHost) -> None:
    asked = [{"top_p": 0.9}, {"logprobs": 5}]
    assert validate({"engine": {"prepared_sampling": asked}}, host).engine.prepared_sampling == tuple(asked)
    key = "engine.prepared_sampling[1]"
    for wrong, said in [
        ({"top_p": 2}, f"{key}: sampling.top_p=2 must be"),
        ({"topp": 0.5}, f"unknown key '{key}.topp'. Did you mean '{key}.top_p'?"),
        (0.5, f"{key}=0.5 must be a mapping of fields of SamplingParams"),
    ]:
        assert message({"engine": {"prepared_sampling": [{}, wrong]}}, host).startswith(said)


def test_tag_keys_are_a_tuple_of_valid_keys(host: PluginHost) -> None:
    assert validate({"engine": {"tag_keys": ["tenant", "class"]}}, host).engine.tag_keys == ("tenant", "class")
    assert message({"engine": {"tag_keys": ["tenant", "Class"]}}, host) == (
        "engine.tag_keys=['tenant', 'Class']: tags.Class: a tag's key is at most 32 characters of a-z, 0-9, '_', '.' "
        "and '-', and begins with a letter"
    )


def test_an_empty_tree_takes_the_defaults(host: PluginHost) -> None:
    config = validate({}, host)
    assert (config.model.name, config.scheduler.name, config.sampler.name, config.kernels.name) == tuple(
        OPTIONS.values()
    )
    assert config.model.config == TinyConfig()
    assert config.engine == EngineConfig()
    assert (config.tp, config.seed, config.dtype, config.device) == (1, 0, "auto", "auto")


def test_an_option_is_a_name_or_a_mapping_with_its_fields(host: PluginHost) -> None:
    config = validate({"scheduler": {"name": "hasty", "max_wait_ms": 3}}, host)
    assert config.scheduler.name == "hasty"
    assert config.scheduler.config == PatientConfig(max_wait_ms=3.0)
    assert validate({"scheduler": "hasty"}, host).scheduler.config == PatientConfig()


def test_fields_without_a_name_belong_to_the_default_option(host: PluginHost) -> None:
    assert validate({"scheduler": {"fair": False}}, host).scheduler.config == PatientConfig(fair=False)


def test_values_are_converted_to_the_dataclass_types(host: PluginHost) -> None:
    config = validate({"scheduler": {"max_wait_ms": "1e-3", "limit": "7"}, "engine": {"block_size": 16}}, host)
    assert config.scheduler.config == PatientConfig(max_wait_ms=0.001, limit=7)
    assert type(config.engine) is EngineConfig
    assert config.engine.block_size == 16


def test_nothing_of_omegaconf_leaves_validate(host: PluginHost) -> None:
    config = validate({"model": {"hf_overrides": {"rope": {"factor": 2}}}}, host)
    assert type(config.model.config) is TinyConfig
    assert type(config.model.config.hf_overrides) is dict
    assert type(config.model.config.hf_overrides["rope"]) is dict


def test_an_option_without_fields_has_no_config(host: PluginHost) -> None:
    assert validate({"sampler": "dice"}, host).sampler.config is None


def test_kernels_auto_has_no_entry_yet(host: PluginHost) -> None:
    kernels = validate({"kernels": "auto"}, host).kernels
    assert (kernels.entry, kernels.config, kernels.name) == (None, None, "auto")


def test_a_config_crosses_processes(host: PluginHost) -> None:
    config = validate({"scheduler": {"limit": 3}}, host)
    assert pickle.loads(pickle.dumps(config)) == config


def test_tuples_stay_tuples_and_frozen_dataclasses_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Frozen:
        sizes: tuple[int, ...] = (1, 2)

    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    host = host_with(
        full_plugin(), plugin_module(register_schedulers=registering("scheduler", "frozen", config=Frozen))
    )
    assert validate({"scheduler": {"name": "frozen", "sizes": [3]}}, host).scheduler.config == Frozen((3,))


# --- presets


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    yield tmp_path


def host_with_presets(folder: Path, package: str, files: dict[str, str]) -> PluginHost:
    preset_package(folder, package, files)
    return host_with(full_plugin(), offering_presets(package))


def test_a_preset_is_its_option_with_values_set(presets: Path) -> None:
    host = host_with_presets(presets, "presets_a", {"scheduler/eager": "defaults: [patient, _self_]\nfair: false\n"})
    option = validate({"scheduler": "eager"}, host).scheduler
    assert (option.name, option.config) == ("patient", PatientConfig(fair=False))


def test_fields_are_laid_over_a_preset_and_mappings_merge(presets: Path) -> None:
    text = "defaults: [tiny, _self_]\nnum_layers: 9\nrandom_shape: {width: 1, depth: 2}\n"
    host = host_with_presets(presets, "presets_b", {"model/wide": text})
    config = validate({"model": {"name": "wide", "random_shape": {"depth": 5}}}, host).model.config
    assert config == TinyConfig(num_layers=9, random_shape={"width": 1, "depth": 5})


def test_a_preset_may_stand_on_a_preset(presets: Path) -> None:
    host = host_with_presets(
        presets,
        "presets_c",
        {
            "scheduler/one": "defaults: [patient, _self_]\nlimit: 1\nfair: false\n",
            "scheduler/two": "defaults: [one, _self_]\nlimit: 2\n",
        },
    )
    assert validate({"scheduler": "two"}, host).scheduler.config == PatientConfig(fair=False, limit=2)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("defaults: [loop, _self_]\n", "preset scheduler/loop is based on itself: loop -> loop"),
        ("fair: true\n", "/scheduler/loop.yaml: `defaults: [OPTION, _self_]` is missing, which says whose values"),
        ("defaults: patient\n", "/scheduler/loop.yaml: a preset's defaults list has the form [option, _self_], not pa"),
        ("defaults: [gone, _self_]\n", "no scheduler named 'gone'"),
        ("defaults: [patient, _self_]\nfare: 1\n", "unknown key 'scheduler.fare'. Did you mean 'scheduler.fair'?"),
        (
            "defaults: [patient, _self_\n",
            "/scheduler/loop.yaml:2: broken YAML: while parsing a flow sequence, expected",
        ),
        ("- 1\n", "loop.yaml: not a mapping"),
        (
            "defaults: [patient, _self_]\nlimit: ${seed}\n",
            "preset scheduler/loop: limit: Interpolation key 'seed' not found",
        ),
    ],
)
def test_a_broken_preset_is_named(presets: Path, text: str, error: str) -> None:
    host = host_with_presets(presets, f"presets_{abs(hash(text))}", {"scheduler/loop": text})
    assert error in message({"scheduler": "loop"}, host)


def test_broken_yaml_that_hydra_reads_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "experiment" / "odd.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nengine: {max_num_seqs: 3\n")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=odd", "--config-dir", str(tmp_path)], PluginHost.load(), RunKeys)
    assert str(caught.value).startswith(f"{file}:3: broken YAML: while parsing a flow mapping, expected ',' or '")


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("scheduler={name:chunked}", "chunked"),
        ("scheduler={watermark:0.1,name:chunked}", "chunked"),
        ("sampler={name:gumbel,greedy:true}", "gumbel"),
        ("scheduler={name:chunked},{name:deadline}", "chunked,deadline"),
    ],
)
def test_an_option_that_is_named_inside_of_a_mapping_is_refused_with_what_to_write(argument: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([argument], PluginHost.load(), RunKeys)
    kind = argument.partition("=")[0]
    assert str(caught.value) == (
        f"'{argument}' would change a name and not the option; write {kind}={names}; fields go beside it, as "
        f"{kind}.FIELD=VALUE"
    )


def test_a_place_that_a_list_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["workload=two_tenants", "workload.classes.9.share=8"], PluginHost.load(), BenchKeys, "bench")
    assert str(caught.value) == "workload.classes[9]: the list has fewer items"


def test_a_preset_may_interpolate_and_what_is_laid_over_it_does_not(
    presets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "7")
    text = "defaults: [tiny, _self_]\nnum_layers: ${oc.env:WIDTH}\n"
    host = host_with_presets(presets, "presets_e", {"model/wide": text})
    given = {"name": "wide", "random_shape": {"width": "${oc.env:WIDTH}"}}
    config = validate({"model": given}, host).model.config
    assert config == TinyConfig(num_layers=7, random_shape={"width": "${oc.env:WIDTH}"})


def test_an_unknown_name_gets_near_misses_among_presets_too(presets: Path) -> None:
    host = host_with_presets(presets, "presets_d", {"scheduler/eager": "defaults: [patient, _self_]\n"})
    assert message({"scheduler": "eagre"}, host).startswith(
        "no scheduler named 'eagre'. Did you mean 'eager'? Available: eager, hasty, patient"
    )


# --- what is refused


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        (
            {"modle": "tiny"},
            "unknown key 'modle'. Did you mean 'model'? Available: model, scheduler, sampler, ker",
        ),
        ({"engine": {"tp": 2}}, "unknown key 'engine.tp'. Did you mean 'tp'? Available: max_num_seqs, "),
        ({"engine": {"dtype": "float32"}}, "unknown key 'engine.dtype'. Did you mean 'dtype'? Available: "),
        (
            {"engine": {"max_num_seq": 3}},
            "unknown key 'engine.max_num_seq'. Did you mean 'engine.max_num_seqs'? Available: ",
        ),
        (
            {"scheduler": {"max_nun_seqs": 3}},
            "unknown key 'scheduler.max_nun_seqs'. Did you mean 'engine.max_num_seqs'? Available: max_wait_ms, fair, ",
        ),
        (
            {"scheduler": {"fare": 3}},
            "unknown key 'scheduler.fare'. Did you mean 'scheduler.fair'? Available: max_wait_ms, fair",
        ),
        ({"sampler": {"greedy": True}}, "unknown key 'sampler.greedy'. Available: none"),
        ({"kernels": {"name": "auto", "x": 1}}, "unknown key 'kernels.x'. Available: none"),
        ({"kernels": "quik"}, "no kernels named 'quik'. Did you mean 'quick'? Available: auto, quick, slow"),
        ({"model": "tinny"}, "no model named 'tinny'. Did you mean 'tiny'?"),
        ({"engine": {"max_num_seqs": "abc"}}, "engine.max_num_seqs='abc' is not an int"),
        ({"engine": {"max_num_seqs": 2.5}}, "engine.max_num_seqs=2.5 is not an int"),
        ({"engine": {"max_num_seqs": True}}, "engine.max_num_seqs=True is not an int"),
        ({"engine": {"max_num_seqs": None}}, "engine.max_num_seqs must have a value; it is None"),
        ({"engine": {"memory_fraction": "much"}}, "engine.memory_fraction='much' is not a float"),
        ({"engine": {"prefix_caching": "perhaps"}}, "engine.prefix_caching='perhaps' is not a bool"),
        ({"engine": {"max_num_seqs": [1]}}, "engine.max_num_seqs=[1] is not an int"),
        ({"model": {"hf_overrides": 5}}, "model.hf_overrides is not a mapping but of type int"),
        ({"engine": 5}, "engine=5 is not a mapping of fields"),
        ({"scheduler": 5}, "scheduler=5 is not the name of an option or a mapping of fields"),
        ({"scheduler": {"name": 5}}, "scheduler.name=5 is not the name of an option"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs=0 must be at least 1"),
        ({"engine": {"max_num_batched_tokens": 0}}, "engine.max_num_batched_tokens=0 must be at least 1"),
        ({"engine": {"max_model_len": -1}}, "engine.max_model_len=-1 must be at least 1"),
        (
            {"engine": {"max_model_len": 1}},
            "engine.max_model_len=1 must be at least 2: a token of a prompt, and one of",
        ),
        (
            {"engine": {"num_blocks": 1, "block_size": 1}},
            "engine.num_blocks=1 must be at least 2 with engine.block_size=1",
        ),
        ({"engine": {"block_size": 0}}, "engine.block_size=0 must be at least 1"),
        ({"engine": {"num_blocks": 0}}, "engine.num_blocks=0 must be at least 1"),
        (
            {"engine": {"num_blocks": 9_000_000_000}},
            "engine.num_blocks=9000000000 must be at least 1 and at most 2147483647",
        ),
        ({"engine": {"max_queued_requests": 0}}, "engine.max_queued_requests=0 must be at least 1"),
        ({"engine": {"max_queued_tokens": -5}}, "engine.max_queued_tokens=-5 must be at least 1"),
        ({"engine": {"max_queued_tokens": "few"}}, "engine.max_queued_tokens='few' is not an int"),
        ({"engine": {"memory_fraction": 0}}, "engine.memory_fraction=0.0 must be above 0 and at most 1"),
        ({"engine": {"memory_fraction": 1.5}}, "engine.memory_fraction=1.5 must be above 0 and at most 1"),
        ({"engine": {"memory_fraction": float("nan")}}, "engine.memory_fraction=nan must be above 0 and at most 1"),
        ({"engine": {"cpu_cache_gib": 0}}, "engine.cpu_cache_gib=0.0 must be a finite number above 0"),
        ({"engine": {"stall_timeout_s": float("inf")}}, "engine.stall_timeout_s=inf must be a finite number above 0"),
        ({"engine": {"rank_timeout_s": 0}}, "engine.rank_timeout_s=0.0 must be a finite number above 0"),
        ({"engine": {"step_timeout_s": -1}}, "engine.step_timeout_s=-1.0 must be a finite number above 0"),
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"tp": "x"}, "tp='x' is not an int"),
        ({"seed": -1}, "seed=-1 must be at least 0 and at most 9223372036854775807"),
        ({"seed": 1.5}, "seed=1.5 is not an int"),
        ({"dtype": "int8"}, "dtype='int8' is not one of auto, float32, bfloat16, float16"),
        ({"device": "tpu"}, "device='tpu' is not one of auto, cpu, cuda, cuda:N"),
        ({"device": None}, "device=None is not one of auto, cpu, cuda, cuda:N"),
    ],
)
def test_a_mistake_is_named_with_its_key_value_and_fix(host: PluginHost, tree: dict[str, Any], error: str) -> None:
    assert message(tree, host).startswith(error)


def test_a_value_without_default_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Needy:
        path: str = "???"

    monkeypatch.setattr(config_module, "default_options", lambda: {**OPTIONS, "scheduler": "needy"})
    host = host_with(full_plugin(), plugin_module(register_schedulers=registering("scheduler", "needy", config=Needy)))
    assert message({}, host) == "scheduler.path has no value and no default; set scheduler.path=..."
    assert validate({"scheduler": {"path": "x"}}, host).scheduler.config == Needy("x")


def test_a_value_that_the_plugins_dataclass_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Strict:
        limit: int = 1

        def __post_init__(self) -> None:
            if self.limit < 1:
                raise ValueError(f"limit={self.limit} is below 1")

    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    host = host_with(
        full_plugin(), plugin_module(register_schedulers=registering("scheduler", "strict", config=Strict))
    )
    assert message({"scheduler": {"name": "strict", "limit": 0}}, host) == "scheduler: limit=0 is below 1"


def test_a_plugins_dataclass_that_fails_is_shown_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Careless:
        limit: int = 1

        def __post_init__(self) -> None:
            self.share = 1 / self.limit

    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    host = host_with(
        full_plugin(), plugin_module(register_schedulers=registering("scheduler", "careless", config=Careless))
    )
    found = message({"scheduler": {"name": "careless", "limit": 0}}, host)
    assert re.fullmatch(r"scheduler: ZeroDivisionError: division by zero \(.*test_settings.py:\d+, in __pos.*\)", found)


def test_choosing_what_a_broken_plugin_wanted_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    broken = plugin_module(register_schedulers=registering("scheduler", "theirs", target="nonsense"))
    error = message({"scheduler": "theirs"}, host_with(full_plugin(), broken))
    assert error.startswith("scheduler 'theirs' of plugin 'plugin1' (their-dist 1.2) cannot be used: ")


@dataclass
class DryArguments:
    multiplier: float = bounded(0.0, 0)
    breakers: tuple[str, ...] = ("\n",)


@dataclass
class TopArguments(FromSamplingParams):
    top_k: int = 0


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    monkeypatch.setattr(config_module, "default_options", lambda: dict(OPTIONS))
    dry = plugin_module(register_processors=registering("processor", "dry", config=DryArguments))
    top = plugin_module(register_processors=registering("processor", "top", config=TopArguments))
    return host_with(full_plugin(), dry, top)


def test_what_an_engine_says_of_a_processor_is_typed_by_its_arguments(processors: PluginHost) -> None:
    tree = {"processors": {"dry": {"multiplier": 1, "breakers": ["a"]}}}
    config = validate(tree, processors)
    option = config.processors["dry"]
    assert option.arguments == DryArguments(1.0, ("a",)) and option.entry is not None and option.entry.name == "dry"
    assert validate({}, processors).processors == {} == validate({"processors": None}, processors).processors
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"dyr": {"multiplier": 1}}, "no processor named 'dyr'. Did you mean 'dry'? Available: dry, top"),
        (
            {"dry": {"multiplyer": 1}},
            "unknown key 'processors.dry.multiplyer'. Did you mean 'processors.dry.multiplier'?",
        ),
        ({"dry": {"multiplier": "much"}}, "processors.dry.multiplier='much' is not a float"),
        ({"dry": {"multiplier": -1}}, "processors.dry.multiplier=-1.0 must be a finite number of at least 0"),
        ({"dry": 3}, "processors.dry=3 is not a mapping of fields"),
        ({"top": {"top_k": 3}}, "processors.top: its arguments are sampling parameters; set sampling.top_k in its pl"),
        (["dry"], "processors=['dry'] is not a mapping; write processors.NAME.FIELD=VALUE"),
    ],
)
def test_a_mistake_in_what_an_engine_says_of_a_processor_is_named(
    processors: PluginHost, value: Any, error: str
) -> None:
    assert message({"processors": value}, processors).startswith(error)


# --- the dataclasses are the only source of defaults


def test_a_composed_tree_holds_the_dataclasses_defaults_and_makes_the_same_configuration() -> None:
    tree = compose([], PluginHost.load(), RunKeys)[0].tree
    assert set(tree) - {"experiment"} == set(RUN_KEYS)
    defaults = {one.name: one.default for one in fields(EngineConfig)}
    assert tree["engine"] == defaults | {"prepared_sampling": list(defaults["prepared_sampling"])}
    assert SamplingParams.of(tree["sampling"]) == SamplingParams()
    assert {key: tree[key] for key in plain_defaults(RunKeys)} == plain_defaults(RunKeys)
    engine = {key: tree[key] for key in ENGINE_KEYS}
    assert validate(engine, PluginHost.load()) == validate({}, PluginHost.load())


@pytest.mark.parametrize("keys", [RunKeys, BenchKeys, SimulateKeys, ServeKeys, BatchKeys, ChatKeys])
def test_every_key_of_a_command_is_explained(keys: type) -> None:
    lines = list(documented(keys))
    named = dict(zip(lines[::2], lines[1::2], strict=True))
    assert "engine.max_num_seqs=512" in named
    assert [name for name, text in named.items() if not text.strip()] == []


def test_no_yaml_of_a_command_repeats_a_default() -> None:
    commands = {"config": RunKeys, "bench": BenchKeys, "simulate": SimulateKeys, "serve": ServeKeys, "batch": BatchKeys}
    for name, keys in commands.items():
        tree = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        assert {"defaults", "hydra"} <= set(tree) <= {"defaults", "hydra", "observers", name}
        own, defaults = tree.get(name, {}), plain_defaults(keys)
        assert all(defaults[name][key] != value for key, value in own.items())
        assert "observers" not in tree or tree["observers"] != defaults["observers"]


def test_a_configuration_without_defaults_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("tp: 1\n")
    with pytest.raises(ConfigError, match="no defaults list"):
        default_options(path)


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_preset_opens_with_a_comment_and_parses(path: Path) -> None:
    head = next(line for line in path.read_text().splitlines() if "@package" not in line)
    assert head.startswith(f"# conf/{path.parent.name}/{path.name}: ")
    assert OmegaConf.is_dict(OmegaConf.load(path))
    assert path.parent.name not in KINDS or "defaults" in OmegaConf.load(path)


def test_no_shipped_preset_bears_an_options_own_name() -> None:
    installed = PluginHost.load(environ={})
    options = {(entry.kind, entry.name) for entry in installed.registry}
    assert not options & {(preset.kind, preset.name) for preset in installed.presets}
