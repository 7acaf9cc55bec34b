"""Finding a checkpoint and reading its config: each form of reference, and each way it can fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hookline.core.checkpoint.checkpoint import Checkpoint, load_tokenizer, resolve, resolve_model, resolve_random
from hookline.core.checkpoint.locate import locate
from hookline.core.contracts import ModelConfig
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.util.mappings import merge


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def refusal(reference: str) -> str:
    with pytest.raises(CheckpointError) as error:
        resolve(reference)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_local_folder_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"hidden_size": 8})
    found = resolve(str(folder))
    assert found == Checkpoint(str(folder), folder, {"hidden_size": 8}, ())
    assert not found.is_packaged


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {})
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}), encoding="utf-8-sig")
    assert resolve(str(folder)).config == {"hidden_size": 8}


def eos_of(folder: Path, **options: Any) -> tuple[tuple[int, ...], tuple[str, int] | None]:
    found = resolve_model(ModelConfig(checkpoint=str(folder), **options))
    return found.eos_token_ids, found.tokenizer_eos


def test_the_token_that_the_tokenizer_alone_names_ends_completions_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"hidden_size": 8})
    named = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"7": {"content": "<end>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    assert eos_of(folder) == ((7,), ("<end>", 7))
    write(folder, {"hidden_size": 8, "eos_token_id": 3})
    assert eos_of(folder) == ((3, 7), ("<end>", 7))
    write(folder, {"hidden_size": 8}, {"eos_token_id": [3, 7]})
    assert eos_of(folder) == ((3, 7), None)
    assert eos_of(folder, hf_overrides={"eos_token_id": 5}) == ((5,), None)
    other = write(tmp_path / "other", {})
    added = {"added_tokens": [{"id": 9, "content": "</s>"}], "model": {}}
    (other / "tokenizer.json").write_text(json.dumps(added))
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert eos_of(folder, tokenizer=str(other)) == ((3, 7, 9), ("</s>", 9))
    (other / "tokenizer.json").write_text("{")
    assert eos_of(folder, tokenizer=str(other)) == ((3, 7), None)


def test_a_tokenizer_that_needs_sentencepiece_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookline.core.checkpoint.checkpoint.find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05\n\x03abc")
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no tokenizer.json, and its tokenizer.model needs a package that is not installed: pip install "
        "sentencepiece protobuf, or put the tokenizer.json beside it that AutoTokenizer's save_pretrained writes"
    )


def test_a_folder_in_a_package_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "shipped_models" / "tiny", {"hidden_size": 8})
    (tmp_path / "shipped_models" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = resolve("package:shipped_models/tiny")
    sys.modules.pop("shipped_models")
    assert found.folder == folder and found.is_packaged


@pytest.mark.parametrize("place", ["no_such_module/tiny", "core/no_such_folder", "core", "/x"])
def test_a_package_reference_that_leads_nowhere_is_refused(place: str) -> None:
    assert f"package:{place}" in refusal(f"package:{place}")


def test_a_path_that_does_not_exist_is_refused_with_the_forms_that_work(tmp_path: Path) -> None:
    message = refusal(str(tmp_path / "absent"))
    assert "does not exist" in message and "owner/name" in message and "package:MODULE/FOLDER" in message


@pytest.mark.parametrize("reference", ["x" * 5000, "/" + "é" * 300, "~" + "x" * 300])
def test_a_reference_that_no_path_can_be_is_refused_in_a_short_line(reference: str) -> None:
    assert "cannot be looked for" in (message := refusal(reference)) and len(message) < 500


def test_an_empty_reference_is_refused() -> None:
    assert refusal("").startswith("model.checkpoint is not set; give a folder")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    assert "is a file; give a folder" in refusal(str(tmp_path / "model.gguf"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file; give a folder" in refusal(str(tmp_path / "model.safetensors"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"adapter_config.json": '{"base_model_name_or_path": "owner/base"}', "adapter_model.safetensors": ""},
            "holds an adapter for owner/base, which changes a model and is none; merge the two with peft",
        ),
        ({"adapter_model.bin": "", "adapter_config.json": "["}, "holds an adapter, which changes a model"),
        (
            {"params.json": "{}", "consolidated.safetensors": "", "tekken.json": "{}"},
            "is in the form of the model's makers (consolidated.safetensors), which is not read; give the same",
        ),
        (
            {"params.json": "{}", "consolidated.00.pth": ""},
            "is in the form of the model's makers (consolidated.00.pth)",
        ),
        ({"model_index.json": "{}"}, "holds a pipeline for images (model_index.json)"),
        ({"snapshots/abc/config.json": "{}"}, "has no config.json, but {folder}/snapshots/abc has one; give that"),
        ({"checkpoint-500/config.json": "{}"}, "has no config.json, but {folder}/checkpoint-500 has one; give that"),
    ],
)
def test_a_folder_of_another_form_is_refused_with_what_it_is_and_what_to_do(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert refusal(str(tmp_path)).startswith(f"{tmp_path} {words.replace('{folder}', str(tmp_path))}")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.mkdir, "is no regular file; download or copy it again"),
        (os.mkfifo, "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (lambda path: path.symlink_to("nowhere"), "is a link to a file that is not there"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"),
            "is a pointer of Git LFS in place of the file; run git lfs pull in its folder",
        ),
    ],
)
def test_what_is_no_file_is_neither_read_nor_taken_for_a_missing_one(
    tmp_path: Path, name: str, make: Callable[[Path], Any], words: str
) -> None:
    if name != "config.json":
        write(tmp_path, {})
    if name == "tokenizer.json":
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    make(tmp_path / name)
    with pytest.raises(CheckpointError) as error:
        resolve_model(ModelConfig(checkpoint=str(tmp_path)))
    assert str(error.value).startswith(f"{tmp_path / name} {words}")


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert str(tmp_path / "config.json") in refusal(str(tmp_path))


def test_a_config_may_hold_infinity_and_no_nan(tmp_path: Path) -> None:
    write(tmp_path, {"time_step_limit": [0.0, float("inf")]})
    assert resolve(str(tmp_path)).config == {"time_step_limit": [0.0, float("inf")]}
    write(tmp_path, {"rms_norm_eps": float("nan")})
    assert "config.json is not readable JSON (NaN is among its values)" in refusal(str(tmp_path))


def test_a_config_with_an_endless_number_is_told_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {"9" * 5000}}}')
    assert "is not readable JSON (a number in it has more than 4300 digits); download" in refusal(str(tmp_path))


def test_a_hub_id_is_downloaded_without_pickles_or_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "snapshot", {"hidden_size": 8})
    asked: dict[str, Any] = {}

    def snapshot(reference: str, **options: Any) -> str:
        asked.update(options, reference=reference)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("someone/some-model").folder == folder
    assert asked["reference"] == "someone/some-model"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    assert asked["ignore_patterns"] == ["*/*", "consolidated*"]


def test_an_unreachable_hub_gives_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(reference: str, **options: Any) -> str:
        raise OSError("cannot reach the hub\nand many more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    message = refusal("someone/some-model")
    assert "someone/some-model" in message and "OSError: cannot reach the hub)" in message
    assert "pass a local folder: model.checkpoint=/path/to/folder" in message


def test_a_folder_named_like_a_hub_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "someone" / "some-model", {"hidden_size": 8})
    monkeypatch.chdir(tmp_path)
    assert locate("someone/some-model") == Path("someone/some-model")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6, 5]}, (5, 6)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": None}, (2, 3)),
        ({"eos_token_id": 0}, None, (0,)),
    ],
)
def test_eos_tokens_come_from_the_generation_config_then_the_config(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert resolve(str(write(tmp_path, config, generation))).eos_token_ids == expected


def test_an_overridden_eos_token_wins(tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token_id": 2}, {"eos_token_id": 5})
    assert resolve(str(folder), {"eos_token_id": [7]}).eos_token_ids == (7,)


def test_an_eos_token_that_is_no_id_is_refused(tmp_path: Path) -> None:
    assert "'</s>'" in refusal(str(write(tmp_path, {"eos_token_id": "</s>"})))


@pytest.mark.parametrize("value", [-1, [-1], [5, -1], 2**31, 99999999999999999999, True, 1.0, [[2]], {"id": 2}])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_an_eos_token_that_no_vocabulary_can_have_is_refused_by_name(tmp_path: Path, file: str, value: Any) -> None:
    values = {"eos_token_id": value}
    folder = write(tmp_path, {}, values) if file == "generation_config" else write(tmp_path, values)
    assert f"eos_token_id of {tmp_path} is {value!r}; it must be a token id" in refusal(str(folder))


def test_an_eos_token_behind_the_vocabulary_is_left_to_the_engine(tmp_path: Path) -> None:
    assert resolve(str(write(tmp_path, {"eos_token_id": 2**31 - 1}))).eos_token_ids == (2**31 - 1,)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, '{"a":' + "[" * 70 + "]" * 70 + "}"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_nested_too_deeply_is_named(tmp_path: Path, file: str, text: str) -> None:
    (write(tmp_path, {}) / file).write_text(text)
    assert str(tmp_path / file) in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 10**400}, "sampling.temperature=<whole number of about 400 digits> must be a finite number"),
        ({"top_k": 10**30}, "sampling.top_k=1000000000000000000000000000000 must be at most 2**63-1"),
        ({"top_k": 1e30}, "sampling.top_k=1e+30 must be a whole number"),
        ({"top_p": 10**40}, "must be a number above 0 and at most 1"),
    ],
)
def test_a_recommendation_out_of_range_is_named_with_its_file(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    line = refusal(str(write(tmp_path, {}, values)))
    assert str(tmp_path / "generation_config.json") in line and message in line


def test_overrides_are_merged_into_nested_mappings(tmp_path: Path) -> None:
    folder = write(tmp_path, {"rope_scaling": {"factor": 2.0, "type": "linear"}, "hidden_size": 8})
    found = resolve(str(folder), {"rope_scaling": {"factor": 4.0}, "extra": [1]})
    assert found.config == {"rope_scaling": {"factor": 4.0, "type": "linear"}, "hidden_size": 8, "extra": [1]}


def test_merging_leaves_its_inputs_alone() -> None:
    base: dict[str, Any] = {"inner": {"a": 1}}
    assert merge(base, {"inner": {"b": 2}}) == {"inner": {"a": 1, "b": 2}}
    assert base == {"inner": {"a": 1}}


def test_random_weights_use_the_config_of_a_local_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, {"hidden_size": 8})
    model = ModelConfig(checkpoint=str(folder), weights="random", random_shape={"hidden_size": 9})
    assert resolve_random(model).config == {"hidden_size": 8}


def test_random_weights_use_the_hub_cache_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, {"hidden_size": 8})
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("went to the network"))
    assert resolve_random(ModelConfig(checkpoint="someone/some-model")).folder == folder


def test_random_weights_fall_back_to_the_given_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    model = ModelConfig(
        checkpoint="someone/some-model", random_shape={"hidden_size": 9, "eos_token_id": 1}, hf_overrides={"x": 1}
    )
    found = resolve_random(model)
    assert found.folder is None and found.eos_token_ids == (1,)
    assert found.config == {"hidden_size": 9, "eos_token_id": 1, "x": 1}


def test_random_weights_without_any_config_say_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"model\.random_shape"):
        resolve_random(ModelConfig(checkpoint="someone/some-model"))


def test_random_weights_with_a_mistyped_folder_do_not_fall_back_silently(tmp_path: Path) -> None:
    model = ModelConfig(checkpoint=str(tmp_path / "absent"), random_shape={"hidden_size": 9})
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_random(model)


def test_resolving_a_model_option_follows_its_weights_and_overrides(tmp_path: Path) -> None:
    folder = write(tmp_path, {"hidden_size": 8})
    model = ModelConfig(checkpoint=str(folder), hf_overrides={"x": 1})
    assert resolve_model(model).config == {"hidden_size": 8, "x": 1}
    assert resolve_model(ModelConfig(weights="random", random_shape={"y": 1})).config == {"y": 1}


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.weights is 'dummy'; it must be one of: checkpoint, random"):
        resolve_model(ModelConfig(weights="dummy"))


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, {})) is None


def test_a_tokenizer_is_loaded_from_its_folder_alone(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "<eos>": 2}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("hello world").input_ids == [0, 1]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"content": "world"}], tokenize=False) == "world"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize(
    ("text", "words"), [('{"a', "is not readable JSON"), ("[]", "holds a JSON list, not an object")]
)
def test_a_broken_file_beside_a_tokenizer_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    test_a_tokenizer_is_loaded_from_its_folder_alone(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name} {words}")


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
