"""Whatever models, kernels, samplers and processors do wrong in one call of a step: named, and the engine goes on."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hookline import LLM, SamplingParams
from hookline.core.errors import HooklineError
from tests.fuzzing import examples
from tests.hf_models import QWEN3
from tests.misbehaviour import ACTS, Misbehaviour

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
PLAIN = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PENALISED = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, repetition_penalty=1.5)
PLACES = [
    ("model", "forward"),
    ("model", "logits"),
    ("kernels", "prepare"),
    ("kernels", "rms_norm"),
    ("kernels", "add_rms_norm"),
    ("kernels", "linear"),
    ("kernels", "attend"),
    ("sampler", "sample"),
    ("processor", "process"),
    ("processor", "load"),
]


def _of_first_tensor(change):
    def act(result, *arguments):
        return type(result)(map(change, result)) if isinstance(result, tuple | list) else change(result)

    return act


TENSOR_ACTS = {
    "a row too few": _of_first_tensor(lambda one: one[1:]),
    "a column too many": _of_first_tensor(lambda one: torch.cat([one, one[..., :1]], dim=-1)),
    "doubles": _of_first_tensor(lambda one: one.double()),
    "no axis": _of_first_tensor(lambda one: one.sum()),
    "far off": _of_first_tensor(lambda one: one + 10**6),
}
"""What may be wrong with a tensor; the same for None, which some calls return, is an error of the test's own act."""


MODEL = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": QWEN3}


def tokens(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, [PENALISED, PLAIN])]


@pytest.fixture(scope="module")
def llm():
    sizes = dict(num_blocks=50, overlap=True, max_num_seqs=4, max_model_len=64, prefix_caching=False)
    with LLM(model=MODEL, device="cpu", engine=sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(llm):
    return tokens(llm)


def part_of(llm, name):
    runner = llm.engine.executor.runner
    if name != "processor":
        return getattr(runner, name)
    made = runner.extensions._made.values()
    return next(one.extension for one in made if one.stage.entry.name == "penalties")


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(
    place=st.sampled_from(PLACES),
    act=st.sampled_from(sorted({*ACTS, *TENSOR_ACTS} - {"change its input"})),  # which may be the weights
    call=st.integers(0, 9),
    is_first=st.booleans(),
)
def test_whatever_a_plugin_does_in_one_call_of_a_step_it_is_named_and_the_engine_goes_on(
    llm, wanted, place, act, call, is_first
):
    """What is returned is looked at in the first step of a kind: later, a wrong form is an error of any sort."""
    is_looked_at = is_first and call == 0
    assume(act != "far off" or (is_looked_at and place[0] == "sampler"))  # else it overflows, or nobody looks at it
    part, name = part_of(llm, place[0]), place[1]
    if is_first:
        llm.engine.executor._checked.clear()
    wrong = Misbehaviour(act, call, acts={**ACTS, **TENSOR_ACTS})
    object.__setattr__(part, name, wrong.within(part, name))
    try:
        lines = [output.error for output in llm.generate(PROMPTS, [PENALISED, PLAIN]) if output.error]
    except HooklineError as error:
        lines = [str(error)]
    except Exception:
        if is_looked_at:
            raise
        lines = []
    finally:
        del part.__dict__[name]
    for line in lines:
        assert " of plugin '" in line and len(line) < 4000 and "\n" not in line and "Traceback" not in line
    assert tokens(llm) == wanted, f"{act} in call {call} of {place} left its traces, looked at: {is_looked_at}"
