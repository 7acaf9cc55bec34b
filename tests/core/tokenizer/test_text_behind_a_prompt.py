"""A completion's text is read behind its prompt: the two together are the text of all tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.outputs import FinishReason
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Codec, CodecTexts
from hookline.core.tokenizer.reader import TextReader
from hookline.core.tokenizer.token_spelling import TokenSpelling
from tests.fuzzing import examples
from tests.text_behind import llama, metaspace, save, word_piece

MAKERS = {"llama": llama, "gemma": lambda: llama(is_gemma=True), "metaspace": metaspace, "word_piece": word_piece}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    return {name: Codec(save(make(), tmp_path_factory.mktemp(name))) for name, make in MAKERS.items()}


def ids_of(codec, *names):
    return [codec.tokenizer.get_vocab()[name] for name in names]


def streamed(codec, prompt, ids, skips=True):
    """The text of a completion as a stream brings it."""
    reader = TextReader(SamplingParams(), codec.detokenizer(prompt, skip_special_tokens=skips), None)
    for token_id in ids[:-1]:
        reader.see(token_id, None)
    reader.see(ids[-1], FinishReason.LENGTH)
    return reader.finish()


@pytest.mark.parametrize("name", MAKERS)
def test_a_word_behind_a_prompt_keeps_its_space(codecs, name):
    codec = codecs[name]
    word = ids_of(codec, "Paris" if name == "word_piece" else "▁Paris")
    prompt = codec.encode(PROMPT)
    assert codec.decode(word, behind=prompt) == streamed(codec, prompt, word) == " Paris"
    assert TokenSpelling(codec).text(word[0]) == CodecTexts(codec, 500).texts[word[0]] == " Paris"
    assert TokenSpelling(codec).behind(prompt).text(word[0]) == " Paris"


@pytest.mark.parametrize("name", ["llama", "metaspace", "word_piece"])
def test_a_text_behind_a_special_token_begins_without_a_space(codecs, name):
    codec = codecs[name]
    words = ids_of(codec, *(["Paris", "is"] if name == "word_piece" else ["▁Paris", "▁is"]))
    for prompt in (codec.encode(""), [*codec.encode(PROMPT), *ids_of(codec, "</s>")], []):
        assert codec.decode(words, behind=prompt) == streamed(codec, prompt, words) == "Paris is"
        spelt = TokenSpelling(codec).behind(prompt)
        assert spelt.text(words[0]) == "Paris"
        spelt.go_past(words[0])
        assert spelt.text(words[1]) == " is"


def test_code_behind_a_new_line_keeps_its_columns(codecs):
    codec = codecs["llama"]
    code = ids_of(codec, "▁▁", "▁pass")
    prompt = codec.encode("def a(a):\n")
    assert codec.tokenizer.convert_ids_to_tokens(prompt)[-1] == "<0x0A>"
    assert codec.decode(code, behind=prompt) == streamed(codec, prompt, code) == "   pass"
    line_alone = ids_of(codec, "<s>", "<0x0A>")
    assert codec.decode(code, behind=line_alone) == streamed(codec, line_alone, code) == "   pass"


def test_bytes_behind_an_unfinished_character_take_nothing_from_what_follows(codecs):
    codec = codecs["llama"]
    first, second, third = ids_of(codec, *(f"<0x{byte:02X}>" for byte in "漢".encode()))
    words = [second, third, *ids_of(codec, "▁Paris")]
    for prompt in ([*codec.encode(PROMPT), first], [*ids_of(codec, "<s>"), first]):
        assert codec.decode(words, behind=prompt) == streamed(codec, prompt, words) == "�� Paris"
    whole = [first, second, third]
    assert codec.decode(whole, behind=codec.encode("a漢")) == streamed(codec, codec.encode("漢"), whole) == "漢"


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_prompt_and_text_are_the_text_of_all_tokens(codecs, name, data):
    codec = codecs[name]
    size = len(codec.tokenizer)
    tokens = st.integers(0, size - 1) | st.integers(max(0, size - 40), size - 1)
    prompt = codec.encode(" ".join(data.draw(st.lists(st.sampled_from(["The", "is", "a", "(", ":", "é"]), min_size=1))))
    ids = data.draw(st.lists(tokens.filter(lambda one: one > 2), min_size=1, max_size=40))
    text = codec.decode(ids, behind=prompt)
    assert streamed(codec, prompt, ids) == text
    if prompt[-1] not in codec._byte_ids or ids[0] not in codec._byte_ids:
        assert codec.decode(prompt) + text == codec.decode([*prompt, *ids])


def test_a_prompt_that_is_no_list_of_ids_is_refused_by_the_engine_and_not_here(codecs):
    assert codecs["llama"].detokenizer([[], -1]) is not None
