"""Texts that cannot fit, or cannot be tokenized: refused in one line, the first before any tokenizing."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from hookline.core.errors import RequestError
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.tokenizer import chat_templates
from hookline.core.tokenizer.codec import Codec, as_prompts
from tests.core.frontend.test_output_processor import outputs, params

MAX_LEN = 16
LONGEST = 5
"""Characters of the longest token."""


def codec(normalizer=None, *, is_bytes=True, max_len=MAX_LEN, **options):
    """A tokenizer of bytes, or of words, that counts what it tokenizes."""
    if is_bytes:
        names = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
        names += ["".join(pair) for pair in merges]
        tokenizer = Tokenizer(models.BPE(vocab={name: id_ for id_, name in enumerate(names)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel({"hello": 0, "<unk>": 1}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    found = Codec(None, max_len=max_len, **options)
    from transformers import PreTrainedTokenizerFast

    found._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found.tokenized, encode = [], found._tokenizer.encode
    found._tokenizer.encode = lambda text, **options: found.tokenized.append(text) or encode(text, **options)
    return found


def refusal(make):
    with pytest.raises(RequestError) as caught:
        make()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


def test_a_text_longer_than_so_many_of_the_longest_token_is_refused_untokenized():
    one = codec()
    assert len(one.encode("hello" * MAX_LEN)) == MAX_LEN
    one.tokenized.clear()
    assert refusal(lambda: one.encode("hello" * MAX_LEN + "h")) == (
        "the prompt has 81 characters, and the 16 tokens that there is room for have at most 80; shorten it, or raise "
        "engine.max_model_len (engine.num_blocks, if it is the KV cache that holds no more)"
    )
    assert not one.tokenized


def test_without_a_limit_any_text_is_tokenized():
    assert len(codec(max_len=None).encode("hello" * 1000)) == 1000


def test_the_messages_of_a_chat_count_as_the_text_that_they_become():
    messages = [{"role": "user", "content": "hello" * MAX_LEN}, {"role": "user", "content": "h"}]
    one = codec()
    assert "81 characters" in refusal(lambda: one.encode(messages)) and not one.tokenized
    assert "81 characters" in refusal(lambda: codec(chat=True).encode("hello" * MAX_LEN + "h"))
    assert len(one.encode(messages[:1])) == MAX_LEN


def test_a_normalizer_that_joins_characters_has_room_for_those_it_joins():
    text = "\u03b1\u0313\u0300\u0345" * 20  # four characters that NFC makes one of
    assert len(codec(normalizers.NFC(), max_len=60).encode(text)) == 60
    assert refusal(lambda: codec(normalizers.NFC()).encode("h" * (4 * LONGEST * MAX_LEN + 1)))


@pytest.mark.parametrize("options", [{"normalizer": normalizers.Strip()}, {"is_bytes": False}], ids=["strips", "words"])
def test_a_tokenizer_that_drops_characters_has_room_for_sixteen_times_as_many(options):
    one = codec(**options)
    size = 16 * LONGEST * MAX_LEN
    assert one.encode("hello" + " " * (size - 5))
    assert f"at most {size}" in refusal(lambda: one.encode("hello" + " " * (size - 4)))


def test_generate_refuses_the_long_prompt_alone():
    output_processor = OutputProcessor(fake_engine(PlainScheduler(), vocab_size=300), codec())
    (refused, served), _ = outputs(output_processor, ("h" * 1_000_000, params()), ("hello", params()))
    assert "the prompt has 1000000 characters" in refused.error and served.error is None
    assert output_processor.codec.tokenized == ["hello"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda one: one.encode("a \ud800"),
            "a text prompt cannot be tokenized: character 2 is half a",
        ),
        (
            lambda one: one.encode_word("\ud800"),
            "a word in bad_words cannot be tokenized: character 0 is half",
        ),
        (
            lambda one: one.encode([{"role": "user", "content": "\ud800"}]),
            "is half a surrogate pair (U+D800), so it is no Unicode",
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused_in_one_line(make, message):
    assert message in refusal(lambda: make(codec()))


def test_a_chat_template_that_does_not_end_is_broken_off(monkeypatch):
    monkeypatch.setattr("hookline.core.tokenizer.chat_templates.TIMEOUT_S", 0.1)
    one = codec()
    rounds = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc")
    one.tokenizer.chat_template = rounds + "x" + "{% endfor %}" * 3
    said = refusal(lambda: one.encode([{"role": "user", "content": "a"}]))
    assert said == "the chat template refuses these messages: TimeoutError: not done after 0.1 s"


def test_more_token_ids_than_any_model_has_positions_are_refused_unread():
    with pytest.raises(RequestError, match="the prompt has 1000000000000 token ids; at most 16777216 are allowed"):
        codec().encode(range(10**12))


class Panic(BaseException):
    """As tokenizers raises where its own code breaks: no Exception."""


def test_a_tokenizer_that_panics_refuses_the_request_and_not_the_call():
    one = codec()

    def panic(*arguments, **options):
        raise Panic("index out of bounds\n\x1b[2J")

    one._tokenizer.encode = one._tokenizer.decode = panic
    assert "a text prompt cannot be tokenized: Panic: index out of bounds \\x1b[2J" in refusal(lambda: one.encode("a"))
    assert "these token ids cannot be decoded: Panic: index" in refusal(lambda: one.decode([1]))


@pytest.mark.parametrize("prompt", [[1, True], [np.True_, 2], [False]])
def test_true_and_false_are_no_token_ids_beside_whole_numbers_either(prompt):
    assert refusal(lambda: codec().encode(prompt)).startswith("prompt token ids must be whole numbers, not true or fal")


def test_ids_of_any_whole_kind_are_a_list_of_their_own():
    for prompt in ([1, 2], (1, 2), np.array([1, 2]), [np.int32(1), 2]):
        found = codec().encode(prompt)
        assert found == [1, 2] and set(map(type, found)) == {int} and found is not prompt


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), memoryview(b"ab"), {1, 2}, {"prompt": "a"}, 7, None])
def test_what_is_no_prompt_is_refused_by_its_type_alone_and_in_a_list(prompt):
    name = type(prompt).__name__
    assert refusal(lambda: codec().encode(prompt)) == f"a prompt is a text, token ids or chat messages, not {name}"
    if isinstance(prompt, bytes | bytearray | memoryview):  # whole numbers, and so one prompt that is refused
        assert as_prompts(prompt) == [prompt]
    else:
        told = refusal(lambda: as_prompts(prompt))
        assert told == f"prompts are a text, token ids or chat messages, or a list of such, not {name}"


def test_what_a_first_chat_template_imports_is_imported_before_its_time_starts(monkeypatch):
    imported = []

    @contextmanager
    def watched(*limits):
        imported.append(set(sys.modules))
        try:
            yield
        finally:
            imported.append(set(sys.modules))

    chats = codec()
    chats._tokenizer.chat_template = "{{ 'a\\n' }}{{ lipsum(n=1) }}{{ messages.x.y }}"
    for name in ("jinja2.debug", "jinja2.constants", "encodings.unicode_escape"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(chat_templates, "limits", watched)
    assert "UndefinedError" in refusal(lambda: chats.render_chat([{"role": "user", "content": "a"}]))
    before, after = imported
    assert after == before >= {"jinja2.debug", "jinja2.constants", "encodings.unicode_escape"}


def test_a_conversation_of_more_messages_than_there_is_room_for_is_refused_before_it_is_rendered(monkeypatch):
    one, rendered = codec(), []
    render = chat_templates.rendered
    monkeypatch.setattr("hookline.core.tokenizer.codec.rendered", lambda *all_: rendered.append(1) or render(*all_))
    message = {"role": "user", "content": ""}
    one.render_chat([message] * MAX_LEN)
    told = refusal(lambda: one.render_chat([message] * (MAX_LEN + 1)))
    assert told.startswith("the conversation has 17 messages, and there is room for 16 tokens") and len(rendered) == 1
