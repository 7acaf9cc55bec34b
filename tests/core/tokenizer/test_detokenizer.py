"""Text from tokens one by one: whole characters, stable, and in the end what decoding everything gives."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hookline.core.tokenizer.detokenizer import WINDOW, Detokenizer
from tests.fuzzing import examples

TEXTS = ["héllo wörld", "€uro 😀😀 fünf", "日本語のテキスト", "a�b", " leading", "👨‍👩‍👧‍👦!", "naïve\n\n  café"]


def bytes_to_alphabet():
    """GPT-2's mapping from bytes to printable characters."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + place) for place, byte in enumerate(others)}}


@functools.cache
def byte_level():
    """Every byte, and pieces of characters glued to others, as merges make them. Token 256 is special."""
    alphabet = bytes_to_alphabet()
    assert set(alphabet.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    pieces = [b"\xe2\x82", b"\x82\xac", b" \xf0\x9f", b"\x98\x80", b"o w", b"\xc3", b"\xa9 ", b"\xe6\x97\xa5\xe6"]
    vocab = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<end>": 256}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens(["".join(alphabet[byte] for byte in piece) for piece in pieces if len(piece) > 1])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def byte_fallback():
    """SentencePiece as Llama 2 has it: words with a mark for the space, single bytes for all else."""
    words = ["<unk>", "▁Hello", "▁", "a", "▁b", "ing", "."]
    vocab = {word: place for place, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


def detokenizer_of(tokenizer, texts=None):
    byte_ids = {id_ for word, id_ in tokenizer.get_vocab().items() if word.startswith("<0x")}
    return Detokenizer(tokenizer.decode, byte_ids, texts)


def deltas_of(tokenizer, ids, texts=None):
    detokenizer = detokenizer_of(tokenizer, texts)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_deltas_of_any_tokens_put_together_are_the_full_decode(make, data):
    tokenizer = make()
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1) | st.integers(size - 12, size - 1), max_size=60))
    assert "".join(deltas_of(tokenizer, ids)) == tokenizer.decode(ids)
    if make is byte_level:
        assert "".join(deltas_of(tokenizer, ids, texts={})) == tokenizer.decode(ids)


def test_remembered_texts_change_nothing_but_the_number_of_decodes():
    ids = [*"naïve € text, naïve € text".encode(), 256, *range(256, 264)]
    texts = {}
    assert deltas_of(byte_level(), ids, texts) == deltas_of(byte_level(), ids)
    assert texts[ord("t")] == "t" and texts[256] == ""
    detokenizer = Detokenizer(lambda ids: pytest.fail("decoded again"), texts=texts)
    assert "".join(map(detokenizer.push, b"text, text")) == "text, text"


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from(TEXTS))
def test_text_in_single_bytes_comes_in_whole_characters(make, text):
    tokenizer = make()
    first = 0 if make is byte_level else 7
    ids = [first + byte for byte in text.encode()]
    if "�" not in text:
        assert not any("�" in delta for delta in deltas_of(tokenizer, ids))
    assert "".join(deltas_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_is_shown_with_the_token_that_completes_it():
    assert deltas_of(byte_level(), [*"a€b".encode()]) == ["a", "", "", "€", "b", ""]


def test_characters_before_an_unfinished_one_are_not_held_back():
    glued = byte_level().token_to_id(" ð\x9f".replace("\x9f", "Ł").replace(" ", "Ġ"))
    detokenizer = detokenizer_of(byte_level())
    assert detokenizer.push(glued) == " "
    assert [detokenizer.push(byte) for byte in b"\x98\x80"] == ["", "😀"]


def test_a_run_of_byte_tokens_is_shown_when_it_has_ended():
    run = [7 + byte for byte in "é".encode()]
    assert deltas_of(byte_fallback(), [1, *run, 3]) == ["Hello", "", "", "éa", ""]
    assert deltas_of(byte_fallback(), run) == ["", "", "é"]


def test_the_space_that_a_sentence_begins_with_is_not_lost_in_the_middle():
    ids = [1, 4, 4, 5, 6] * WINDOW
    assert "".join(deltas_of(byte_fallback(), ids)) == byte_fallback().decode(ids)
    assert deltas_of(byte_fallback(), ids)[-6:-1] == [" Hello", " b", " b", "ing", "."]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    assert deltas_of(byte_level(), [65, 0xE2, 0x82]) == ["A", "", "", "�"]


def test_the_window_stays_short():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return byte_level().decode(ids)

    detokenizer = Detokenizer(decode)
    for byte in b"some text of many tokens " * 40:
        detokenizer.push(byte)
    assert max(lengths) <= WINDOW


def test_what_was_shown_at_the_end_is_not_shown_again():
    detokenizer = detokenizer_of(byte_level())
    assert (detokenizer.push(0xE2), detokenizer.flush(), detokenizer.flush()) == ("", "�", "")
