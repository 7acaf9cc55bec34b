"""An executor without a model, for testing engines and schedulers in microseconds; no torch.

It keeps a KV cache of token ids behind real block tables, and draws each token by hashing everything the request's
table shows it. So a request that lost a block, shares a wrong one or reads a stale one gets other tokens than alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from hookline.core.contracts import Joining, LayerCache, Limits, ModelSpec, Scheduler
from hookline.core.contracts.sampler import FORBIDDEN
from hookline.core.engine.engine import Engine
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.plugin.check_plugin import new_manager
from hookline.core.plugin.observers import Observers
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.pooling import BEGINS, ENDS
from hookline.core.requests.prompt_readers import FIRST_PLUGIN
from hookline.core.requests.request import Request
from hookline.core.step.executor import Executor, StepResult, read_by
from hookline.core.step.message import ALONG, READ_WIDTH, Axis, Step, pack, unpack
from hookline.core.step.micro_batches import cut
from hookline.core.step.timing import Clock, DeviceTime
from hookline.core.testing.fakes.poolers import READS_ALL, pooled_numbers
from hookline.core.util.arrays import VectorArray, WordArray, ints, num_mask_words

HOLE = -1
"""A cache slot that was never written."""


def next_token(seed: int, tokens: Sequence[int] | np.ndarray[Any, Any], vocab_size: int) -> int:
    """The token the fake draws after `tokens`: a hash, so that every token before it matters."""
    return xxhash.xxh64_intdigest(np.asarray(tokens, dtype=np.int64).tobytes(), seed=seed & 0xFFFFFFFF) % vocab_size


def completion(
    seed: int, prompt: Sequence[int], num_tokens: int, vocab_size: int, stop_ids: Sequence[int] = ()
) -> list[int]:
    """The tokens that a request must get: up to num_tokens, ending with a stop token if one is sampled."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(seed, tokens, vocab_size))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakeHandle(list[int]):
    """The tokens of a step, and its vectors by the names of their poolers' results."""

    def __init__(self, tokens: Iterable[int], vectors: Mapping[str, Sequence[VectorArray]]) -> None:
        super().__init__(tokens)
        self.vectors = vectors


def check_sections(step: Step) -> None:
    """Assert that each section of a step has as many entries as its axis says, and only valid indices."""
    (whole,) = cut(step, 1)
    for name, along in ALONG.items():
        if along.axis is Axis.STEP:
            continue
        num_entries = len(getattr(step, name))
        if along.by and not len(getattr(step, along.by)):
            assert not num_entries, f"{name} has other entries"
            continue
        if along.by:
            places, count = whole.members.named(along), len(whole.places(along.axis))
            assert ((places >= 0) & (places < count)).all(), f"{along.by} names what is not there"
        assert num_entries == len(whole.members.along(along)), f"{name} has other entries"


class FakeClock:
    """A Clock of a device that takes a second for each step."""

    num_unread = 0

    def read(self) -> DeviceTime | None:
        """See Clock."""
        self.num_unread -= 1
        return DeviceTime(1.0, 0.25)

    def clear(self) -> None:
        """See Clock."""
        self.num_unread = 0


