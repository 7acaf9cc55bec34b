"""A tokenizer read without transformers answers as transformers' does, and is not used where that might differ."""

import copy
import json
import shutil
import sys
import threading
from pathlib import Path

import pytest

from hookline.core.checkpoint.checkpoint import load_tokenizer
from hookline.core.checkpoint.file_tokenizer import LONG, FileTokenizer, file_tokenizer
from hookline.plugins import models

BUNDLED = Path(models.__file__).parent / "qwen3_tiny"
TEXTS = [
    "",
    "def walk(path):\n    return  1\n",
    "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    " e\u0301 \u00e9 \U0001f600\u200d <|im_",
    "\x00\t\r\n 12345 Ünïcode",
    "<|im_start|> e\u0301\U0001f600\u200d 12345\n" * (LONG // 20),
]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def with_bos(folder):
    """A tokenizer with a token that begins every text, a post-processor for it and flags in its config."""
    from tokenizers import AddedToken, Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<pad>", special=True, lstrip=True)])
    single = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[single])
    tokenizer.save(str(folder / "tokenizer.json"))
    listed = {
        id_: {
            name: getattr(one, name) for name in ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
        }
        for id_, one in tokenizer.get_added_tokens_decoder().items()
    }
    config = {
        "bos_token": "<bos>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>"},
        "added_tokens_decoder": listed,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True, "model_max_length": 99}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module", params=["bundled", "with_bos"])
def both(request, tmp_path_factory):
    """Ours, and transformers' of the same folder."""
    from transformers import PreTrainedTokenizerFast

    folder = BUNDLED if request.param == "bundled" else with_bos(tmp_path_factory.mktemp("tokenizer"))
    ours = load_tokenizer(folder)
    assert isinstance(ours, FileTokenizer)
    return ours, PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_same_ids_and_ids_the_same_texts(both, text):
    ours, theirs = both
    for options in ({}, {"add_special_tokens": False}, {"split_special_tokens": True}):
        ids = ours.encode(text, **options)
        assert ids == theirs.encode(text, **options)
        for skips in (False, True):
            plain = dict(skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, **plain) == theirs.decode(ids, **plain)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_handled(work):
    ours, begun, ended, turns = load_tokenizer(BUNDLED), threading.Event(), threading.Event(), []
    given = "The quick brown fox. " * 25_000 if work == "encode" else [65] * 1_000_000

    def do_it():
        begun.set()
        ours.encode(given) if work == "encode" else ours.decode(given, clean_up_tokenization_spaces=False)
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that a thread has its turn only where another one releases the lock
    try:
        thread = threading.Thread(target=do_it)
        thread.start()
        begun.wait()
        turns.append(ended.is_set())
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert turns == [False]


@pytest.mark.slow
def test_everything_else_that_is_asked_is_answered_alike(both):
    ours, theirs = both
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.chat_template == theirs.chat_template
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert repr(ours.added_tokens_decoder) == repr(theirs.added_tokens_decoder)
    assert ours.convert_ids_to_tokens(7) == theirs.convert_ids_to_tokens(7)
    assert ours.convert_ids_to_tokens([7, 8]) == theirs.convert_ids_to_tokens([7, 8])
    assert ours.model_max_length == theirs.model_max_length
    rendered = [one.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) for one in both]
    assert rendered[0] == rendered[1]


@pytest.mark.slow
def test_a_copy_is_its_own(both):
    ours, _ = both
    other = copy.deepcopy(ours)
    assert other.encode(TEXTS[2], split_special_tokens=True) != ours.encode(TEXTS[2])
    assert ours.backend_tokenizer.encode_special_tokens is False


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<not there>"},
        {"eos_token": {"content": "<|endoftext|>"}},
        {"additional_special_tokens": ["<not there>"]},
        {"added_tokens_decoder": {"4095": {"content": "<other>", "special": True}}},
        {"image_token": "<not there>"},
        {"split_special_tokens": True},
        {"chat_template": [{"name": "default", "template": "x"}]},
        {"add_prefix_space": True},
        {"fix_mistral_regex": True},
    ],
)
def test_what_transformers_would_change_is_left_to_it(tmp_path, config):
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    assert file_tokenizer(tmp_path) is not None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert file_tokenizer(tmp_path) is None


def test_files_that_transformers_reads_too_are_left_to_it(tmp_path):
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert file_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    assert file_tokenizer(tmp_path) is not None


def test_an_unknown_flag_of_a_token_is_ignored_and_not_written_anywhere(tmp_path, capfd):
    config = json.loads((with_bos(tmp_path) / "tokenizer_config.json").read_text())
    for one in config["added_tokens_decoder"].values():
        one["\x1b[31m"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert file_tokenizer(tmp_path) is not None
    assert capfd.readouterr() == ("", "")
