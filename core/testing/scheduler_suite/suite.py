"""The conformance suite of scheduler policies: subclass it in your tests and return your policy from `make`.

It drives real engines over `hookline.core.testing.fakes`, where a request that lost or shares a wrong block gets other
tokens than alone. It does not measure speed, and assumes no order but that no request starves, running or waiting.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import cycle, product
from typing import Any, Unpack

from hookline.core.contracts import FullAttention, Joining, Plan, Scheduler, SchedulerView, SlidingWindow
from hookline.core.engine.engine import Engine
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.request_options import OptionKeys, RequestOptions
from hookline.core.requests.request import Request
from hookline.core.sampling_params import SamplingParams
from hookline.core.simulate.executor import VirtualClock
from hookline.core.testing.checks import check_contract
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.scheduler_suite.policy_memory import Overheard, footprint

MAX_STEPS = 3000
"""Most steps of a load; a policy that needs more is stuck."""
STEP_S = 0.1
"""Duration of a step where time matters; by the host's clock the machine's speed would decide who starves."""
MAX_AGE_STEPS = 500
"""Steps, ten a second, within which the small requests of the first 20 are to end."""

MEMORY_SLACK = 40
"""Things by which a policy's memory may differ from one idle engine to another."""
JOININGS = (Joining(), Joining(max_decodes=3, max_prompts=2, max_prompt_tokens=12))
"""Limits.joining of the engines with random loads."""
WINDOWS = (SlidingWindow(8), FullAttention(), SlidingWindow(8), FullAttention(), FullAttention())
"""Layers of a model some of which keep fewer tokens: in groups with blocks of their own."""
NUM_WAITING = 8
"""Requests that wait at any time where arrivals never end."""
ENDLESS = {
    "short prompts": [(10, 1)],
    "prompts longer than a step": [(70, 1)],
    "long and short prompts and answers": [(3, 1), (70, 1), (10, 30), (10, 1), (40, 3)],
}
"""Arrivals that never end: (prompt tokens, max_tokens) in turn."""
CROWDS: dict[str, dict[str, Any]] = {
    "short requests": {"sizes": [(9, 4)]},
    "long prompts": {"sizes": [(70, 1)]},
    "long answers": {"sizes": [(9, 25)]},
    "requests of one tenant": {"sizes": [(9, 4)], "tags": {"tenant": "a"}},
    "more urgent requests": {"sizes": [(9, 4)], "priority": -1},
    "requests with a deadline": {"sizes": [(9, 4)], "deadline_s": 1.0},
    "requests with a cached prefix": {"sizes": [(12, 4)], "num_shared": 8},
}
"""Arrivals of one kind that never end, as arguments of `endless_steps`."""
OTHERS: list[tuple[int, int, dict[str, str]]] = [(9, 4, {}), (70, 4, {"tenant": "b"}), (9, 25, {})]
"""Requests of another kind beside the endless arrivals: prompt tokens, max_tokens and tags."""


