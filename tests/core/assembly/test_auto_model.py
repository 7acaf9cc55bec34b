"""model=auto: who serves a checkpoint, by the claims of registrations."""

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hookline.core.assembly.auto_model import with_model
from hookline.core.config import settings as config_module
from hookline.core.config.settings import Config, validate
from hookline.core.contracts import ModelConfig, Needs
from hookline.core.errors import CheckpointError, ConfigError, PluginError
from hookline.core.plugin.host import PluginHost
from hookline.core.testing.plain_model import PlainModel
from tests.core.plugin_fakes import OPTIONS, TinyConfig, full_plugin, host_with, plugin_module, registering

HERE = f"{__name__}:"


class OpensFiles(PlainModel):
    @classmethod
    def open_checkpoint(cls, config: ModelConfig) -> Any:
        if not config.checkpoint.endswith(".weights"):
            raise CheckpointError("not a file of mine")
        return object()


class OpensNothing(PlainModel):
    @classmethod
    def open_checkpoint(cls, config: ModelConfig) -> Any:
        return None


class TakesBirds(PlainModel):
    @classmethod
    def spec(cls, hf_config: Any) -> Any:
        if hf_config.get("model_type") != "bird":
            raise ConfigError("birds alone")


class TakesNothing(PlainModel):
    @classmethod
    def spec(cls, hf_config: Any) -> Any:
        raise ConfigError("nothing at all")


class TakesAll(PlainModel):
    @classmethod
    def spec(cls, hf_config: Any) -> Any:
        return None


