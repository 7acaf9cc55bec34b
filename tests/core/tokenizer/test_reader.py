"""The two ways to a completion's text: a token at a time as it comes, and what has come when somebody asks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.outputs import FinishReason
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.detokenizer import Detokenizer
from hookline.core.tokenizer.reader import TextReader
from tests.fuzzing import examples

BYTES = [b" a", b"\xc3", b"\xa9", b"\xe6\xbc", b"\xa2", b"b\n", b""]


def decode(ids) -> str:
    return b"".join(BYTES[one] for one in ids).decode("utf-8", "replace")


def reader() -> TextReader:
    return TextReader(SamplingParams(), Detokenizer(decode, texts={}), None)


@settings(max_examples=examples(50))
@given(pieces=st.lists(st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=4), max_size=6))
def test_text_read_in_pieces_is_that_of_tokens_seen_one_by_one(pieces: list[list[int]]) -> None:
    seen, read = reader(), reader()
    for ids in pieces:
        for token_id in ids:
            seen.see(token_id, None)
        assert read.read(ids) == seen.take()
    for one in (seen, read):
        one.see(0, FinishReason.LENGTH)
    assert (read.finish(), read.num_tokens, read.take()) == (seen.finish(), seen.num_tokens, seen.take())