class FakeExecutor(Executor):
    """An Executor over plain arrays; asserts that no request ever reads a slot that was not written.

    windows: of the groups of layers that have blocks of their own. Each group's cache is read as far as its window
    reaches, and must hold the request's own tokens.
    """

    def __init__(self, limits: Limits, vocab_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.vocab_size, self.block_size, self.windows = vocab_size, limits.block_size, windows
        self.cache = np.full((limits.num_blocks, limits.block_size), HOLE, dtype=np.int64)
        self.row_columns = -(-limits.max_model_len // limits.block_size)
        self.table = np.full((limits.max_num_seqs, len(windows) * self.row_columns), HOLE, dtype=np.int64)
        self.seeds = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self.tokens: dict[int, int] = {}
        self.pooled: dict[int, int] = {}
        """Tokens pooled so far, by row."""
        self.lengths: dict[int, int] = {}
        self.steps: list[Step] = []
        self.is_closed = False
        self.clock: FakeClock | None = None
        num_draws = max(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.masks = np.zeros((num_draws, num_mask_words(vocab_size)), dtype=np.int32)
        self.guess: Callable[[int, list[int], int], Sequence[int]] | None = None
        """Drafts of the device itself, at most as many as asked for, from a request's seed and its tokens."""
        self._texts: dict[int, list[int]] = {}
        """The tokens that the device knows of rows for which it drafts."""
        self._limits: dict[int, int] = {}
        self._waiting: tuple[Step, list[tuple[int, int]], list[int]] | None = None

    def launch(self, step: Step) -> Any:
        """Compute a step at once, from its packed form."""
        step = unpack(pack(step))
        check_sections(step)
        if self.clock is not None:
            self.clock.num_unread += 1
        self.steps.append(step)
        self.seeds[step.admit_rows] = step.admit_seeds
        self.table[step.table_rows, step.table_columns] = step.table_blocks
        if len(step.drafting_rows):
            return FakeHandle(self._draft(step), {})
        ends = self._write_decodes(step) + self._write_chunks(step)
        assert step.max_context_len == max((end for _, end in ends), default=0), "max_context_len is wrong"
        self._waiting = None
        vectors = self._pool(step, ends)
        if not len(step.late_draws):
            return FakeHandle(self._draw_all(step, ends, {}), vectors)
        handle = FakeHandle((), vectors)
        self._waiting = step, ends, handle
        return handle

    def late_rows(self, num_rows: int) -> WordArray:
        """See Executor."""
        return self.masks[:num_rows]

    def release(self, handle: Any, num_rows: int) -> None:
        """See Executor."""
        assert self._waiting is not None and self._waiting[2] is handle, "this step does not wait for late rows"
        (step, ends, _), self._waiting = self._waiting, None
        assert num_rows == len(step.late_draws)
        handle += self._draw_all(step, ends, dict(zip(step.late_draws.tolist(), self.masks, strict=False)))

    def _draft(self, step: Step) -> list[int]:
        """What StepResult.tokens says of a step in which the device drafts."""
        assert self.guess is not None and step.num_tokens == len(step.drafting_rows) * (1 + step.num_drafts)
        first, told = 0, list[int]()
        shown = zip(step.shown_rows, step.shown_starts, step.shown_lens, step.shown_limits, strict=True)
        for row, start, length, limit in (map(int, one) for one in shown):
            known = self._texts.get(row, [])[:start]
            assert len(known) == start, f"row {row} is shown its tokens from {start} on, and lacks some before"
            self._texts[row] = known + step.shown_tokens[first : first + length].tolist()
            self._limits[row], first = limit, first + length
        for row in step.drafting_rows.tolist():
            tokens, limit = self._texts[row], self._limits[row]
            if len(tokens) >= limit:  # the host does not know yet that it is over
                told += [0] * (3 + step.num_drafts)
                continue
            drafts = list(self.guess(int(self.seeds[row]), tokens, step.num_drafts))[: limit - len(tokens) - 1]
            assert len(tokens) + len(drafts) <= step.max_context_len, "max_context_len is too low"
            self._write(row, len(tokens) - 1, [tokens[-1], *drafts])
            drawn = [self._draw((row, len(tokens) + place), 0, set()) for place in range(1 + len(drafts))]
            kept = next((place for place, draft in enumerate(drafts) if drawn[place] != draft), len(drafts))
            tokens += drawn[: 1 + kept]
            told += [len(drafts), kept, *drawn, *[0] * (step.num_drafts - len(drafts))]
        return told

    def _draw_all(self, step: Step, ends: list[tuple[int, int]], masks: Mapping[int, WordArray]) -> list[int]:
        chunks = step.sampled_chunks.tolist()
        places, left = ends[: len(step.decode_rows)], Counter(chunks)
        for chunk in chunks:  # a chunk that is named several times has a draw after each of its last tokens
            left[chunk] -= 1
            row, end = ends[len(step.decode_rows) + chunk]
            places.append((row, end - left[chunk]))
        masked = set(zip(step.forbidden_draws.tolist(), step.forbidden_tokens.tolist(), strict=True))
        for index, mask_W in masks.items():
            masked |= {(index, token) for token in range(self.vocab_size) if not mask_W[token // 32] >> token % 32 & 1}
        return [self._draw(place, index, masked) for index, place in enumerate(places)]

    def collect(self, handle: Any) -> StepResult:
        """The tokens that were drawn, and the vectors."""
        assert self._waiting is None or self._waiting[2] is not handle, "a step is collected whose late rows never came"
        return StepResult(ints(handle), apart={name: np.stack(vectors) for name, vectors in handle.vectors.items()})

    def _pool(self, step: Step, ends: list[tuple[int, int]]) -> dict[str, list[VectorArray]]:
        """Vectors of the pooled prompts that are complete; asserts that whole prompts came in order of their tokens."""
        vectors = dict[str, list[VectorArray]]()
        reads = zip(step.reads.reshape(-1, READ_WIDTH).tolist(), step.read_lens.tolist(), strict=True)
        for (index, reader, flags, _), count in reads:
            if reader < FIRST_PLUGIN:  # core's own readers give zeros here
                vectors.setdefault(read_by(reader), []).extend(np.zeros((count, 2), dtype=np.float32))
                continue
            row, end = ends[len(step.decode_rows) + index]
            if reader == FIRST_PLUGIN + READS_ALL:
                start = int(step.chunk_starts[index])
                assert start == (0 if flags & BEGINS else self.pooled[row]), (
                    f"row {row} is not pooled from its beginning"
                )
                self.pooled[row] = end
            if flags & ENDS:
                context = self._context(row, 0, end, 0)
                assert (context != HOLE).all(), f"row {row} pools a cache slot that was never written"
                vector = np.array(pooled_numbers(context.tolist()), dtype=np.float32)
                vectors.setdefault(read_by(reader), []).append(vector)
        return vectors

    def time_steps(self) -> Clock:
        """A clock by which each step takes one second and begins a quarter of a second after the step before."""
        self.clock = FakeClock()
        return self.clock

    def close(self) -> None:
        """Note that the engine closed it."""
        self.is_closed = True

    def _blocks(self, row: int, start: int, end: int, group: int) -> np.ndarray[Any, Any]:
        """The blocks of a group in which a row's positions start to end - 1 lie."""
        first = group * self.row_columns
        blocks = self.table[row, first + start // self.block_size : first + -(-end // self.block_size)]
        assert blocks.min() >= 0, f"row {row} has no block for a position in {start}..{end} of group {group}"
        return blocks

    def _write(self, row: int, start: int, tokens: Any) -> None:
        """Write tokens into the cells of a group's cache; a cell's value also says which group wrote it."""
        end, values = start + len(tokens), np.asarray(tokens)
        offset = start % self.block_size
        for group in range(len(self.windows)):
            blocks = self._blocks(row, start, end, group)
            if len(blocks) == 1:
                self.cache[blocks[0], offset : offset + len(values)] = values + group * self.vocab_size
            else:
                places = np.arange(offset, offset + len(values))
                slots = blocks[places // self.block_size], places % self.block_size
                self.cache[slots] = values + group * self.vocab_size

    def _context(self, row: int, start: int, end: int, group: int) -> np.ndarray[Any, Any]:
        """The numbers that a group's cache has for a row's positions, from start to end - 1."""
        offset = start % self.block_size
        cells: np.ndarray[Any, Any] = self.cache[self._blocks(row, start, end, group)]
        return cells.reshape(-1)[offset : offset + end - start]

    def _read(self, row: int, start: int, end: int, group: int) -> np.ndarray[Any, Any]:
        """The tokens that queries at positions start to end - 1 see in a group of layers."""
        window = self.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        found = self._context(row, first, end, group)
        tokens: np.ndarray[Any, Any] = found - group * self.vocab_size if group else found
        if tokens.view(np.uint64).max() >= self.vocab_size:  # as negative numbers are, too
            assert (found != HOLE).all(), f"row {row} reads a cache slot of group {group} that was never written"
            raise AssertionError(f"row {row} reads another group's block as {group}'s")
        return tokens

    def _write_decodes(self, step: Step) -> list[tuple[int, int]]:
        ends = []
        for row in step.decode_rows.tolist():
            length = self.lengths[row]
            self._write(row, length - 1, [self.tokens[row]])
            ends.append((row, length))
        return ends

    def _write_chunks(self, step: Step) -> list[tuple[int, int]]:
        ends, first = [], 0
        for row, start, length in zip(step.chunk_rows, step.chunk_starts, step.chunk_lens, strict=True):
            self._write(int(row), int(start), step.token_ids_T[first : first + length])
            ends.append((int(row), int(start + length)))
            first += length
        if tuple(self.windows) != (None,):
            for (row, end), start in zip(ends, step.chunk_starts.tolist(), strict=True):
                self._visible(row, start, end)
        return ends

    def _visible(self, row: int, start: int, end: int) -> np.ndarray[Any, Any]:
        """The tokens that these queries see in the group with the longest window; the others must see the same ones."""
        seen = [self._read(row, start, end, group) for group in range(len(self.windows))]
        longest = max(seen, key=len)
        for group, tokens in enumerate(seen):
            is_same = tokens is longest or np.array_equal(tokens, longest[len(longest) - len(tokens) :])
            assert is_same, f"row {row} reads other tokens in group {group} than it computed"
        return longest

    def _draw(self, place: tuple[int, int], index: int, masked: set[tuple[int, int]]) -> int:
        row, end = place
        context = self._visible(row, end - 1, end)
        token = next_token(int(self.seeds[row]), context, self.vocab_size)
        for _ in range(self.vocab_size if masked else 0):
            token = (token + 1) % self.vocab_size if (index, token) in masked else token
        if (index, token) in masked:
            token += FORBIDDEN
        self.tokens[row], self.lengths[row] = token, end + 1
        return token


def fake_engine(
    scheduler: Scheduler,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    vocab_size: int = 50,
    eos_token_ids: Sequence[int] = (),
    prefix_caching: bool = True,
    stall_timeout_s: float = 1.0,
    overlap: bool = False,
    max_queued_requests: int | None = None,
    max_queued_tokens: int | None = None,
    tag_keys: tuple[str, ...] | None = None,
    layers: tuple[LayerCache, ...] = (),
    joining: Joining = Joining(),  # noqa: B008
    **options: Any,
) -> Engine:
    """An engine over a FakeExecutor. layers: the caches of its model's layers; () means full attention."""
    spec = ModelSpec(max(1, len(layers)), 1, 1, 1, 1, vocab_size, max_model_len, layers)
    groups = CacheGroups.of(spec, max_model_len)
    num_cache_tokens = groups.longest(num_blocks, block_size, max_num_batched_tokens, max_model_len)
    sizes = max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_blocks
    limits = Limits(*sizes, groups.num_groups, joining)
    return Engine(
        scheduler,
        FakeExecutor(limits, vocab_size, groups.windows),
        BlockPool(num_blocks, block_size, caching=prefix_caching),
        EngineLimits(
            limits,
            vocab_size,
            stall_timeout_s,
            frozenset(eos_token_ids),
            overlap=overlap,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            tag_keys=tag_keys,
            num_cache_tokens=num_cache_tokens,
        ),
        groups=groups,
        **options,
    )


def watched_by(*observers: Any) -> Observers:
    """For `fake_engine(..., observers=watched_by(observer))`: these observers, and no plugin's hooks."""
    return Observers(new_manager(), {type(observer).__name__: observer for observer in observers})


def _check_salts(cache: KVCacheManager, requests: Iterable[Request]) -> None:
    salts: dict[int, str | None] = {}
    for request in requests:
        for block in cache.held_blocks(request):
            salt = salts.setdefault(block, request.options.cache_salt)
            assert salt == request.options.cache_salt, f"requests with different cache salts share block {block}"


def check_engine(engine: Engine) -> None:
    """Assert the invariants between any two steps: blocks, rows and requests add up, and the limits are kept."""
    engine.pool.check()
    queue, pool = engine.queue, engine.pool
    held: dict[int, int] = {}
    for request in queue.live.values():
        for block in engine.cache.held_blocks(request):
            held[block] = held.get(block, 0) + 1
    if any(request.options.cache_salt for request in queue.live.values()):
        _check_salts(engine.cache, queue.live.values())
    for block in range(pool.num_blocks):
        assert pool.references(block) == held.get(block, 0), f"block {block} has a wrong reference count"
    assert len(queue.running) <= engine.limits.plan.max_num_seqs, "more requests run than max_num_seqs"
    rows = [request.row for request in queue.running.values()]
    assert len(set(rows)) == len(rows) and min(rows, default=0) >= 0, "two requests share a row"
    assert len(rows) + len(engine.dispatcher.free_rows) == engine.limits.plan.max_num_seqs, "a row is lost"
    waiting = [*queue.waiting.values(), *queue.compiling.values()]
    num_waiting_tokens = sum(request.num_prompt_tokens for request in waiting)
    assert queue.num_waiting_tokens == num_waiting_tokens, "the waiting tokens are miscounted"
    num_preempted = sum(request.num_preemptions > 0 for request in queue.waiting.values())
    assert queue.num_preempted_waiting == num_preempted, "the waiting requests that were preempted are miscounted"
    everybody = set(queue.waiting) | set(queue.running) | set(queue.ending) | set(queue.compiling)
    assert set(queue.live) == everybody, "a request is lost"
    assert not set(queue.waiting) & set(queue.running), "a request waits and runs"