def model_plugin(name: str, *architectures: str, target: str = "no_such_package:Model", **options: Any) -> ModuleType:
    config = options.pop("config", ModelConfig)
    options |= {"target": target, "config": config, "architectures": architectures}
    return plugin_module(register_models=registering("model", name, **options))


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "default_options", lambda: {**OPTIONS, "model": "auto"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BirdForCausalLM"]}))
    return str(tmp_path)


def chosen(checkpoint: str, *plugins: ModuleType, **fields: Any) -> Config:
    host = host_with(full_plugin(), *plugins)
    return with_model(validate({"model": {"checkpoint": checkpoint, **fields}}, host), host)[0]


def message(checkpoint: str, *plugins: ModuleType) -> str:
    with pytest.raises(PluginError) as error:
        chosen(checkpoint, *plugins)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_model_that_claims_the_architecture_is_taken_and_the_log_says_why(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        config = chosen(
            checkpoint, model_plugin("rest", "*"), model_plugin("bird", "BirdForCausalLM", "EggForCausalLM")
        )
    assert config.model.name == "bird"
    assert "model=auto takes 'bird': it claims BirdForCausalLM" in caplog.text


def test_what_nobody_claims_goes_to_the_model_that_claims_the_rest(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        config = chosen(checkpoint, model_plugin("rest", "*"), model_plugin("fish", "FishForCausalLM"))
    assert config.model.name == "rest"
    assert "model=auto takes 'rest': no other model that is installed claims BirdForCausalLM" in caplog.text


def test_two_claims_need_the_users_choice(checkpoint: str) -> None:
    text = message(checkpoint, model_plugin("bird", "BirdForCausalLM"), model_plugin("crow", "BirdForCausalLM"))
    assert "model 'bird' of" in text and "model 'crow' of" in text
    assert text.endswith("claim BirdForCausalLM; choose model=bird or model=crow")


def test_a_model_may_openly_replace_the_one_that_claims_the_same(checkpoint: str) -> None:
    ours, theirs = model_plugin("bird", "BirdForCausalLM"), model_plugin("crow", "BirdForCausalLM", replace=True)
    assert chosen(checkpoint, ours, theirs).model.name == "crow"


def test_a_claim_of_a_model_that_cannot_run_here_does_not_count(checkpoint: str) -> None:
    lacking = model_plugin("bird", "BirdForCausalLM", needs=Needs(packages=("no_such_package",)))
    assert chosen(checkpoint, lacking, model_plugin("rest", "*")).model.name == "rest"


def test_an_architecture_that_nobody_claims_is_refused_with_the_models_there_are(checkpoint: str) -> None:
    assert message(checkpoint, model_plugin("fish", "FishForCausalLM")) == (
        "model=auto: no model that is installed claims BirdForCausalLM; name one of: fish, tiny"
    )


@pytest.mark.parametrize(("model_type", "taken"), [("bird", "bird"), ("penguin", "rest")])
def test_a_checkpoint_that_its_claimant_refuses_goes_to_the_model_of_the_rest(
    model_type: str, taken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"architectures": ["BirdForCausalLM"], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    birds = model_plugin("bird", "BirdForCausalLM", target=f"{HERE}TakesBirds")
    with caplog.at_level(logging.INFO, "hookline"):
        assert chosen(str(tmp_path), birds, model_plugin("rest", "*", target=f"{HERE}TakesAll")).model.name == taken
    why = "model=bird claims the checkpoint's architecture and does not serve it (birds alone)"
    assert (why in caplog.text) == (taken == "rest")


def test_a_checkpoint_that_both_refuse_is_refused_with_both_reasons(checkpoint: str) -> None:
    birds = model_plugin("bird", "BirdForCausalLM", target=f"{HERE}TakesBirds")
    with pytest.raises(ConfigError, match=r"^birds alone; nothing at all$"):
        chosen(checkpoint, birds, model_plugin("rest", "*", target=f"{HERE}TakesNothing"))


def test_a_file_goes_to_the_one_model_that_opens_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "bird.weights"
    file.write_text("")
    opens = model_plugin("opens", target=f"{HERE}OpensFiles")
    others = model_plugin("nothing", target=f"{HERE}OpensNothing"), model_plugin("broken")
    with caplog.at_level(logging.INFO, "hookline"):
        assert chosen(str(file), *others, opens).model.name == "opens"
    assert f"model=auto takes 'opens': it opens {file}" in caplog.text
    assert "model 'broken' of" in caplog.text


def test_a_file_that_two_models_open_needs_the_users_choice(tmp_path: Path) -> None:
    file = tmp_path / "bird.weights"
    file.write_text("")
    text = message(str(file), *(model_plugin(name, target=f"{HERE}OpensFiles") for name in ("one", "two")))
    assert text.endswith(f"open {file}; choose model=one or model=two")


def test_a_checkpoint_that_is_not_there_is_refused_as_for_a_named_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere' does not exist; give a folder with config.json"):
        chosen(str(tmp_path / "nowhere"), model_plugin("rest", "*"))


def test_what_is_asked_of_auto_arrives_and_the_models_own_defaults_stay(checkpoint: str) -> None:
    plugin = model_plugin("bird", "BirdForCausalLM", config=TinyConfig)
    config = chosen(checkpoint, plugin, chat=True, hf_overrides={"depth": 3}).model.config
    assert config == TinyConfig(checkpoint=checkpoint, chat=True, hf_overrides={"depth": 3}, num_layers=2)


def test_without_a_checkpoint_the_first_model_that_brings_one_is_taken() -> None:
    host = host_with(model_plugin("bare", "*"), full_plugin())
    option = validate({"model": {"chat": True}}, host).model
    assert (option.name, option.config) == ("tiny", TinyConfig(chat=True))


def test_without_a_checkpoint_and_a_model_that_brings_one_the_user_must_name_one() -> None:
    host = PluginHost.load([], {})
    with pytest.raises(ConfigError, match=r"model=auto needs model.checkpoint=FOLDER, a hub id, or a model's name"):
        validate({}, host)


def test_a_random_shape_says_its_architecture_itself() -> None:
    shape = {"architectures": ["BirdForCausalLM"]}
    assert (
        chosen("", model_plugin("bird", "BirdForCausalLM"), weights="random", random_shape=shape).model.name == "bird"
    )


@pytest.mark.parametrize("claims", [["BirdForCausalLM"], ("",), (3,)])
def test_claims_that_are_no_tuple_of_names_disable_their_plugin(claims: Any) -> None:
    plugin = plugin_module(register_models=registering("model", "bird", config=ModelConfig, architectures=claims))
    host = host_with(plugin)
    assert f"architectures={claims!r} is not a tuple of names" in host.problems[0].cause


def test_only_models_claim_architectures() -> None:
    plugin = plugin_module(register_samplers=registering("sampler", "dice", architectures=("BirdForCausalLM",)))
    assert "architectures are a model's, and it is none" in host_with(plugin).problems[0].cause
