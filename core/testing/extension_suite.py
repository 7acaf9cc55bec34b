"""The conformance suite of step extensions: subclass it in your tests, name the class, its dataclass and examples.

It checks that an extension affects only the requests that use it; test its effect on them in your own tests.
Legend: N rows, K tokens of each of them, D hidden, V vocabulary, W numbers for the host.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.core.contracts import NO_TOKEN, TokenTexts
from hookline.core.requests.extension_states import UsedExtension
from hookline.core.testing.checks import check, check_contract, check_form, check_nothing_kept
from hookline.core.testing.extension_driver import (
    HIDDEN_SIZE,
    LOGPROB,
    NUM_LAYERS,
    NUM_ROWS,
    Asked,
    ExtensionDriver,
    Seen,
)
from hookline.core.util.garbage import is_frozen

VOCAB_SIZE = 64
"""V of the suite's logits; token ids in examples are below it."""
NUM_TOKENS = 3
"""K: how many tokens of each row a step of the suite computes; the draw follows the last of them."""


class ExtensionSuite:
    """`class TestMine(ExtensionSuite): extension = Mine; arguments = MyArguments; examples = ({"strength": 2.0},)`.

    examples: arguments of requests; each changes hidden states or logits, if the class has a method for either. config:
    the engine's settings, an instance of the `config=` dataclass. The suite's model has 4 layers of width 32 in float32
    and 64 tokens. If the extension reads tokens, the suite's requests hold `tokens`, of which the first
    num_prompt_tokens are the prompt. If it reads texts, name a `tokenizer`; if it wants log-probabilities, set
    has_logprobs. tolerance: largest relative difference of a row's hidden states and float results for other numbers of
    rows, as matrix products have it. graph_safe, sizes_alike: as in the entry's Needs. device: where it runs.
    reads_values_on_cpu: whether it reads values of tensors on the host only if the device is a CPU.
    """

    extension: ClassVar[Any]
    arguments: ClassVar[type]
    examples: ClassVar[Sequence[Mapping[str, Any]]]
    config: ClassVar[Any] = None
    device: ClassVar[str] = "cpu"
    tokens: ClassVar[Sequence[int]] = tuple(range(1, 13))
    num_prompt_tokens: ClassVar[int] = 6
    tokenizer: ClassVar[TokenTexts | None] = None
    has_logprobs: ClassVar[bool] = False
    tolerance: ClassVar[float] = 0.0
    graph_safe: ClassVar[bool] = True
    sizes_alike: ClassVar[bool] = False
    reads_values_on_cpu: ClassVar[bool] = False
    _kind: ClassVar[str] = "extension"

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract(self._kind, self._driver().stage.cls)

    def test_every_example_changes_its_row(self) -> None:
        """It keeps the form of hidden states and logits, makes nothing NaN, and leaves a token to draw."""
        driver = self._crowd()
        given, method = self._inputs(len(self.examples)), driver.stage.draw_method
        found = self._step(driver, range(len(self.examples)), given)
        untouched = driver.untouched(*given)
        check_form(method, found.logits_NV, given[0].shape, torch.float32)
        check(not bool(found.logits_NV.isnan().any()), f"{method} made a logit NaN")
        check(not bool(found.hidden_NKD.isnan().any()), "after_layer made a hidden state NaN")
        changes_stream = driver.stage.changes_stream
        for row, example in enumerate(self.examples):
            is_changed = self._difference(found.rows([row]), untouched.rows([row])) != ""
            if changes_stream or driver.stage.changes_logits:
                what = "changes neither hidden states nor logits" if changes_stream else "changes no logit"
                check(is_changed, f"{example} {what}")
            check(bool((found.logits_NV[row] > -torch.inf).any()), f"{example} forbids every token")

    def test_rows_that_do_not_use_it_keep_their_logits(self) -> None:
        """And their hidden states, bit for bit, beside rows that do; padding as well."""
        driver, bystander = self._crowd(), len(self.examples)
        driver.admit(bystander, Asked(None))
        given = self._inputs(bystander + 2)
        found = self._step(driver, [*range(bystander + 1), NUM_ROWS], given)
        untouched = driver.untouched(*given)
        for row, what in ((-2, "a row that does not use it"), (-1, "padding")):
            same = torch.equal(found.logits_NV[row], given[0][row])
            check(same, f"{driver.stage.draw_method} changes the logits of {what}")
            same = torch.equal(found.hidden_NKD[row], untouched.hidden_NKD[row])
            check(same, f"after_layer changes the hidden states of {what}")

    def test_arguments_that_equal_the_defaults_change_nothing(self) -> None:
        """A request whose arguments equal the defaults does not use the extension."""
        driver = self._driver()
        prepared = driver.prepare(Asked(None if driver.stage.from_params else {}, temperature=1.0))
        check(not prepared.bits, f"a request whose arguments are the defaults uses the {self._kind}")

    def test_a_row_depends_on_itself_alone(self) -> None:
        """The same request gets the same results alone, in any order and in any row of the table."""
        driver, count = self._crowd(), len(self.examples)
        given = self._inputs(count)
        found = self._step(driver, range(count), given)
        backwards = self._step(driver, range(count - 1, -1, -1), (given[0].flip(0), given[1].flip(0)))
        if what := self._difference(backwards.rows(range(count - 1, -1, -1)), found):
            raise AssertionError(f"rows in reverse order get other {what}")
        for row, example in enumerate(self.examples):
            alone = self._driver()
            alone.admit(NUM_ROWS - 1, self._asked(example))
            part = given[0][row : row + 1], given[1][row : row + 1]
            if what := self._difference(self._step(alone, [NUM_ROWS - 1], part), found.rows([row])):
                raise AssertionError(f"{example} gives other {what} alone than in a crowd")

    def test_another_number_of_rows_leaves_nothing_behind(self) -> None:
        """With sizes_alike; extensions that do not declare it pass."""
        driver, count = self._crowd(), len(self.examples)
        self._step(driver, range(count), self._inputs(count))
        for num_rows in (count + 1, count + 3) if self.sizes_alike else ():
            with check_nothing_kept(f"{self._method} of {num_rows} rows"):
                self._step(driver, [0] * num_rows, self._inputs(num_rows))

    def test_never_waits_for_the_host_unless_it_says_so(self) -> None:
        """Without waits_for_host, its methods on the device read no tensor's values, and no shape depends on them."""
        driver, count = self._crowd(), len(self.examples)
        is_cpu = torch.device(self.device).type == "cpu"
        may_wait = bool(driver.stage.cls.waits_for_host) or (self.reads_values_on_cpu and is_cpu)
        logits_NV, hidden_NKD = self._inputs(count)
        driver.step(range(count), logits_NV, hidden_NKD, waits=may_wait)

    def test_what_a_captured_graph_reads_stays_where_it_is(self) -> None:
        """Its tensors are neither replaced nor resized, and its layers and widths stay; without graph_safe it passes.

        A replayed graph reads and writes the memory that it was captured with.
        """
        driver, count = self._crowd(), len(self.examples)
        self._step(driver, range(count), self._inputs(count))
        before = _kept(driver.extension) if self.graph_safe else {}
        for row in range(count):
            driver.admit(row, self._asked(self.examples[(row + 1) % count]))
        self._step(driver, range(count), self._inputs(count))
        after = _kept(driver.extension)
        for name, kept in before.items():
            what = "was replaced after it was constructed, which a captured graph does not see"
            check(after.get(name) == kept, f"{name} {what}; write to it in place, or don't declare graph_safe")

    def test_a_draw_without_a_token_changes_nothing_for_others(self) -> None:
        """`after_draw` may see a negative token."""
        driver, count = self._crowd(), len(self.examples)
        given, tokens_N = self._inputs(count + 1), torch.arange(count + 1, device=self.device)
        found = driver.step([*range(count), 0], *given, tokens_N=tokens_N)
        tokens_N[count] = NO_TOKEN
        again = driver.step([*range(count), 0], *given, tokens_N=tokens_N)
        if what := self._difference(again.rows(range(count)), found.rows(range(count))):
            raise AssertionError(f"a draw without a token changes the {what} of other rows")

    def test_a_row_forgets_its_last_owner(self) -> None:
        """A request in a used row gets the same results as in a new row, whether or not it uses the extension."""
        driver, count = self._crowd(), len(self.examples)
        given = self._inputs(count)
        found = self._step(driver, range(count), given)
        for row in range(count):
            driver.admit(row, self._asked(self.examples[(row + 1) % count]))
        again = self._step(driver, range(count), (given[0].roll(-1, 0), given[1].roll(-1, 0)))
        if what := self._difference(again, found.rows([*range(1, count), 0])):
            raise AssertionError(f"a row that changed hands gets other {what} than a new one")
        for row in range(count):
            driver.admit(row, Asked(None))
        plain = self._step(driver, range(count), given)
        if what := self._difference(plain, driver.untouched(*given)):
            raise AssertionError(f"a row still applies the arguments of its last owner to its {what}")

    def test_tokens_that_earlier_requests_left_change_nothing(self) -> None:
        """Stale tokens, at and beyond a row's position or in rows that do not use the extension, change no bit."""
        bystander = len(self.examples)
        given, found = self._inputs(bystander + 2), []
        for token_ids in (self.tokens, [VOCAB_SIZE - 1], torch.randperm(VOCAB_SIZE, generator=_generator()).tolist()):
            driver = self._crowd()
            driver.admit(bystander, Asked(None))
            driver.leave_stale(token_ids)
            found.append(self._step(driver, [*range(bystander + 1), NUM_ROWS], given))
        for other in found[1:]:
            for row, example in enumerate(self.examples):
                what = self._difference(other.rows([row]), found[0].rows([row]))
                stale = "for other stale tokens, at and beyond the row's position_N"
                check(not what, f"{example} gives other {what} {stale}")
            same = torch.equal(other.logits_NV[bystander:], given[0][bystander:])
            check(same, f"stale tokens change the logits of a row that does not use the {self._kind}")

    def test_what_the_host_keeps_of_a_request_survives_a_preemption(self) -> None:
        """A request's states on the host give the same results in another row of another rank."""
        driver, count = self._crowd(), len(self.examples)
        given = self._inputs(count)
        found = self._step(driver, range(count), given)
        again = self._driver()
        followers = [driver.admit(row, self._asked(one)) for row, one in enumerate(self.examples)]
        for row, example in enumerate(self.examples):
            again.admit(count - row, self._asked(example), followers[row])
        if what := self._difference(self._step(again, range(count, 0, -1), given), found):
            raise AssertionError(f"a request that was preempted gets other {what} than before")

    def test_requests_do_not_share_what_the_host_keeps(self) -> None:
        """A request gets the same results, and encodes the same values, with and without an equal request beside it."""
        for example in self.examples:
            alone, crowd = self._told(example, 1), self._told(example, 2)
            check(alone == crowd, f"{example} tells {crowd} beside an equal request, and {alone} without")

    def test_nothing_is_kept_of_a_request_that_ended(self) -> None:
        """Once `forget` was called, nothing holds the state that `start` made, and no table of the module has grown."""
        driver = self._crowd()
        before = _table_sizes(driver.stage.cls)
        for row, example in enumerate(self.examples):
            for used in driver.prepare(self._asked(example)).stateful:
                state = used.stage.start(used.arguments, used.facts)
                _show(used, state, driver.values(row, self.tokens[0]) if used.stage.has_results else None, self.tokens)
                used.stage.forget(state)
                keepers = [] if state is None or state is used.arguments else _keepers(state)
                check(not keepers, f"the state of a request that ended is kept, in {', '.join(keepers)}")
        grown = [name for name, size in _table_sizes(driver.stage.cls).items() if size > before.get(name, 0)]
        check(not grown, f"something of requests that ended is kept, in {', '.join(grown)}")

    # ------------------------------------------------------------------------------------------------------ helpers

    def _told(self, example: Mapping[str, Any], num_requests: int) -> list[Any]:
        """The results of the first of some equal requests, token by token."""
        driver = self._driver()
        driver.admit(0, self._asked(example))
        told: list[Any] = []
        for used in driver.prepare(self._asked(example)).stateful:
            values = driver.values(0, self.tokens[0]) if used.stage.has_results else None
            states = [used.stage.start(used.arguments, used.facts) for _ in range(num_requests)]
            for token_id in self.tokens:
                shown = [_show(used, state, values, [token_id]) for state in states]
                told.append(shown[0])
        return told

    def _difference(self, found: Seen, expected: Seen) -> str:
        """The first of hidden states, logits and results that differ; empty if nothing does."""
        if not _are_close(found.hidden_NKD, expected.hidden_NKD, self.tolerance):
            return "hidden states"
        if not torch.equal(found.logits_NV, expected.logits_NV):
            return "logits"
        if found.results_NW is None or expected.results_NW is None:
            return ""
        return "" if _are_close(found.results_NW, expected.results_NW, self.tolerance) else "results"

    @property
    def _method(self) -> str:
        return "a step"

    def _step(self, driver: ExtensionDriver, rows: Sequence[int], given: tuple[Tensor, Tensor]) -> Seen:
        return driver.step(rows, *given)

    def _inputs(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Logits (N, V) and hidden states (N, K, D) of some rows."""
        generator = _generator()
        logits_NV = 3 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)
        hidden_NKD = torch.randn(num_rows, NUM_TOKENS, HIDDEN_SIZE, generator=generator)
        return logits_NV.to(self.device), hidden_NKD.to(self.device) * 2**NUM_LAYERS

    def _crowd(self) -> ExtensionDriver:
        driver = self._driver()
        for row, example in enumerate(self.examples):
            driver.admit(row, self._asked(example))
        return driver

    def _asked(self, example: Mapping[str, Any]) -> Asked:
        return Asked(example, self.tokens, self.num_prompt_tokens, has_logprobs=self.has_logprobs)

    def _driver(self) -> ExtensionDriver:
        return ExtensionDriver(
            self.extension, self.arguments, VOCAB_SIZE, self.device, self.tokenizer, config=self.config
        )


def _show(used: UsedExtension, state: Any, values_W: Any, token_ids: Sequence[int]) -> list[Any]:
    """Call the host's methods for some tokens, all with the same numbers; returns their results."""
    told: list[Any] = []
    for token_id in token_ids:
        if values_W is not None:
            told.append(used.stage.on_result(state, values_W))
        told.append(used.stage.on_token(state, token_id, LOGPROB if used.facts.has_logprobs else None))
        told.append(used.stage.encode(used.arguments, replace(used.facts, state=state)).tolist())
    return told


def _are_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if not tolerance or not found.is_floating_point():
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def _kept(extension: Any) -> dict[str, Any]:
    """Address, shape and dtype of an extension's tensors by attribute, and its declared layers and widths."""
    stated = {name: repr(getattr(extension, name)) for name in ("layers", "reads_layers", "result_width")}
    return {**stated, **dict(_tensors_in("self", getattr(extension, "__dict__", {})))}


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, (value.data_ptr(), tuple(value.shape), value.dtype)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors_in(f"{name}.{key}", one)
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _tensors_in(f"{name}[{place}]", one)


def _table_sizes(cls: type) -> dict[str, int]:
    """How much the lists, sets and mappings of a class and of its module hold, by their names."""
    module = sys.modules[cls.__module__]
    owners = [(cls.__name__, vars(cls)), (module.__name__, vars(module))]
    return {
        f"{owner}.{name}": len(value)
        for owner, named in owners
        for name, value in named.items()
        if isinstance(value, dict | list | set) and not name.startswith("__")
    }


def _keepers(state: Any) -> list[str]:
    """The objects that refer to a state, without running frames; empty for values that Python shares, like numbers."""
    if isinstance(state, str | bytes | int | float | tuple | frozenset):
        return []
    was_frozen = is_frozen()
    gc.unfreeze()  # what is frozen is not looked through
    try:
        return [f"a {type(one).__name__}" for one in gc.get_referrers(state) if not isinstance(one, FrameType)]
    finally:
        if was_frozen:
            gc.freeze()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
