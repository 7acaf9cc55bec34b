"""Whatever a plugin on the host does wrong in one call: it is named, everybody else is served, the engine whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.contracts import Observer, StructuredOutputs
from hookline.core.errors import HooklineError
from hookline.core.outputs import FinishReason
from hookline.core.plugin.registry import GRAMMARS, PROCESSOR, Entry, Origin
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.requests.structured_output import GrammarChoice, StructuredOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, completion, fake_engine, watched_by
from hookline.core.testing.plain_grammar import PlainGrammar, PlainGrammars, PlainMatcher, small_vocabulary
from hookline.core.testing.plain_scheduler import PlainScheduler
from tests.core.faulty_processors import PlainProcessor, PlainProcessorArguments
from tests.fuzzing import examples
from tests.misbehaviour import misbehaviours

VOCABULARY = small_vocabulary()
VOCAB_SIZE, STOP = len(VOCABULARY.tokens), min(VOCABULARY.stop_ids)
ORIGIN = Origin("theirs", "m", "their-dist", "1")
NAMES = ("of plugin 'theirs'", "scheduler 'theirs'", "observer 'Watches'", "Watches")
TEXTS = ("yes", "no", "\n\n cc")
MAX_STEPS = 200
ON_TOKEN, MATCHER = "processor.on_token", "grammar.matcher"


class Follows(PlainProcessor):
    """Adds nothing to any logit, and follows tokens."""

    @staticmethod
    def num_draws(arguments, request):
        return None

    @staticmethod
    def encode(arguments, request):
        return ()

    @staticmethod
    def start(arguments, request):
        return []

    @staticmethod
    def on_token(state, token_id, logprob):
        state.append(token_id)


class Watches(Observer):
    """An observer of everything."""

    def __init__(self):
        pass

    def on_step_end(self, stats):
        pass

    def on_request_begin(self, info):
        pass

    def on_first_token(self, info, first_token_s):
        pass

    def on_token_gaps(self, gaps_s):
        pass

    def on_request_end(self, output):
        pass


class Schedules(PlainScheduler):
    def committed(self, step):
        pass


PLACES = {
    "scheduler.plan": Schedules,
    "scheduler.committed": Schedules,
    "backend.compile": PlainGrammars,
    MATCHER: PlainGrammar,
    "matcher.fill": PlainMatcher,
    "matcher.advance": PlainMatcher,
    "processor.num_draws": Follows,
    "processor.encode": Follows,
    "processor.start": Follows,
    ON_TOKEN: Follows,
    "observer.on_step_end": Watches,
    "observer.on_request_begin": Watches,
    "observer.on_first_token": Watches,
    "observer.on_token_gaps": Watches,
    "observer.on_request_end": Watches,
}


def make_engine(overlap):
    def entry(kind, name, target, **options):
        return Entry(kind, name, f"{__name__}:{target}", ORIGIN, **options)

    backend = Entry(GRAMMARS, "theirs", "hookline.core.testing.plain_grammar:PlainGrammars", ORIGIN)
    grammars = StructuredOutput(lambda: GrammarChoice(backend), VOCAB_SIZE, vocabulary=lambda: VOCABULARY)
    follower = entry(PROCESSOR, "follows", "Follows", config=PlainProcessorArguments)
    options = {
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [STOP],
        "overlap": overlap,
        "observers": watched_by(Watches()),
    }
    engine = fake_engine(Schedules(), policy="theirs", late=grammars, **options)
    object.__setattr__(engine.limits, "extensions", InstalledExtensions.of([follower]))
    return engine


def requests():
    """Prompts with parameters: plain ones, one that is followed and some with grammars."""
    yield [1, 2], SamplingParams(seed=1, max_tokens=7)
    yield [3], SamplingParams(seed=2, max_tokens=5, extra_args={"follows": {"amount": 1.0}})
    yield [4, 3], SamplingParams(seed=3, max_tokens=9, structured_outputs=StructuredOutputs(choice=TEXTS))
    yield [5] * 9, SamplingParams(seed=5, max_tokens=4)


def names_a_plugin(line):
    assert any(name in line for name in NAMES), f"no plugin is named: {line[:300]}"
    assert len(line) < 4000 and "Traceback" not in line


def served(engine):
    """All outputs, by the order of the requests; errors that leave the engine must name the plugin."""
    outputs, ids = {}, {}
    for index, (prompt, params) in enumerate(requests()):
        try:
            ids[engine.add(prompt, params)] = index
        except HooklineError as error:
            names_a_plugin(str(error))
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        try:
            ended = engine.step()
        except HooklineError as error:
            names_a_plugin(str(error))
            continue
        finally:
            check_engine(engine)
        outputs |= {ids[output.request_id]: output for output in ended if output.request_id in ids}
    assert not engine.has_work, "a request never ends"
    return outputs


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(overlap=st.booleans(), place=st.sampled_from(sorted(PLACES)), wrong=misbehaviours())
def test_whatever_a_plugin_does_in_one_call_the_others_are_served_and_it_is_named(overlap, place, wrong):
    cls, name = PLACES[place], place.partition(".")[2]
    before = vars(cls).get(name)
    method = wrong.around(before.__func__ if isinstance(before, staticmethod) else getattr(cls, name))
    setattr(cls, name, staticmethod(method) if isinstance(before, staticmethod) else method)
    engine = make_engine(overlap)
    try:
        outputs = served(engine)
    finally:
        if before is None:
            delattr(cls, name)
        else:
            setattr(cls, name, before)
    for output in outputs.values():
        if output.finish_reason is FinishReason.ERROR:
            names_a_plugin(output.error)
    if not place.startswith("scheduler."):
        for index, (prompt, params) in enumerate(requests()):
            if params.structured_outputs is None and not params.extra_args:
                wanted = completion(params.seed, prompt, params.max_tokens, VOCAB_SIZE, [STOP])
                assert outputs[index].token_ids == wanted, "another request got other tokens"
    id_ = engine.add([8, 9], SamplingParams(seed=8, max_tokens=3))
    found = {output.request_id: output for _ in range(9) for output in engine.step()}
    assert found[id_].token_ids == completion(8, [8, 9], 3, VOCAB_SIZE, [STOP])
    engine.state.late.close()
