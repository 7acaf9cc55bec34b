"""model=auto with our own plugins: which model serves a checkpoint, in this process and in a server's front end."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from hookline import LLM
from hookline.core.checkpoint import checkpoint as checkpoints
from hookline.core.config.compose import compose
from hookline.core.config.settings import ENGINE_KEYS, validate
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.plugin.host import PluginHost
from hookline.core.run.settings import RunKeys
from hookline.core.serve.engine_client import ModelFacts
from hookline.core.serve.processes.front_main import codec_of
from tests.hf_models import QWEN3
from tests.test_parity import BUNDLED, greedy
from tests.transformers_cases import CASES, SIZES, make_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3", "model=auto takes 'qwen3': it claims Qwen3ForCausalLM"),
        ("stablelm", "model=auto takes 'transformers': no other model that is installed claims StableLmForCausalLM"),
    ],
)
def test_a_folder_alone_is_served_by_the_model_for_it(name, why, tmp_path, caplog):
    if name == "qwen3":
        shutil.copytree(BUNDLED, tmp_path, dirs_exist_ok=True)
    else:
        make_checkpoint(tmp_path, CASES[name])
    with caplog.at_level(logging.INFO, "hookline"), LLM(str(tmp_path), device="cpu") as llm:
        assert len(llm.generate([[1, 2, 3]], greedy(4))[0].token_ids) == 4
    assert why in caplog.text


@pytest.mark.slow
def test_a_llama_of_another_model_type_is_served_by_transformers(tmp_path, caplog):
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "iquestcoder"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"checkpoint": str(tmp_path), "weights": "random"}
    with caplog.at_level(logging.INFO, "hookline"), LLM(model=model, device="cpu") as llm:
        assert llm.config.model.name == "transformers"
    assert (
        "model=llama claims the checkpoint's architecture and does not serve it (Llama does not support" in caplog.text
    )


def test_a_start_looks_for_the_checkpoint_and_cuts_its_layers_into_groups_once(tmp_path, monkeypatch):
    config = {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, cut, locate, of = [], [], checkpoints.locate, CacheGroups.of
    monkeypatch.setattr(checkpoints, "locate", lambda reference: found.append(reference) or locate(reference))
    monkeypatch.setattr(CacheGroups, "of", lambda *arguments: cut.append(arguments) or of(*arguments))
    model = {"checkpoint": str(tmp_path), "weights": "random"}
    with LLM(model=model, device="cpu", engine={"num_blocks": 20}) as llm:
        assert llm.config.model.name == "qwen3"
    assert found == [str(tmp_path)] and len(cut) == 1


def test_without_a_checkpoint_the_bundled_one_is_served_as_by_its_own_name():
    host = PluginHost.load()
    assert validate({}, host).model == validate({"model": "qwen3"}, host).model
    tree = compose([], host, RunKeys)[0].tree
    assert validate({key: tree[key] for key in ENGINE_KEYS}, host).model.name == "qwen3"


def test_the_command_line_takes_a_checkpoint_without_a_model(tmp_path):
    host = PluginHost.load()
    tree = compose([f"model.checkpoint={tmp_path}", "model.chat=true"], host, RunKeys)[0].tree
    option = validate({key: tree[key] for key in ENGINE_KEYS}, host).model
    assert (option.entry, option.config.checkpoint, option.config.chat) == (None, str(tmp_path), True)


def test_a_front_end_takes_the_model_that_the_engine_chose_and_looks_for_no_checkpoint():
    facts = ModelFacts("nowhere", str(BUNDLED), 64, 100, 0, "transformers")
    tree = {"model": {"name": "auto", "checkpoint": str(Path("no", "such", "folder"))}}
    codec = codec_of(facts, tree, PluginHost.load())
    assert codec.decode(codec.encode("import os")) == "import os"
