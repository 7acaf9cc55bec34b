"""The processor against Hookline's conformance suite, against a plain loop, and from end to end in an engine."""

from __future__ import annotations

import random

import pytest
import torch
from hookline_dry import DryArguments
from hookline_dry.processor import Dry

from hookline import LLM, SamplingParams
from hookline.core.testing.processor_driver import Asked, ProcessorDriver
from hookline.core.testing.processor_suite import ProcessorSuite

VOCAB_SIZE = 64


class Letters:
    """A tokenizer of 64 letters; token 10 is a newline."""

    texts = tuple("\n" if token_id == 10 else chr(48 + token_id) for token_id in range(VOCAB_SIZE))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.texts[token_id] for token_id in token_ids)


LETTERS = Letters()


class TestDry(ProcessorSuite):
    processor, config, tokenizer = Dry, DryArguments, LETTERS
    examples = ({"multiplier": 1.0}, {"multiplier": 0.5, "base": 3.0}, {"multiplier": 2.0, "allowed_length": 4})
    tokens = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5)


def penalty(tokens: list[int], token_id: int, arguments: DryArguments) -> float:
    """By looking at every place where the token stood before."""
    longest = 0
    for place in (index for index, one in enumerate(tokens) if one == token_id):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length] != 10:
            length += 1
        longest = max(longest, length)
    excess = longest - arguments.allowed_length
    return arguments.multiplier * arguments.base**excess if excess >= 0 else 0.0


@pytest.mark.parametrize("seed", range(6))
def test_it_penalises_what_a_plain_loop_penalises(seed: int) -> None:
    rng = random.Random(seed)
    given = {"multiplier": 0.7, "base": 1.5, "allowed_length": 1 + seed % 3}
    tokens = [*(rng.choice([1, 1, 2, 2, 10]) for _ in range(36)), 1, 2, 1, 2]
    driver = ProcessorDriver(Dry, DryArguments, VOCAB_SIZE, tokenizer=LETTERS)
    driver.admit(3, Asked(given, tokens=tokens))
    found = driver.process(torch.zeros(1, VOCAB_SIZE), [3])[0]
    wanted = [-penalty(tokens, token_id, DryArguments(**given)) for token_id in range(VOCAB_SIZE)]
    assert min(wanted) < 0
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_a_breaker_ends_a_repetition() -> None:
    driver = ProcessorDriver(Dry, DryArguments, VOCAB_SIZE, tokenizer=LETTERS)
    for row, breakers in enumerate((["\n"], [])):
        asked = {"multiplier": 1.0, "sequence_breakers": breakers}
        driver.admit(row, Asked(asked, tokens=[1, 2, 10, 3, 4, 1, 2, 10, 3]))
    with_break, without = driver.process(torch.zeros(2, VOCAB_SIZE), [0, 1])[:, 4]
    assert with_break == 0 and without == pytest.approx(-(1.75**2))


@pytest.mark.parametrize(
    ("breakers", "message"), [([""], "none of them empty"), (["\n"], "has no tokenizer"), (["x"] * 65, "at most 64")]
)
def test_breakers_that_cannot_be_used_are_refused(breakers: list[str], message: str) -> None:
    driver = ProcessorDriver(Dry, DryArguments, VOCAB_SIZE)
    with pytest.raises(Exception, match=message):
        driver.admit(0, Asked({"multiplier": 1.0, "sequence_breakers": breakers}))


def test_in_an_engine_a_greedy_request_repeats_less_and_others_are_as_before() -> None:
    def params(**dry: object) -> SamplingParams:
        extra_args = {"dry": dry} if dry else {}
        return SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, extra_args=extra_args)

    prompt, dry = "import os\n" * 3, {"multiplier": 4.0}
    sizes = {"cpu_cache_gib": 0.1, "max_model_len": 128}
    with LLM(device="cpu", engine=sizes) as llm:
        (alone,) = llm.generate(prompt, params())
        crowd = llm.generate([prompt] * 3, [params(), params(**dry, sequence_breakers=[]), params(**dry)])
    plain, unbroken, broken = (output.token_ids for output in crowd)
    assert plain == alone.token_ids and len({tuple(ids) for ids in (plain, unbroken, broken)}) == 3
    assert num_repeated(unbroken) < num_repeated(plain)
    with LLM(device="cpu", engine=sizes, processors={"dry": {**dry, "sequence_breakers": []}}) as llm:
        crowd = llm.generate(
            [prompt] * 3, [params(multiplier=0.0), params(), params(sequence_breakers=["\n", ":", '"', "*"])]
        )
    assert [output.token_ids for output in crowd] == [plain, unbroken, broken]


def num_repeated(token_ids: list[int]) -> int:
    """Runs of three tokens that were there before."""
    runs = [tuple(token_ids[place : place + 3]) for place in range(len(token_ids) - 2)]
    return len(runs) - len(set(runs))
