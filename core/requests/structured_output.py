"""Structured output: the grammars of requests, the state of each request in its grammar, and the masks of their draws.

A grammar is compiled in a thread beside the step loop, while policies do not see its request, and cached.
Legend: N requests, W int32 words of a mask.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.contracts import Grammar, GrammarBackend, GrammarMatcher, GrammarVocabulary, is_offered
from hookline.core.errors import PASSES, PluginError, PluginFault, RequestError, clipped, shown
from hookline.core.json_schemas import as_held
from hookline.core.outputs import FinishReason
from hookline.core.plugin.blame import Blaming, breach
from hookline.core.plugin.needs import schema_rules
from hookline.core.plugin.problems import with_line
from hookline.core.plugin.registry import Entry
from hookline.core.request_options import NO_TAGS
from hookline.core.requests.compile_pool import CompileJob, CompilePool
from hookline.core.requests.end_text import EndText
from hookline.core.requests.late_input import HeldUp, LateInput, LateState
from hookline.core.sampling_params import SamplingParams
from hookline.core.structured_outputs import StructuredOutputs
from hookline.core.util.arrays import WordArray, num_mask_words
from hookline.core.util.raising import raised_by

COMPILE_S = 2.0
"""Longest time in seconds that a grammar may take to compile."""
COMPILE_THREADS = 3
"""Grammars that are compiled at once; of one tenant, one less."""
TENANT_TAG = "tenant"
"""The tag of requests that says whose they are; requests without it are one tenant together."""
CACHE_BYTES = 128 * 2**20
"""Most memory for compiled grammars that are kept for later requests, by the sizes that their back ends state."""
PREPARE_S = 60.0
"""Longest time in seconds that a start waits for the back end."""
IDLE_S = 0.005
"""Longest single wait in seconds for a grammar when there is nothing else to do."""
_PLACE = "sampling.structured_outputs"
_log = logging.getLogger("hookline")


@dataclass(frozen=True)
class GrammarChoice:
    """The back end of an engine: its entry, and an instance of its config dataclass."""

    entry: Entry
    config: Any = None

    @property
    def opens_objects(self) -> bool:
        """Whether its config leaves objects open that do not say whether they may have further properties."""
        return bool(getattr(self.config, "open_objects", False))


@dataclass(frozen=True)
class Compiled:
    """A grammar that requests share, once it is compiled. error: why it cannot be; a PluginFault if its back end
    failed.
    """

    grammar: Grammar | None = None
    end_text: EndText | None = None
    num_bytes: int = 0
    error: RequestError | None = None


class Constraint(LateState):
    """The state of one request in its grammar; see LateState.

    matcher: None until the grammar is compiled. fault: a PluginFault if its back end failed.
    """

    field = "structured_outputs"
    needs = "grammar back end"

    def __init__(self, wanted: StructuredOutputs, stop_ids: frozenset[int]) -> None:
        self.wanted, self.stop_ids = wanted, stop_ids
        self.matcher: GrammarMatcher | None = None
        self.end_text: EndText | None = None
        self.fault: RequestError | None = None
        self.end: FinishReason | None = None
        self.further_stops: list[tuple[int, int]] = []
        """(word, bits) of the request's stop ids that the back end does not know."""
        self._vocabulary_stops: frozenset[int] = frozenset()
        self._state = 0
        self._grammar: Grammar | None = None
        self._taken: list[int] = []
        """The tokens that the matcher took."""
        self.can_go_back = False
        """Whether the matcher can take tokens back, so that a step may compute several of the request."""

    def begin(self, compiled: Compiled, vocabulary: GrammarVocabulary) -> None:
        """Start at the beginning of the completion."""
        assert compiled.grammar is not None
        self._grammar = compiled.grammar
        self.matcher = _having("fill", compiled.grammar.matcher(), GrammarMatcher)
        rollback = getattr(self.matcher, "rollback", None)
        self.can_go_back = callable(rollback) and is_offered(rollback)
        self.end_text = compiled.end_text
        self._vocabulary_stops = vocabulary.stop_ids
        words: dict[int, int] = {}
        for token_id in self.stop_ids - vocabulary.stop_ids:
            words[token_id // 32] = words.get(token_id // 32, 0) | 1 << token_id % 32
        self.further_stops = list(words.items())

    def take(self, token_id: int) -> None:
        """Advance by the token that was drawn; `end` then says why the request ends with it, None if it goes on.

        Raises: errors of the back end; _DoesNotFit if the token does not fit.
        """
        assert self.matcher is not None
        if self.end_text is not None:
            state = self.end_text.follow(self._state, token_id)
            if state is None:
                self.end_text = None
            else:
                self._state = state
            return
        fits = self.matcher.advance((token_id,))
        if not isinstance(fits, bool):
            raise _Broken(f"it returned {shown(fits)}, not a bool")
        if not fits:
            raise _DoesNotFit(
                f"token {token_id} was drawn, which does not fit; the request's other sampling parameters, or its "
                "grammar's mask, forbid all that would"
            )
        self._taken.append(token_id)
        is_over = token_id in self._vocabulary_stops or self.matcher.is_terminated
        self.end = FinishReason.STOP if is_over else None

    def stop(self, reason: FinishReason = FinishReason.STOP) -> None:
        """See LateState."""
        self.end = reason

    def fail(self, fault: RequestError) -> None:
        """Note why the request has to end."""
        self.fault = fault

    def fill(self, mask_W: WordArray) -> None:
        """Write the mask of the next draw into mask_W, whose words are zero."""
        assert self.matcher is not None
        if self.end_text is not None:
            mask_W[:] = self.end_text.masks_KW[self._state]
        else:
            self.matcher.fill(mask_W)

    def fill_stops(self, mask_W: WordArray) -> None:
        """Allow the request's own stop ids if the text is complete here, and forbid them otherwise."""
        assert self.matcher is not None
        is_complete = self.end_text is None and self.matcher.is_accepting
        for word, bits in self.further_stops:
            value = int(mask_W[word]) & 0xFFFFFFFF
            mask_W[word] = np.uint32(value | bits if is_complete else value & ~bits).astype(np.int32)

    def look_ahead(self, tokens: Sequence[int], masks_KW: WordArray | None = None) -> int:
        """How many tokens fit, one after the other, and do not end the request, which then is where it was before.

        masks_KW: gets the masks behind these tokens; the rows of others do not change. An error of the matcher behind a
        token does not end the request: the token counts as one that does not fit, and a new matcher goes on.
        Raises: errors of `rollback` or of the new matcher.
        """
        assert self.matcher is not None and self._grammar is not None
        end_text, state, num_taken, count = self.end_text, self._state, len(self._taken), 0
        error = None
        for token_id in tokens:
            if token_id in self.stop_ids or (error := raised_by(self.take, token_id)) is not None or self.end:
                break
            if masks_KW is not None and (error := raised_by(self._fill_all, masks_KW[count])) is not None:
                masks_KW[count] = 0
                break
            count += 1
        num_back = len(self._taken) - num_taken
        del self._taken[num_taken:]
        self.end_text, self._state, self.end = end_text, state, None
        if error is not None and not isinstance(error, _DoesNotFit):
            self.matcher = self._grammar.matcher()
            if self._taken and not self.matcher.advance(self._taken):
                raise _Broken("it refused the tokens that another matcher had taken")
        elif num_back:
            self.matcher.rollback(num_back)
        return count

    def _fill_all(self, mask_W: WordArray) -> None:
        self.fill(mask_W)
        self.fill_stops(mask_W)


def late_state(params: SamplingParams, stop_ids: frozenset[int]) -> LateState | None:
    """The state of a new request whose draws wait for a late input; None if it asks for none."""
    return None if params.structured_outputs is None else Constraint(params.structured_outputs, stop_ids)


@dataclass
class _Waiting:
    """A compile, and the requests that wait for it."""

    job: CompileJob
    ids: dict[int, Constraint]


class StructuredOutput(LateInput):
    """The grammars of one engine, whose late rows are masks of tokens.

    choose: gives the back end to use, or raises RequestError that says why there is none; asked by `prepare`, or by the
    first request. vocabulary: makes what a back end may know of the tokenizer, or raises RequestError; asked in the
    compiling thread. The front end, which knows the tokenizer, gives it by `use_vocabulary` if it is not given here.
    """

    def __init__(
        self,
        choose: Callable[[], GrammarChoice],
        vocab_size: int,
        *,
        vocabulary: Callable[[], GrammarVocabulary] | None = None,
        compile_s: float = COMPILE_S,
        num_threads: int = COMPILE_THREADS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._choose, self._make_vocabulary, self.vocab_size = choose, vocabulary, vocab_size
        self.num_words = num_mask_words(vocab_size)
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._cache: OrderedDict[Any, Compiled] = OrderedDict()
        self._pool = CompilePool(num_threads, compile_s)
        self._waiting: dict[Any, _Waiting] = {}
        self._given_up: dict[Any, CompileJob] = {}
        """Compiles that are still to end after their requests ended: they took too long, or could not begin in time."""
        self._choice: GrammarChoice | None = None
        self._backend: GrammarBackend | None = None
        self._vocabulary: GrammarVocabulary | None = None
        self._num_known = 0
        """Number of token ids up to the last id that the tokenizer knows."""
        self._making = threading.Lock()
        self._preparing: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------ before the steps

    def prepare(self) -> None:
        """Begin to make the back end in a thread, if there is one: its constructor may hold up all threads for long,
        which a server's streams would feel when the first request asks for a form. See `wait_until_prepared`.
        """
        try:
            self._choice = self._choose()
        except RequestError:  # each request with structured output gets this error
            return
        self._preparing = threading.Thread(target=self._prepare, name="hookline-grammars", daemon=True)
        self._preparing.start()

    def _prepare(self) -> None:
        try:
            self._ready_backend()
        except BaseException as error:  # the first request that asks for a form meets it again, and says so
            _log.debug("no grammar back end was made ahead: %s", error)

    def wait_until_prepared(self) -> None:
        """Wait until the back end that `prepare` began to make is there, for at most PREPARE_S."""
        if self._preparing is not None:
            self._preparing.join(PREPARE_S)
            self._preparing = None

    @property
    def is_preparing(self) -> bool:
        """Whether `prepare` began to make the back end, and `wait_until_prepared` has not been called since."""
        return self._preparing is not None

    @property
    def is_ready(self) -> bool:
        """Whether the back end is made, so that the first request need not wait for it."""
        return self._backend is not None

    def open(self, id_: int, constraint: Constraint, tags: Mapping[str, str] = NO_TAGS) -> bool:
        """See LateInput: give a new request its matcher, or have its grammar compiled.

        Raises: RequestError if there is no back end, or if the grammar is known not to compile, or not in time.
        """
        if self._choice is None:
            self._choice = self._choose()
        key, tenant = _key(constraint.wanted), tags.get(TENANT_TAG, "")
        self._keep_late()
        if key in self._given_up and self._given_up[key].overran(self._pool.limit_s):
            raise self._too_slow(key)  # the same grammar does not hold up another thread
        if key in self._cache:
            self._cache.move_to_end(key)
            if error := self._begin(constraint, self._cache[key]):
                raise type(error)(str(error))  # a new object, as the cached error is raised many times
            return True
        if key not in self._waiting:
            wanted, job = constraint.wanted, self._given_up.pop(key, None)
            if job is None:
                job = self._pool.submit(lambda job: self._compile(wanted, job), tenant)
            else:
                job.queue()
            self._waiting[key] = _Waiting(job, {})
        self._pool.share(self._waiting[key].job, tenant)
        self._waiting[key].ids[id_] = constraint
        return False

    def forget(self, id_: int) -> None:
        """See LateInput."""
        for waiting in self._waiting.values():
            waiting.ids.pop(id_, None)

    def opened(self, *, is_idle: bool = False) -> Iterator[tuple[int, RequestError | None]]:
        """See LateInput: requests whose grammars are ready, or cannot be compiled."""
        done = self._pool.something_is_done
        if is_idle:
            done.wait(IDLE_S)
        done.clear()
        for key, waiting in list(self._waiting.items()):
            if waiting.job.is_done:
                compiled = self._keep(key, waiting.job)
            elif self._pool.is_given_up(waiting.job):
                compiled = self._give_up(key, waiting.job)
            else:
                continue
            del self._waiting[key]
            for id_, constraint in waiting.ids.items():
                yield id_, self._begin(constraint, compiled)
        self._keep_late()

    def close(self) -> None:
        """See LateInput: end the threads that compile, and what the back end holds."""
        self._pool.close()
        self._backend = None

    def _begin(self, constraint: Constraint, compiled: Compiled) -> RequestError | None:
        """Give the request its matcher; returns why it cannot have one."""
        if compiled.error is not None:
            return compiled.error
        assert self._vocabulary is not None
        error = raised_by(constraint.begin, compiled, self._vocabulary)
        return None if error is None else self._blame("matcher", error)

    def _compile(self, wanted: StructuredOutputs, job: CompileJob) -> Compiled:
        """Compile a grammar; called in a thread of the pool."""
        backend, vocabulary = self._ready_backend()
        job.start_clock()
        after, end_text = wanted.after, None
        if isinstance(after, int) and after >= self.vocab_size:
            raise RequestError(f"{_PLACE}.after={after} is outside the vocabulary (0 to {self.vocab_size - 1})")
        if after is not None:
            end_text = EndText(after, vocabulary, self.num_words)
        grammar = _having("matcher", backend.compile(self._held(wanted)), Grammar)
        num_bytes = int(grammar.num_bytes) + (end_text.num_bytes if end_text is not None else 0)
        return Compiled(grammar, end_text, num_bytes)

    def _held(self, wanted: StructuredOutputs) -> StructuredOutputs:
        """A form as the back end can hold it; a server has written its schemas so before."""
        assert self._choice is not None
        rules = schema_rules(self._choice.entry, opens_objects=self._choice.opens_objects)
        held, left_out = as_held(wanted, rules, f"{_PLACE}.{wanted.kind}")
        if left_out:
            _log.warning("grammars leave out what they cannot hold: %s", clipped(", ".join(left_out), 300))
        return held

    @property
    def choice(self) -> GrammarChoice | None:
        """The back end that requests use; None without one."""
        try:
            self._choice = self._choice or self._choose()
        except RequestError:
            return None
        return self._choice

    def use_vocabulary(self, make: Callable[[], GrammarVocabulary]) -> None:
        """Give the tokenizer's vocabulary, which is made when a grammar first needs it."""
        self._make_vocabulary = make

    def _ready_backend(self) -> tuple[GrammarBackend, GrammarVocabulary]:
        """The back end; made here if `prepare` has not made it."""
        with self._making:
            if self._backend is None or self._vocabulary is None:
                assert self._choice is not None
                if self._make_vocabulary is None:
                    raise RequestError("structured output needs a tokenizer, and this engine knows none")
                self._vocabulary = self._make_vocabulary()
                self._num_known = max((id_ + 1 for id_, one in enumerate(self._vocabulary.tokens) if one), default=0)
                with Blaming((), "in __init__", otherwise=self._choice.entry):
                    self._backend = self._choice.entry.load()(self._choice.config, self._vocabulary)
        return self._backend, self._vocabulary

    def _keep(self, key: Any, job: CompileJob) -> Compiled:
        """The outcome of a compile, cached for later requests; the least recently used ones are dropped first."""
        if job.error is not None:
            if not isinstance(job.error, RequestError):
                return Compiled(error=self._blame("compile", job.error))
            text = str(job.error)
            text = text if text.startswith(_PLACE) else f"{_PLACE}.{key[0]}: {text}"
            compiled = Compiled(error=RequestError(clipped(text, 600)))
        else:
            compiled = job.result
        self._cache[key] = compiled
        self._cached_bytes += compiled.num_bytes + _num_key_bytes(key)
        while self._cached_bytes > self._cache_bytes and self._cache:
            oldest, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.num_bytes + _num_key_bytes(oldest)
        return compiled

    def _give_up(self, key: Any, job: CompileJob) -> Compiled:
        """The error for the requests of a compile that takes too long, or could not begin in time. See `_given_up`."""
        self._given_up[key] = job
        if job.started_s is not None:
            return Compiled(error=self._too_slow(key))
        limit = f"grammars that take longer than {self._pool.limit_s:g} s"
        return Compiled(error=HeldUp(f"{_PLACE}.{key[0]}: all threads are held up by {limit}; try again later"))

    def _keep_late(self) -> None:
        """Keep the outcomes of compiles that were given up and are done by now."""
        for key in [key for key, job in self._given_up.items() if job.is_done]:
            self._keep(key, self._given_up.pop(key))

    def _too_slow(self, key: Any) -> RequestError:
        limit = f"{self._pool.limit_s:g} s, which is the most it may take"
        return RequestError(f"{_PLACE}.{key[0]}: compiling it takes longer than {limit}; make it smaller")

    def _blame(self, method: str, error: BaseException) -> PluginFault:
        assert self._choice is not None
        if isinstance(error, PluginError):
            text = str(error)  # names the plugin already
        elif isinstance(error, _Broken):
            text = breach(self._choice.entry, method, str(error))
        else:
            text = f"{self._choice.entry} fails in {method}: {with_line(error)}"
        return PluginFault(clipped(text, 600))

    # ---------------------------------------------------------------------------------------------------- in the steps

    def take(self, constraint: Constraint, token_id: int) -> None:
        """See LateInput."""
        try:  # as `raised_by` does, written out: this is called for every token
            constraint.take(token_id)
        except PASSES:
            raise
        except BaseException as error:
            constraint.fail(self._fault_in("advance", constraint, error))
            constraint.stop(FinishReason.ERROR)

    def write(self, waiting: Sequence[tuple[Constraint | None, Sequence[int]]], rows_NW: WordArray) -> bool:
        """See LateInput. No token is allowed behind tokens that do not fit."""
        place = next((at for at, (_, tokens) in enumerate(waiting) if len(tokens)), len(waiting))
        has_faults = self.fill([constraint for constraint, _ in waiting[:place]], rows_NW[:place])
        for constraint, tokens in waiting[place:]:
            masks_KW = rows_NW[place : place + 1 + len(tokens)]
            masks_KW[1:] = 0
            has_fault = self.fill([constraint], masks_KW[:1])
            if constraint is not None and constraint.end is None and not has_fault:
                self.num_fitting(constraint, tokens, masks_KW[1:])
                self._clear_padding(masks_KW)
                has_fault = constraint.fault is not None
            has_faults, place = has_faults or has_fault, place + len(masks_KW)
        return has_faults

    def fill(self, constraints: Sequence[Constraint | None], masks_NW: WordArray) -> bool:
        """Write the masks of these requests' next draws. The row of None, or of a request that ends, allows no token.

        So does that of a request whose grammar fails; its constraint then has a fault. Returns whether there is any.
        """
        masks_NW[:] = 0
        going_on = [(row, one) for row, one in enumerate(constraints) if one is not None and one.end is None]
        if len(going_on) < len(constraints) or not self._fill_at_once(constraints, masks_NW):
            for row, constraint in going_on:
                self._guarded(constraint, masks_NW[row], constraint.fill)
        for row, constraint in going_on:
            if constraint.further_stops and constraint.fault is None:
                self._guarded(constraint, masks_NW[row], constraint.fill_stops)
        self._clear_padding(masks_NW)
        for place in np.flatnonzero(~masks_NW.view(np.bool_).any(axis=1)).tolist():
            empty = constraints[place]
            if empty is not None and empty.end is None and empty.fault is None:
                empty.fail(self._fault_in("fill", empty, _DoesNotFit("no token fits here")))
        return any(one.fault is not None for _, one in going_on)

    def num_fitting(self, constraint: Constraint, tokens: Sequence[int], masks_KW: WordArray | None = None) -> int:
        """See LateInput, `Constraint.look_ahead`; 0 after an error of a plugin: the request ends at its next mask."""
        try:
            return constraint.look_ahead(tokens, masks_KW)
        except PASSES:
            raise
        except BaseException as error:
            constraint.fail(self._fault_in("rollback", constraint, error))
            return 0

    def _fill_at_once(self, constraints: Sequence[Constraint | None], masks_NW: WordArray) -> bool:
        """Let the back end fill all rows in one call; returns False if it cannot, or failed in any row."""
        assert self._backend is not None
        if len(constraints) < 2 or not is_offered(self._backend.fill):
            return False
        matchers = [one.matcher for one in constraints if one is not None and one.end_text is None]
        if len(matchers) < len(constraints):
            return False
        error = raised_by(self._backend.fill, [one for one in matchers if one is not None], masks_NW)
        if error is not None:
            masks_NW[:] = 0
        return error is None

    def _guarded(self, constraint: Constraint, mask_W: WordArray, fill: Callable[[WordArray], None]) -> None:
        try:  # as `raised_by` does, written out: this is called for every token
            fill(mask_W)
        except PASSES:
            raise
        except BaseException as error:
            mask_W[:] = 0
            constraint.fail(self._fault_in("fill", constraint, error))

    def _fault_in(self, method: str, constraint: Constraint, error: BaseException) -> RequestError:
        """Why a request ends after an error: a RequestError blames its grammar, any other error the back end."""
        if not isinstance(error, RequestError):
            return self._blame(method, error)
        assert self._choice is not None
        masks = f" (masks by {self._choice.entry})" if isinstance(error, _DoesNotFit) else ""
        return RequestError(f"{_PLACE}.{constraint.wanted.kind}: {error}{masks}")

    def _clear_padding(self, masks_NW: WordArray) -> None:
        """Forbid the token ids that pad the model's vocabulary beyond the tokenizer's."""
        word, bit = divmod(self._num_known, 32)
        if bit:
            masks_NW[:, word] &= np.int32((1 << bit) - 1)
            word += 1
        masks_NW[:, word:] = 0


class _DoesNotFit(RequestError):
    """A draw that the grammar does not allow; why is not known, so the message also says whose masks they are."""


class _Broken(Exception):
    """A back end returned a value that breaks its contract."""


def _having(method: str, found: Any, contract: type) -> Any:
    if not callable(getattr(found, method, None)):
        raise _Broken(f"it returned {shown(found)}, not a {contract.__name__}")
    return found


def _key(wanted: StructuredOutputs) -> Any:
    return wanted.kind, wanted.value, wanted.whitespace, wanted.after


def _num_key_bytes(key: Any) -> int:
    value = key[1]
    return 512 + (len(value) if isinstance(value, str) else sum(map(len, value)))