class SchedulerSuite:
    """`class TestMyPolicy(SchedulerSuite): def make(self): return MyPolicy(MyConfig())`.

    max_gap_steps: most steps in a row without a token for a running request, under any arrivals; with plenty of blocks,
    also for a preempted request. Set it to the guarantee of your policy.
    may_starve_while: kinds of arrivals, by the names in failures, during which your policy lets other requests wait for
    ever: for strict priorities {"more urgent requests"}. Say so in its docstring, too.
    """

    max_gap_steps = 100
    may_starve_while: Collection[str] = ()

    def make(self) -> Scheduler:
        """A fresh policy object."""
        raise NotImplementedError("return your scheduler from make()")

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("scheduler", type(self.make()))

    def test_every_request_gets_the_tokens_it_gets_alone(self) -> None:
        """Random loads over small pools: no request is lost, and no cache is mixed up."""
        for seed in range(30):
            RandomLoad(self.make(), random.Random(seed)).run()

    def test_a_tight_pool_still_finishes_everybody(self) -> None:
        """Together the requests need several times the pool, so most are preempted or wait."""
        for seed in range(10):
            load = RandomLoad(self.make(), random.Random(seed), num_blocks=20, block_size=2, max_model_len=40)
            load.run()

    def test_layers_that_keep_fewer_tokens_are_planned_for(self) -> None:
        """As in Gemma 3: a token may need several blocks, or none, and `budget` alone knows how many."""
        for seed in range(24):
            RandomLoad(self.make(), random.Random(seed), num_blocks=100, layers=WINDOWS).run()

    def test_prompts_longer_than_the_token_budget_are_computed_in_chunks(self) -> None:
        """A prompt of several times max_num_batched_tokens is served."""
        engine = fake_engine(self.make(), max_num_batched_tokens=8, max_model_len=128)
        prompt = list(range(1, 50)) * 2
        engine.add(prompt, SamplingParams(max_tokens=3, seed=1))
        assert drain(engine)[0].token_ids == completion(1, prompt, 3, 50), "a chunked prompt gives other tokens"

    def test_nobody_starves_while_others_keep_arriving(self) -> None:
        """Each waiting, running or preempted request ends, although seats and blocks are few and eight others always
        wait.
        """
        for crowd, arrivals in CROWDS.items():
            if crowd in self.may_starve_while:
                continue
            clock, engine = VirtualClock(), fake_engine(self.make(), num_blocks=20, max_num_seqs=4)
            engine.state.use_clock(clock.now)
            early: list[Request] = []
            for step, _ in enumerate(endless_steps(engine, num_steps=MAX_AGE_STEPS, **arrivals)):
                clock.sleep(STEP_S)
                if step == 10:
                    for token, (num_tokens, max_tokens, tags) in enumerate(OTHERS):
                        engine.add(
                            [token] * num_tokens,
                            SamplingParams(max_tokens=max_tokens, seed=0),
                            options=RequestOptions(tags=tags),
                        )
                if step == 20:
                    early = list(engine.queue.live.values())
                early = [request for request in early if request.id in engine.queue.live]
                if step >= 20 and not early:
                    break
            for one in early:
                sizes = f"{one.num_prompt_tokens} prompt tokens, max_tokens={one.max_tokens}, {dict(one.tags)}"
                name = f"request {one.id} ({sizes}, preempted {one.num_preemptions} times)"
                raise AssertionError(f"{name} starves: not done after {MAX_AGE_STEPS} steps while {crowd} arrive")

    def test_arrivals_that_never_end_starve_nobody_who_has_begun(self) -> None:
        """Eight prompts wait at every step. Where blocks are scarce, requests that were preempted do not count."""
        for (load, sizes), num_blocks in product(ENDLESS.items(), (1024, 48)):
            engine, gaps = fake_engine(self.make(), num_blocks=num_blocks, prefix_caching=False), Gaps()
            for index in range(2):
                engine.add([index + 1], SamplingParams(max_tokens=127, seed=0))
            for _ in endless_steps(engine, sizes, 2 * self.max_gap_steps + 100):
                begun = list(engine.queue.running.values())
                if num_blocks == 1024:
                    begun += [request for request in engine.queue.waiting.values() if request.num_preemptions]
                id_, gap = gaps.longest_after_step(begun)
                limit = f"more than max_gap_steps={self.max_gap_steps}, with {num_blocks} blocks, while {load} arrive"
                assert gap <= self.max_gap_steps, f"request {id_} starves: no token for {gap} steps, {limit}"

    def test_aborts_at_any_moment_leave_nothing_behind(self) -> None:
        """Requests are aborted while waiting, mid-prompt, decoding and preempted."""
        for seed in range(20):
            load = RandomLoad(self.make(), random.Random(seed), num_blocks=24, block_size=2, max_model_len=48)
            load.run(abort_chance=0.3)
            assert load.engine.pool.num_free == load.engine.pool.num_blocks, "aborted requests left blocks behind"

    def test_the_same_view_gives_the_same_plan_and_changes_nothing(self) -> None:
        """A plan depends on the view alone, so that every rank and every rerun makes the same plan."""
        for seed in range(10):
            load = RandomLoad(self.make(), random.Random(seed), num_blocks=24, block_size=2, max_model_len=48)
            for _ in load.steps():
                self._compare_plans(load.engine)

    def test_a_long_queue_is_planned_within_the_limits(self) -> None:
        """A thousand requests at once: the plan admits some and keeps every limit."""
        engine = fake_engine(self.make(), num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=64)
        for index in range(1000):
            engine.add([index % 50] * 20, SamplingParams(max_tokens=4, seed=index))
        assert engine.plan().computes, "nothing is computed although a thousand requests wait"

    def test_a_policy_with_a_memory_is_told_what_became_of_each_plan(self) -> None:
        """Under overlap, aborts and preemptions: one notice for each plan, in order, and one for each request's end."""
        for seed in range(10):
            policy = Overheard(self.make())
            load = RandomLoad(policy, random.Random(seed), num_blocks=24, block_size=2, max_model_len=48)
            load.run(abort_chance=0.1)
            load.engine.close()
            policy.check(load.ended)

    def test_its_memory_does_not_grow_with_the_requests_that_ended(self) -> None:
        """An idle engine's policy remembers no more after 300 requests of three tenants than after 100."""
        policy = self.make()
        engine = fake_engine(policy, num_blocks=40, max_num_batched_tokens=12, overlap=True)
        sizes = []
        for _ in range(3):
            for index in range(100):
                tags = {"tenant": f"tenant {index % 3}"}
                engine.add(
                    [index % 50] * (1 + index % 9),
                    SamplingParams(max_tokens=1 + index % 5, seed=1),
                    options=RequestOptions(tags=tags),
                )
                engine.step()
                if index % 5 == 0:  # a waiting request, and one whose prompt is perhaps being computed
                    engine.abort([*list(engine.queue.live)[-1:], *list(engine.queue.running)[-1:]])
            drain(engine)
            sizes.append(footprint(policy))
        assert sizes[2] <= sizes[0] + MEMORY_SLACK, f"it holds {sizes} things after 100, 200 and 300 requests"

    def _compare_plans(self, engine: Engine) -> None:
        if not engine.has_work:
            return
        before = snapshot(engine)
        now_s = engine.clock()
        first, second = (normal(engine.scheduler.plan(look(engine, now_s))) for _ in range(2))
        assert snapshot(engine) == before, "plan() changed a request or the queue"
        assert first == second, f"the same view gave two plans: {first} and {second}"


