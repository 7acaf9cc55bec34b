"""The conformance suite of logits processors: subclass it in your tests, name the class, its dataclass and examples.

It checks that a processor changes only the rows that use it; what it does to them is for its own tests.
Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import RequestFacts, TokenTexts
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.checks import check, check_contract, check_form, check_nothing_kept
from hookline.core.testing.processor_driver import NUM_ROWS, Asked, ProcessorDriver

VOCAB_SIZE = 64
"""V of the suite's logits; token ids in examples are below it."""


class ProcessorSuite:
    """`class TestMine(ProcessorSuite): processor = Mine; config = MyArguments; examples = ({"n": 2.0},)`.

    device: where the processor runs. examples: arguments of requests, each of which changes some logits of the suite.
    If the processor reads tokens, the suite's requests hold `tokens`, of which the first num_prompt_tokens are the
    prompt; give others for one that looks at repetition. If it reads texts, name a `tokenizer`; if it wants
    log-probabilities, set has_logprobs. sizes_alike: as in the entry's Needs.
    """

    processor: ClassVar[Any]
    config: ClassVar[type]
    examples: ClassVar[Sequence[Mapping[str, Any]]]
    device: ClassVar[str] = "cpu"
    tokens: ClassVar[Sequence[int]] = tuple(range(1, 13))
    num_prompt_tokens: ClassVar[int] = 6
    tokenizer: ClassVar[TokenTexts | None] = None
    has_logprobs: ClassVar[bool] = False
    sizes_alike: ClassVar[bool] = False

    def test_has_the_methods_of_its_contract(self) -> None:
        """Its methods, correctly spelt, as the engine asks for them when it is chosen."""
        check_contract("processor", self.processor)

    def test_every_example_changes_its_row(self) -> None:
        """It keeps the logits' shape and dtype, makes none NaN, and leaves a token to draw."""
        driver, logits_NV = self._crowd()
        found_NV = driver.process(logits_NV, range(len(self.examples)))
        check_form("what process returns", found_NV, tuple(logits_NV.shape), torch.float32)
        check(not bool(found_NV.isnan().any()), "process made a logit NaN")
        for row, example in enumerate(self.examples):
            check(not torch.equal(found_NV[row], logits_NV[row]), f"{example} changes no logit")
            check(bool((found_NV[row] > -torch.inf).any()), f"{example} forbids every token")

    def test_rows_that_do_not_use_it_keep_their_logits(self) -> None:
        """Bit for bit, beside rows that do; padding as well."""
        driver, logits_NV = self._crowd()
        bystander = len(self.examples)
        driver.admit(bystander, Asked(None))
        logits_NV = torch.cat([logits_NV, logits_NV[:1] + 1, logits_NV[:1] - 1])
        found_NV = driver.process(logits_NV, [*range(bystander + 1), NUM_ROWS])
        for row, what in ((-2, "a row that does not use it"), (-1, "padding")):
            check(torch.equal(found_NV[row], logits_NV[row]), f"process changes the logits of {what}")

    def test_arguments_that_equal_the_defaults_change_nothing(self) -> None:
        """The engine does not even call it for them."""
        driver, _ = self._crowd()
        stage = driver.installed.stages[0]
        params = SamplingParams(extra_args={} if stage.from_params else {stage.entry.name: {}})
        prepared = driver.installed.prepare(params.resolved({}), RequestFacts(2, 1.0, frozenset(), VOCAB_SIZE))
        check(not prepared.records, "a request whose arguments are the defaults uses the processor")

    def test_a_row_depends_on_itself_alone(self) -> None:
        """The same request gives the same logits alone, in any order and in any row of the table."""
        driver, logits_NV = self._crowd()
        count = len(self.examples)
        found_NV = driver.process(logits_NV, range(count))
        backwards_NV = driver.process(logits_NV.flip(0), range(count - 1, -1, -1)).flip(0)
        check(torch.equal(found_NV, backwards_NV), "rows in reverse order get other logits")
        for row, example in enumerate(self.examples):
            alone = self._driver()
            alone.admit(NUM_ROWS - 1, self._asked(example))
            alone_NV = alone.process(logits_NV[row : row + 1], [NUM_ROWS - 1])
            check(torch.equal(alone_NV[0], found_NV[row]), f"{example} gives other logits alone than in a crowd")

    def test_another_number_of_rows_leaves_nothing_behind(self) -> None:
        """Processors that do not declare sizes_alike pass."""
        driver, logits_NV = self._crowd()
        driver.process(logits_NV, range(len(self.examples)))
        for num_rows in (len(self.examples) + 1, len(self.examples) + 3) if self.sizes_alike else ():
            with check_nothing_kept(f"process of {num_rows} rows"):
                driver.process(logits_NV[:1].expand(num_rows, -1), [0] * num_rows)

    def test_a_row_forgets_its_last_owner(self) -> None:
        """A request in a used row gets the logits of one in a new row, whether or not it uses the processor."""
        driver, logits_NV = self._crowd()
        count = len(self.examples)
        found_NV = driver.process(logits_NV, range(count))
        for row in range(count):
            driver.admit(row, self._asked(self.examples[(row + 1) % count]))
        again_NV = driver.process(logits_NV.roll(-1, 0), range(count))
        check(torch.equal(again_NV, found_NV.roll(-1, 0)), "a row that changed hands gets other logits than a new one")
        for row in range(count):
            driver.admit(row, Asked(None))
        plain_NV = driver.process(logits_NV, range(count))
        check(torch.equal(plain_NV, logits_NV), "a row still applies the arguments of its last owner")

    def test_tokens_that_earlier_requests_left_change_nothing(self) -> None:
        """Bit for bit. They lie at and beyond a row's position, and anywhere in rows that do not use the processor."""
        bystander = len(self.examples)
        found: list[Tensor] = []
        for token_ids in (self.tokens, [VOCAB_SIZE - 1], torch.randperm(VOCAB_SIZE, generator=_generator()).tolist()):
            driver, logits_NV = self._crowd()
            driver.admit(bystander, Asked(None))
            driver.leave_stale(token_ids)
            logits_NV = torch.cat([logits_NV, logits_NV[:1] + 1, logits_NV[:1] - 1])
            found.append(driver.process(logits_NV, [*range(bystander + 1), NUM_ROWS]))
        for other_NV in found[1:]:
            for row, example in enumerate(self.examples):
                same = torch.equal(other_NV[row], found[0][row])
                check(same, f"{example} gives other logits for other stale tokens, at and beyond the row's position_N")
            same = torch.equal(other_NV[bystander:], logits_NV[bystander:])
            check(same, "stale tokens change the logits of a row that does not use the processor")

    def test_what_the_host_keeps_of_a_request_survives_a_preemption(self) -> None:
        """Values made of the state that `on_token` left give the same logits in another row of another processor."""
        driver, logits_NV = self._crowd()
        count = len(self.examples)
        found_NV = driver.process(logits_NV, range(count))
        again, followers = (
            self._driver(),
            [driver.admit(row, self._asked(one)) for row, one in enumerate(self.examples)],
        )
        for row, example in enumerate(self.examples):
            again.admit(count - row, self._asked(example), followers[row])
        again_NV = again.process(logits_NV, range(count, 0, -1))
        check(torch.equal(again_NV, found_NV), "a request that was preempted gets other logits than before")

    def _crowd(self) -> tuple[ProcessorDriver, Tensor]:
        driver = self._driver()
        for row, example in enumerate(self.examples):
            driver.admit(row, self._asked(example))
        logits_NV = 3 * torch.randn(len(self.examples), VOCAB_SIZE, generator=_generator())
        return driver, logits_NV.to(self.device)

    def _asked(self, example: Mapping[str, Any]) -> Asked:
        return Asked(example, self.tokens, self.num_prompt_tokens, has_logprobs=self.has_logprobs)

    def _driver(self) -> ProcessorDriver:
        return ProcessorDriver(self.processor, self.config, VOCAB_SIZE, self.device, self.tokenizer)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
