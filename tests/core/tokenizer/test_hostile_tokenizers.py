"""Whatever a tokenizer.json holds, and whatever text or ids meet it: an answer, or an error in one line."""

import base64
import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from hookline.core.checkpoint.tokenizer_growth import check_file
from hookline.core.errors import CheckpointError, HooklineError, RequestError
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Codec, token_texts, with_word_ids
from hookline.core.tokenizer.reader import TextReader
from hookline.core.tokenizer.token_bytes import grammar_vocabulary
from tests.fuzzing import examples

LONGEST_LINE = 1500
VOCAB_SIZE = 300


def byte_level():
    """Bytes and a few merges, as models of today have them."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    names += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={name: id_ for id_, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return json.loads(tokenizer.to_str())


def with_fallback():
    """SentencePiece's form: pieces, and single bytes for what no piece has."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "<unk>": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return json.loads(tokenizer.to_str())


SOUND = {"bytes": byte_level(), "pieces": with_fallback()}
"""tokenizer.json of two kinds."""
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from([-1, 2**32, 2**31, "", "(", "(a+)+$", "\ud800", "ByteLevel", "Sequence", "WordPiece", "Replace"]),
    st.builds(lambda: {"type": "Sequence", "normalizers": []}),
    st.builds(list),
    st.builds(dict),
)
CHANGES = st.lists(st.tuples(st.lists(st.integers(0, 400), min_size=1, max_size=4), LEAVES), max_size=3)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from("he lo\u0301\u200d\ufeff\x00<>end▁a\U0001f600"), max_size=60),
    st.sampled_from(["\ud800", "a" * 500, "\u0301" * 90, "<end>" * 20, " " * 300, "\x00", "hello <end> a"]),
)
IDS = st.lists(st.one_of(st.integers(0, VOCAB_SIZE), st.sampled_from([-1, 2**31, 2**63, 10**30])), max_size=12)


def changed(tree, changes):
    """The tree with other values at some places, each found by going down: an index among a node's members."""
    tree = copy.deepcopy(tree)
    for path, leaf in changes:
        node = tree
        for place in path:
            members = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not members:
                break
            key = members[place % len(members)]
            if not isinstance(node[key], dict | list) or not node[key] or place is path[-1]:
                node[key] = leaf
                break
            node = node[key]
    return tree


def in_one_line(error):
    line = str(error)
    assert 0 < len(line) < LONGEST_LINE and "\n" not in line and "Traceback" not in line


def answered(call):
    """What it answers, or None after an error of ours in one line; nothing else may leave it."""
    try:
        return call()
    except HooklineError as error:
        in_one_line(error)
        return None


def exercised(codec, text, ids):
    """Everything that is asked of a tokenizer while an engine serves."""
    found = answered(lambda: codec.encode(text))
    assert found is None or all(isinstance(one, int) for one in found)
    for tokens in filter(None, (found, ids)):
        for skips in (False, True):
            whole = answered(lambda tokens=tokens, skips=skips: codec.decode(tokens, skip_special_tokens=skips))
            assert whole is None or isinstance(whole, str)
            reader = answered(lambda tokens=tokens, skips=skips: read(codec, tokens, skips))
            assert reader is None or whole is None or reader.text == whole
    answered(lambda: with_word_ids(SamplingParams(bad_words=(text,)), codec) if text else None)
    answered(lambda: token_texts(codec, VOCAB_SIZE).texts)
    vocabulary = answered(lambda: grammar_vocabulary(codec, [1], VOCAB_SIZE))
    assert vocabulary is None or len(vocabulary.tokens) == VOCAB_SIZE


def read(codec, tokens, skips):
    params = SamplingParams(skip_special_tokens=skips)
    reader = TextReader(params, codec.detokenizer(skip_special_tokens=skips), None)
    for token in tokens:
        reader.see(token, None)
    reader.finish()
    return reader


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(kind=st.sampled_from(sorted(SOUND)), changes=CHANGES, text=TEXTS, ids=IDS)
def test_any_tokenizer_file_is_read_or_refused_in_one_line(tmp_path_factory, kind, changes, text, ids):
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    folder.mkdir(exist_ok=True)
    tree = changed(SOUND[kind], changes)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    codec = Codec(folder, max_len=4096)
    if answered(lambda: codec.tokenizer) is not None:
        exercised(codec, text, ids)


