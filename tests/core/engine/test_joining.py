"""When a policy is told that decodes may join prompts: not while they ask for what graphs with prompts do not have."""

import pytest

from hookline.core.contracts import ALL, Joining, StructuredOutputs
from hookline.core.plugin.registry import PROCESSOR, Entry
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.requests.structured_output import GrammarChoice, StructuredOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.scheduling import plan_prompts_first
from hookline.core.testing.fakes import completion, fake_engine
from hookline.core.testing.scheduler_suite import drain
from tests.core.engine.test_misbehaving_plugins import GRAMMARS, ORIGIN, STOP, VOCAB_SIZE, VOCABULARY
from tests.core.faulty_processors import PlainProcessorArguments

JOINING = Joining(max_decodes=4, max_prompts=2, max_prompt_tokens=16)
PLAIN = SamplingParams(seed=1, max_tokens=20)


class PromptsFirst:
    """Remembers what it was told of joining when requests waited, and what it planned."""

    def __init__(self):
        self.told, self.plans = [], []

    def plan(self, view):
        if view.waiting or view.prefilling:
            self.told.append(view.limits.joining)
        self.plans.append(plan_prompts_first(view, 0.0))
        return self.plans[-1]


def make(joining=JOINING, **options):
    backend = Entry(GRAMMARS, "theirs", "hookline.core.testing.plain_grammar:PlainGrammars", ORIGIN)
    grammars = StructuredOutput(lambda: GrammarChoice(backend), VOCAB_SIZE, vocabulary=lambda: VOCABULARY)
    stops = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [STOP], "late": grammars}
    engine = fake_engine(PromptsFirst(), joining=joining, **stops, **options)
    theirs = "tests.core.engine.test_misbehaving_plugins:Follows"
    processor = Entry(PROCESSOR, "follows", theirs, ORIGIN, config=PlainProcessorArguments)
    object.__setattr__(engine.limits, "extensions", InstalledExtensions.of([processor]))
    return engine


def told_with_running(params, prompts=([1, 2, 3],), **options):
    """What a policy is told while these requests run and another one waits."""
    engine = make(**options)
    for prompt in prompts:
        engine.add(prompt, params)
    while not engine.queue.running:
        engine.step()
    engine.add([4, 5], PLAIN)
    engine.step()
    drain(engine)
    return engine.scheduler.told[-1]


MORE = [
    {},
    {"logprobs": 0},
    {"min_tokens": 4},
    {"extra_args": {"follows": {"amount": 1.0}}},
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_a_policy_is_told_that_decodes_may_join(more):
    params = SamplingParams(seed=1, max_tokens=9, **more)
    assert told_with_running(params) == JOINING
    assert told_with_running(params, joining=Joining()) == Joining()


@pytest.mark.parametrize(
    "more", [{"prompt_logprobs": 0}, {"structured_outputs": StructuredOutputs(choice=("\n\n cc",))}], ids=str
)
def test_it_is_not_told_so_while_a_running_request_asks_for_what_graphs_lack(more):
    assert told_with_running(SamplingParams(seed=1, max_tokens=9, **more)) == Joining()


def test_it_is_not_told_so_while_one_that_waits_asks_for_it():
    engine = make(max_num_seqs=2)
    engine.add([1, 2, 3], PLAIN)
    engine.step()
    engine.add([4, 5], SamplingParams(seed=1, max_tokens=9, prompt_logprobs=1))
    engine.add([6, 7], PLAIN)
    engine.step()
    assert engine.scheduler.told[-1] == Joining()
    drain(engine)
    assert engine.queue.table.num_late == engine.queue.table.num_reading == 0


def test_decodes_that_share_a_long_prefix_stay_by_themselves(monkeypatch):
    monkeypatch.setattr("hookline.core.kv_cache.shared_prefix.MIN_SAVED_TOKENS", 64)
    shared = list(range(1, 33))
    prompts = [[*shared, 40 + index] for index in range(4)]
    sizes = {"num_blocks": 200, "max_num_batched_tokens": 512}
    assert told_with_running(PLAIN, prompts, shares_prefixes=True, **sizes) == Joining()
    assert told_with_running(PLAIN, prompts, shares_prefixes=False, **sizes) == JOINING


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_join_get_the_tokens_that_they_get_alone(overlap):
    engine = make(overlap=overlap)
    prompts = [[1 + index] * (3 + index) for index in range(6)]
    outputs = []
    for prompt in prompts:
        engine.add(prompt, PLAIN)
        outputs += [output for _ in range(2) for output in engine.step()]
    outputs += drain(engine)
    joined = [plan for plan in engine.scheduler.plans if plan.prefill and plan.decode is ALL]
    assert len(joined) >= 3
    tokens = {output.request_id: output.token_ids for output in outputs}
    assert tokens == {index: completion(1, prompt, 20, VOCAB_SIZE, [STOP]) for index, prompt in enumerate(prompts)}