class Gaps:
    """For how many steps in a row each request has got no further, by the tokens computed of it."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def longest_after_step(self, requests: Iterable[Request]) -> tuple[int, int]:
        """(id, steps) of the request with the longest gap now; a request that is new among them has a gap of 0."""
        before, self._seen = self._seen, {}
        for request in requests:
            most, gap = before.get(request.id, (-1, 0))
            num_tokens = request.num_computed_tokens
            self._seen[request.id] = (num_tokens, 0) if num_tokens > most else (most, gap + 1)
        return max(((id_, gap) for id_, (_, gap) in self._seen.items()), key=lambda pair: pair[1], default=(-1, 0))


def endless_steps(
    engine: Engine, sizes: Sequence[tuple[int, int]], num_steps: int, num_shared: int = 0, **keys: Unpack[OptionKeys]
) -> Iterator[None]:
    """Steps before each of which requests arrive until eight of these wait that were never preempted.

    sizes: (prompt tokens, max_tokens), in turn. num_shared: tokens that all prompts begin with. keys: of the requests'
    options.
    """
    arrivals, ids = enumerate(cycle(sizes)), set[int]()
    for _ in range(num_steps):
        waiting = engine.queue.waiting.values()
        for _ in range(NUM_WAITING - sum(request.id in ids and not request.num_preemptions for request in waiting)):
            index, (num_prompt_tokens, max_tokens) = next(arrivals)
            prompt = [0 if place < num_shared else (index + place) % 50 for place in range(num_prompt_tokens)]
            ids.add(
                engine.add(prompt, SamplingParams(max_tokens=max_tokens, seed=index), options=RequestOptions(**keys))
            )
        engine.step()
        yield


class RandomLoad:
    """A random load for one engine, and the expected tokens of each request."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, **sizes: Any) -> None:
        self.rng = rng
        drawn: dict[str, Any] = {
            "num_blocks": rng.randint(16, 40),
            "block_size": rng.choice([1, 2, 4]),
            "max_num_seqs": rng.randint(1, 6),
            "max_num_batched_tokens": rng.randint(6, 40),
            "max_model_len": 64,
        }
        joining = rng.choice(JOININGS)
        overlap = rng.random() < 0.5
        self.engine = fake_engine(scheduler, **(drawn | sizes), eos_token_ids=[0], overlap=overlap, joining=joining)
        self.wanted: dict[int, list[int]] = {}
        self.ended: list[RequestOutput] = []
        self.common = [rng.randrange(1, 50) for _ in range(30)]

    def add(self) -> None:
        """A request that shares a random part of its prompt with others."""
        rng, max_len = self.rng, self.engine.limits.max_len
        length = rng.randint(1, max(1, max_len // 2))
        prompt = (self.common[: rng.randint(0, 30)] + [rng.randrange(50) for _ in range(length)])[: max_len - 1]
        params = SamplingParams(max_tokens=rng.randint(1, 20), seed=rng.randrange(1000))
        num_tokens = params.num_tokens_in(max_len - len(prompt))
        tags = {"tenant": rng.choice("abc")} if rng.random() < 0.8 else None
        deadline_s = rng.choice([None, 0.001, 10.0])
        options = RequestOptions(rng.randint(0, 2), tags, deadline_s)
        request_id = self.engine.add(prompt, params, options=options)
        self.wanted[request_id] = completion(params.seed or 0, prompt, num_tokens, 50, [0])

    def steps(self, abort_chance: float = 0.0) -> Iterator[None]:
        """Add, step and perhaps abort until everything is done; checks the engine after each."""
        left = 12
        for _ in range(MAX_STEPS):
            if left and (self.rng.random() < 0.5 or not self.engine.has_work):
                self.add()
                left -= 1
            if self.wanted and self.rng.random() < abort_chance:
                self.take(self.engine.abort([self.rng.choice(list(self.wanted))]))
            if self.engine.has_work:
                self.take(self.engine.step())
            check_engine(self.engine)
            yield
            if not left and not self.engine.has_work:
                assert not self.wanted, f"requests {sorted(self.wanted)} never ended"
                return
        raise AssertionError(f"12 short requests are not done after {MAX_STEPS} steps")

    def run(self, abort_chance: float = 0.0) -> None:
        """Do all steps of the load."""
        for _ in self.steps(abort_chance):
            pass

    def take(self, outputs: list[RequestOutput]) -> None:
        """Compare the tokens of ended requests with the expected ones."""
        self.ended += outputs
        for output in outputs:
            wanted = self.wanted.pop(output.request_id)
            aborted = output.finish_reason is FinishReason.ABORT
            got = output.token_ids
            assert got == wanted[: len(got)] and (aborted or got == wanted), f"got {got}, alone {wanted}"


def drain(engine: Engine) -> list[RequestOutput]:
    """Step until nothing is left; outputs in order of finishing. Checks the engine's books after every step.

    Raises: AssertionError if there is still work after MAX_STEPS steps, or a book does not balance.
    """
    outputs: list[RequestOutput] = []
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        check_engine(engine)
    raise AssertionError(f"the engine still has work after {MAX_STEPS} steps")


def look(engine: Engine, now_s: float | None = None) -> SchedulerView:
    """The view that the engine's scheduler would get now, or at another time on its clock."""
    return engine.planner.view(engine.clock() if now_s is None else now_s)


def normal(plan: Plan) -> tuple[Any, ...]:
    """A plan in a form that compares."""
    decode = list(plan.decode) if isinstance(plan.decode, list | tuple) else plan.decode
    return [tuple(pair) for pair in plan.prefill], decode, list(plan.preempt), plan.idle_s


def snapshot(engine: Engine) -> Any:
    """Everything a policy might be tempted to change."""
    requests = engine.queue.live.values()
    state = [(r.id, r.num_tokens, r.num_computed_tokens, tuple(r.blocks), r.priority, r.row) for r in requests]
    return copy.deepcopy((state, list(engine.queue.waiting), list(engine.queue.running), engine.pool.num_free))