@pytest.fixture(scope="module", params=sorted(SOUND))
def sound(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer.json").write_text(json.dumps(SOUND[request.param]))
    return Codec(folder, max_len=4096)


@pytest.mark.slow
@settings(max_examples=examples(250), deadline=None)
@given(text=TEXTS, ids=IDS)
def test_any_text_and_any_ids_are_answered_or_refused_in_one_line(sound, text, ids):
    exercised(sound, text, ids)


def test_a_run_of_spaces_costs_no_more_for_each_token_the_longer_it_is(sound):
    """With pieces, a space alone has no text at the beginning of what is decoded, so the window must hold two."""
    ids, lengths = sound.encode("a" + " " * 400 + "a"), []
    decode, sound.decode = (
        sound.decode,
        lambda tokens, **options: lengths.append(len(tokens)) or decode(tokens, **options),
    )
    try:
        reader = read(sound, ids, False)
    finally:
        del sound.decode
    assert reader.text == decode(ids, skip_special_tokens=False) and max(lengths) <= 16


@given(ids=st.lists(st.integers(0, 260), max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_numpy_ids_read_as_ints_do(sound, ids):
    assert sound.encode(np.array(ids, dtype=np.int64)) == ids


def replacing(count, size=300, pattern="a"):
    part = {"type": "Replace", "pattern": pattern if isinstance(pattern, dict) else {"String": pattern}}
    return [{**part, "content": "a" * size}] * count


def byte_levels(count):
    return [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * count


def precompiled(size):
    """A map of SentencePiece's that holds a text of this size."""
    data = b"\x04\x00\x00\x00" + b"\x00" * 4 + b"a" * size + b"\x00"
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}]


def repeating(count):
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, {}
    return {"type": "TemplateProcessing", "single": [text] * count, "pair": [], "special_tokens": special}


MULTIPLYING = [
    {"normalizer": {"type": "Sequence", "normalizers": replacing(3)}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": replacing(1, 9)}] * 2}},
    {"normalizer": replacing(1, 300, "a")[0]},
    {"normalizer": {"type": "Sequence", "normalizers": replacing(3, 4, {"Regex": ""})}},
    {"normalizer": {"type": "Sequence", "normalizers": replacing(3, 4, {"Regex": "(?=a)"})}},
    {"normalizer": {"type": "Sequence", "normalizers": replacing(3, 5, {"Regex": "[ab]"})}},
    {"normalizer": {"type": "Sequence", "normalizers": replacing(4, 4, "")}},
    {"normalizer": {"type": "Prepend", "prepend": "a" * 100_000}},
    {"normalizer": {"type": "Sequence", "normalizers": byte_levels(40)}},
    {"normalizer": {"type": "Sequence", "normalizers": precompiled(300)}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": byte_levels(40)}},
    {"decoder": {"type": "Sequence", "decoders": replacing(3)}},
    {"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}},
    {"post_processor": repeating(1000)},
    {"post_processor": {"type": "Sequence", "processors": [repeating(9)] * 2}},
]


@pytest.mark.parametrize("parts", MULTIPLYING)
@pytest.mark.parametrize("escapes", [False, True])
def test_a_tokenizer_that_multiplies_texts_is_refused_before_it_meets_one(parts, escapes, tmp_path):
    tree = SOUND["pieces"] | parts
    added = {"id": 260, "content": "a" * 30, "single_word": False, "lstrip": False, "rstrip": False, "special": False}
    tree["added_tokens"] = [{**added, "normalized": True}]  # as soon as the file is loaded
    text = json.dumps(tree)
    if escapes:
        text = text.replace('"normalizer"', '"n\\u006frmalizer"').replace('"Replace"', '"Re\\u0070lace"')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"the tokenizer's .* may make a text more than 64 times as long"):
        Codec(tmp_path).encode("a" * 30)


def test_what_tokenizers_of_today_replace_is_no_multiplying(tmp_path):
    parts = {
        "normalizer": [
            *replacing(1, 1, " "),
            *replacing(1, 1, {"Regex": " {2,}"}),
            *replacing(1, 3, "\n"),
            {"type": "Prepend", "prepend": "▁"},
            {"type": "NFKC"},
            {"type": "Lowercase"},
            *precompiled(18),
        ]
    }
    tree = SOUND["bytes"] | {"normalizer": {"type": "Sequence", "normalizers": parts["normalizer"][:-1]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    codec = Codec(tmp_path, max_len=50)
    assert codec.encode("hello") and codec._growth == 3
    check_file(json.dumps({"normalizer": {"type": "Sequence", "normalizers": parts["normalizer"]}}).encode())
    for name in SOUND:
        check_file(json.dumps(SOUND[name]).encode())


def test_a_text_of_which_a_tokenizer_makes_more_than_is_tokenized_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hookline.core.tokenizer.codec.MAX_CHARACTERS", 100)
    (tmp_path / "tokenizer.json").write_text(json.dumps(SOUND["bytes"] | {"normalizer": replacing(1, 10)[0]}))
    codec = Codec(tmp_path)
    assert len(codec.encode("a" * 10)) == 100
    with pytest.raises(RequestError, match="of each of which the checkpoint's tokenizer may make 10; at most 100 are"):
        codec.encode("a" * 11)
