"""Loads of several tenants, for tests of fair policies: each tenant's share of the tokens, and its waiting time.

A tenant is a value of the tag "tenant".
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping

from hookline.core.contracts import Scheduler
from hookline.core.engine.engine import Engine
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.simulate.executor import VirtualClock
from hookline.core.testing.fakes import fake_engine


def shared_engine(policy: Scheduler) -> Engine:
    """An engine without a model, of eight seats, 32 tokens a step and plenty of blocks."""
    return fake_engine(policy, num_blocks=1024, max_num_seqs=8, max_num_batched_tokens=32, prefix_caching=False)


def add_for(engine: Engine, tenant: str, rng: random.Random) -> int:
    """A request of 4 to 20 tokens that generates up to 16."""
    prompt = [rng.randrange(1, 50) for _ in range(rng.randint(4, 20))]
    params = SamplingParams(max_tokens=rng.randint(1, 16), seed=rng.randrange(1000), ignore_eos=True)
    return engine.add(prompt, params, options=RequestOptions(tags={"tenant": tenant}))


def served_shares(engine: Engine, backlog: Mapping[str, int], num_steps: int = 3000) -> dict[str, float]:
    """Each tenant's share of the tokens served, from 0 to 1, while its `backlog` of requests is kept waiting.

    The first tenth of the steps is not counted.
    """
    rng = random.Random(0)
    served = engine.served.of("tenant")
    before: dict[str, int] = {}
    for step in range(num_steps):
        waiting: Counter[str] = Counter()
        for request in engine.queue.waiting.values():
            waiting[request.tags["tenant"]] += 1
        for tenant, wanted in backlog.items():
            for _ in range(wanted - waiting[tenant]):
                add_for(engine, tenant, rng)
        engine.step()
        if step == num_steps // 10:
            before = {tenant: served[tenant].prompt + served[tenant].generated for tenant in backlog}
    tokens = {tenant: served[tenant].prompt + served[tenant].generated - before[tenant] for tenant in backlog}
    return {tenant: count / sum(tokens.values()) for tenant, count in tokens.items()}


def p99_waits(engine: Engine, per_step: Mapping[str, float], num_steps: int = 3000) -> dict[str, float]:
    """Each tenant's 99th percentile of the steps that a request waits; `per_step` of its requests arrive each step."""
    clock = VirtualClock()
    engine.state.use_clock(clock.now)
    engine.state.use_sleep(clock.sleep)
    rngs = {tenant: random.Random(tenant) for tenant in per_step}
    owners: dict[int, str] = {}
    waits: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        for tenant, rate in per_step.items():
            for _ in range(int(rate) + (rngs[tenant].random() < rate % 1)):
                owners[add_for(engine, tenant, rngs[tenant])] = tenant
        for output in engine.step():
            assert output.timings is not None and output.timings.scheduled_s is not None
            waits[owners[output.request_id]].append(output.timings.scheduled_s - output.timings.arrival_s)
        clock.sleep(1.0)
    return {tenant: sorted(found)[int(0.99 * len(found))] for tenant, found in waits.items()}
