"""Requests alone and in random batches, compared bit by bit: tokens and log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hookline import LLM, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Load:
    """Requests that can be asked again and again."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]


@dataclass
class Seen:
    """What a number of batches went through."""

    batches: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    other: list[str] = field(default_factory=list)
    """Requests that got other bits than alone: which, in which batch, and where they first differ."""


def make_load(
    count: int, vocab_size: int, longest: int, *, most_tokens: int = 24, logprobs: Sequence[int] = (1, 2), seed: int = 0
) -> Load:
    """Prompts of mixed lengths, every second with a common beginning; greedy and sampled, with and without scores.

    logprobs: how many alternatives those with scores ask for, in turns.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(5, vocab_size) for _ in range(longest * 2 // 3)]
    prompts, params = [], []
    for index in range(count):
        own = [rng.randrange(5, vocab_size) for _ in range(rng.choice((1, 2, 17, longest // 4, longest // 3)))]
        prompts.append([*shared[: rng.choice((len(shared) // 3, len(shared)))], *own] if index % 2 else own)
        options: dict[str, Any] = {} if index % 3 == 0 else {"logprobs": logprobs[index % len(logprobs)]}
        if index % 7 == 0:
            options["prompt_logprobs"] = 1
        if index % 5 == 1:
            options |= {"top_p": 0.8, "top_k": 40}
        tokens = rng.randint(1, most_tokens)
        temperature = 0.8 * (index % 2 or index % 5)
        params.append(
            SamplingParams(temperature=temperature, max_tokens=tokens, seed=index, ignore_eos=True, **options)
        )
    return Load(prompts, params)


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """All that must be equal of an answer; floats are compared exactly."""
    assert output.error is None, output.error
    return output.token_ids, output.logprobs, output.prompt_logprobs


def alone(llm: LLM, load: Load) -> list[tuple[Any, ...]]:
    """What each request gets by itself."""
    return [bits(llm.generate([prompt], one)[0]) for prompt, one in zip(load.prompts, load.params, strict=True)]


def try_batches(
    llm: LLM, load: Load, expected: list[tuple[Any, ...]], num_batches: int, *, seed: int = 0, most: int | None = None
) -> Seen:
    """Ask for random ones of the requests, in random order, a batch at a time."""
    rng, seen = random.Random(seed), Seen()
    for batch in range(num_batches):
        members = rng.sample(range(len(expected)), rng.randint(1, most or len(expected)))
        outputs = llm.generate([load.prompts[one] for one in members], [load.params[one] for one in members])
        seen.batches += 1
        seen.preemptions += sum(output.num_preemptions for output in outputs)
        seen.cached_tokens += sum(output.num_cached_tokens for output in outputs)
        for one, output in zip(members, outputs, strict=True):
            if bits(output) != expected[one]:
                seen.other.append(f"request {one} in batch {batch} of {len(members)}: {_where(output, expected[one])}")
    return seen


def one_after_the_other(llm: LLM, load: Load) -> list[RequestOutput]:
    """What requests get that arrive one in each step, so that others decode while a prompt is computed."""
    engine, outputs = llm.engine, {}
    asked = list(zip(load.prompts, load.params, strict=True))
    ids = []
    while asked or engine.has_work:
        if asked:
            ids.append(engine.add(*asked.pop(0)))
        outputs.update({output.request_id: output for output in engine.step()})
    return [outputs[id_] for id_ in ids]


def launches_of(graphs: Any) -> list[tuple[Any, Any]]:
    """The steps that graphs with prompts will be, and their shapes."""
    replay, launched = graphs.replay_layers, []
    graphs.replay_layers = lambda step, shape: (launched.append((step, shape)), replay(step, shape))[1]
    return launched


def decodes_that_joined(launched: Sequence[tuple[Any, Any]]) -> list[int]:
    """How many decodes there are in each of these steps in which decodes join prompts."""
    return [len(step.decode_rows) for step, shape in launched if shape.is_padded]


def _where(output: RequestOutput, expected: tuple[Any, ...]) -> str:
    for what, mine, theirs in zip(("token", "logprob", "prompt logprob"), bits(output), expected, strict=True):
        for place, (one, other) in enumerate(zip(mine or (), theirs or (), strict=False)):
            if one != other:
                return f"{what} {place} is {one}, alone {other}"
    return "another length"
