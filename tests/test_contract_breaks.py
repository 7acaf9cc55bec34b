"""What a plugin returns that its contract does not allow is named with its method; looked at once per kind of step."""

import itertools

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.contracts import AttentionForm, Plan, QKNorm, Rope
from hookline.core.errors import CapacityError, EngineError, PlanError, StepFault
from hookline.core.worker.step_checks import StepChecks

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROCESSED = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, repetition_penalty=1.5)
GOES_ON = "The requests of this step have ended, the engine goes on"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(scope="module")
def shared():
    with LLM(device="cpu", engine=dict(num_blocks=50, overlap=True)) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """The engine as if it had computed nothing; what a test puts in place of a method is gone afterwards."""
    runner, worker = shared.engine.executor.runner, shared.engine.executor
    worker._checked.clear()
    parts = [runner.model, runner.kernels, runner.sampler, shared.engine.scheduler]
    before = [dict(part.__dict__) for part in parts]
    yield shared
    for part, attributes in zip(parts, before, strict=True):
        part.__dict__.clear()
        part.__dict__.update(attributes)


def replaced(part, name, change):
    """Have a method return something else."""
    method = getattr(part, name)
    object.__setattr__(part, name, lambda *arguments: change(method(*arguments), *arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tokens_N, *_: tokens_N.unsqueeze(1).repeat(1, 2),
            "it returned shape (2, 2) of int64, not shape (2,) of i",
        ),
        (lambda tokens_N, *_: tokens_N.float(), "it returned shape (2,) of float32, not shape (2,) of int64"),
        (lambda tokens_N, *_: None, "it returned NoneType None, not shape (2,) of int64"),
        (lambda tokens_N, *_: tokens_N + 10**6, "which is outside the vocabulary (0 to "),
        (lambda tokens_N, *_: tokens_N - 10**6, "which is outside the vocabulary (0 to "),
        (lambda tokens_N, logits_NV, _: (logits_NV.fill_(torch.nan), tokens_N)[1], "it wrote to the logits"),
    ],
)
def test_a_sampler_that_breaks_its_contract_is_named(llm, change, message):
    replaced(llm.engine.executor.runner.sampler, "sample", change)
    with pytest.raises(StepFault) as caught:
        llm.generate(PROMPTS, PARAMS)
    assert str(caught.value).startswith("sampler 'gumbel' of plugin 'samplers' (") and message in str(caught.value)
    assert "breaks its contract in sample: " in str(caught.value)
    assert str(caught.value).endswith(f"; the step had 0 decodes and 7 prompt tokens. {GOES_ON}")


def test_a_sampler_is_named_that_draws_a_token_outside_the_vocabulary_later_on(llm):
    llm.generate(PROMPTS, PARAMS)  # every kind of step has been checked
    replaced(llm.engine.executor.runner.sampler, "sample", lambda tokens_N, *_: tokens_N + 10**6)
    with pytest.raises(StepFault) as caught:
        llm.generate(PROMPTS, PARAMS)
    assert str(caught.value).startswith("sampler 'gumbel' of plugin 'samplers' (") and str(caught.value).endswith(
        GOES_ON
    )
    assert "breaks its contract in sample: it drew token id 1000" in str(caught.value)
    assert "which is outside the vocabulary (0 to 4095); the step had 2 decodes" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "name", "change", "message"),
    [
        (
            "kernels",
            "attend",
            lambda out, *_: out[:, 1:],
            "kernels 'torch' of .* contract in attend: it returned shape",
        ),
        ("kernels", "linear", lambda out, *_: out.double(), "contract in linear: .* of float64, not .* of float32"),
        ("kernels", "add_rms_norm", lambda out, *_: out[0], "kernels 'torch' .* in add_rms_norm: .*, not 2 tensors"),
        (
            "model",
            "forward",
            lambda out, *_: out[1:],
            "model 'qwen3' .* in forward: .* not hidden states of 7 or 2 rows",
        ),
        (
            "model",
            "forward",
            lambda out, *_: out[:, 1:],
            "model 'qwen3' .* in forward: .* of 7 or 2 rows of hidden_size=256",
        ),
        ("model", "logits", lambda out, *_: out[:, :9], r"model 'qwen3' .* in logits: .* \(2, 9\) of .* not logits of"),
    ],
)
def test_a_model_or_kernels_of_a_wrong_form_are_named(llm, part, name, change, message):
    replaced(getattr(llm.engine.executor.runner, part), name, change)
    with pytest.raises(StepFault, match=message):
        llm.generate(PROMPTS, PARAMS)


def attending(model, change):
    """Have a model's forward call `attend` with other arguments."""
    forward = model.forward

    def changed(token_ids_T, positions_T, attend):
        def attend_otherwise(*given):
            names = ("layer", "qkv_TC", "rope", "norm", "form")
            named = dict(zip(names, given, strict=False))
            return attend(**named | change(named))

        return forward(token_ids_T, positions_T, attend_otherwise)

    object.__setattr__(model, "forward", changed)


WRONG_CALLS = [
    (
        lambda given: {"qkv_TC": given["qkv_TC"][:, 1:]},
        r"attend\(layer=0\) with qkv_TC of shape \(7, \d+\) of float32, n",
    ),
    (
        lambda given: {"qkv_TC": given["qkv_TC"][1:]},
        r"with qkv_TC of shape \(6, \d+\) of float32, not shape \(7, \d+\)",
    ),
    (lambda given: {"qkv_TC": given["qkv_TC"].double()}, r"with qkv_TC of shape .* of float64, not .* of float32"),
    (lambda given: {"rope": given["rope"].table_PE}, r"with rope shape \(\d+, \d+\) of float32, not a Rope or None"),
    (
        lambda given: {"rope": Rope(given["rope"].table_PE[:9])},
        "rope.table_PE of 9 positions, fewer than max_model_len",
    ),
    (lambda given: {"rope": Rope(given["rope"].table_PE.double())}, "of float64, not a table"),
    (lambda given: {"rope": Rope(given["rope"].table_PE[:, 1:])}, "not of an even number of columns up to head_dim="),
    (lambda given: {"norm": torch.ones(8)}, r"with norm shape \(8,\) of float32, not a QKNorm or None"),
    (lambda given: {"norm": QKNorm(torch.ones(1), torch.ones(1), 1e-6)}, r"norm.q_weight_E of shape \(1,\) of float32"),
    (lambda given: {"form": 0.5}, "with form float 0.5, not an AttentionForm"),
    (lambda given: {"form": AttentionForm(scale=0.5)}, "with a form that has scale, which its spec.attention does not"),
    (lambda given: {"layer": 99}, "attend for layer 99; by its spec it has layers 0 to "),
    (lambda given: {"layer": -1}, "attend for layer -1; by its spec it has layers 0 to "),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CALLS)
def test_a_model_is_named_for_what_it_gives_to_attend_and_kernels_are_not(llm, change, message):
    attending(llm.engine.executor.runner.model, change)
    with pytest.raises(StepFault, match=f"^model 'qwen3' .* breaks its contract in forward: it called .*{message}"):
        llm.generate(PROMPTS, PARAMS)


def test_a_model_is_named_that_asks_for_a_state_which_its_layer_does_not_keep(llm):
    model = llm.engine.executor.runner.model
    object.__setattr__(model, "forward", lambda token_ids_T, positions_T, attend: attend.states(0))
    with pytest.raises(
        StepFault, match=r"^model 'qwen3' .* in forward: it called attend.states for layer 0, which keeps n"
    ):
        llm.generate(PROMPTS, PARAMS)


def test_the_largest_step_that_a_start_computes_for_its_memory_is_checked_already(llm):
    attending(llm.engine.executor.runner.model, WRONG_CALLS[0][0])
    with pytest.raises(StepFault, match=r"^model 'qwen3' .* breaks its contract in forward: it called attend"):
        llm.engine.executor.profile_run(llm.engine.executor.runner.kernels.spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits_NV, *_: logits_NV[:, 1:], "it returned shape (2, 4095) of float32, not shape (2, 4096)"),
        (lambda logits_NV, *_: logits_NV[:1], "it returned shape (1, 4096) of float32, not shape (2, 4096)"),
        (lambda logits_NV, *_: logits_NV.long(), "it returned shape (2, 4096) of int64, not shape (2, 4096)"),
        (lambda logits_NV, *_: logits_NV * torch.nan, "it made a logit NaN"),
    ],
)
def test_a_processor_that_breaks_its_contract_ends_its_request_alone(llm, change, message):
    plain = llm.generate(PROMPTS[1:], PARAMS)[0].token_ids
    llm.generate(PROMPTS[:1], PROCESSED)
    llm.engine.executor._checked.clear()
    (made,) = [
        one.extension
        for one in llm.engine.executor.runner.extensions._made.values()
        if one.stage.entry.name == "penalties"
    ]
    params = [PROCESSED, PARAMS]
    replaced(made, "process", lambda logits_NV, *others: change(logits_NV, *others))
    broken, done = llm.generate(PROMPTS, params)
    del made.process
    assert done.token_ids == plain and broken.finish_reason.value == "error"
    assert (
        "processor 'penalties' of plugin 'samplers' (" in broken.error
        and "breaks its contract in process" in broken.error
        and message in broken.error
    )


def test_after_the_first_step_of_a_kind_no_value_is_looked_at(llm, monkeypatch):
    llm.generate(PROMPTS, [PROCESSED, PARAMS])
    for name in ("inside", "sampling", "kernels", "attended", "hidden"):
        monkeypatch.delattr(StepChecks, name)
    assert all(len(output.token_ids) == 3 for output in llm.generate(PROMPTS, [PROCESSED, PARAMS]))


@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        ("sampler", "sample", lambda tokens_N: tokens_N.tolist()),
        ("sampler", "sample", lambda tokens_N: tokens_N.int()),
        ("sampler", "sample", lambda tokens_N: tokens_N[:1]),
        ("model", "logits", lambda logits_NV: logits_NV.tolist()),
    ],
)
def test_a_wrong_form_is_named_in_a_later_step_too(llm, part, name, change):
    llm.generate(PROMPTS, PARAMS)
    replaced(getattr(llm.engine.executor.runner, part), name, lambda found, *_: change(found))
    with pytest.raises(StepFault, match=f"^{part} '.*' of plugin .* breaks its contract in {name}: it re") as caught:
        llm.generate(PROMPTS, PARAMS)
    assert len(str(caught.value).splitlines()) == 1


def test_a_processor_of_a_wrong_form_is_named_in_a_later_step_too(llm):
    llm.generate(PROMPTS, PROCESSED)
    extensions = llm.engine.executor.runner.extensions
    (made,) = [one.extension for one in extensions._made.values() if one.stage.entry.name == "penalties"]
    replaced(made, "process", lambda logits_NV, *_: logits_NV.tolist())
    broken, done = llm.generate(PROMPTS, [PROCESSED, PARAMS])
    del made.process
    assert "processor 'penalties' of plugin 'samplers' (" in broken.error and len(done.token_ids) == 3


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"logprobs": 2},
        {"repetition_penalty": 1.5, "logprobs": 1},
        {"allowed_token_ids": range(10)},
        {"structured_outputs": {"regex": "[ab]+"}},
    ],
    ids=["plain", "truncated", "scored", "penalized", "allowed", "grammar"],
)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_request_whose_logits_are_nan_ends_with_an_error_and_the_others_go_on(llm, wanted, is_checked):
    if "structured_outputs" in wanted:
        pytest.importorskip("llguidance")
    prompts = ["abc", "de"]
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, "seed": 3, **wanted})
    plain = llm.generate(prompts, params)
    for number in range(3):
        if is_checked:
            llm.engine.executor._checked.clear()
        count = itertools.count()

        def without_first(logits_NV, *_, number=number, count=count):
            if next(count) == number:
                logits_NV[0] = torch.nan
            return logits_NV

        replaced(llm.engine.executor.runner.model, "logits", without_first)
        broken, done = llm.generate(prompts, params)
        del llm.engine.executor.runner.model.__dict__["logits"]
        assert broken.finish_reason.value == "error" and broken.is_fault and done.token_ids == plain[1].token_ids
        assert broken.token_ids == plain[0].token_ids[:number]
        assert broken.logprobs is None or len(broken.logprobs) == number
        assert "model 'qwen3' of plugin 'models' (" in broken.error
        assert "fails in logits: they are NaN, so that sampler 'gumbel' of plugin 'samplers' (" in broken.error
        assert "draws no token; kernels 'torch' of plugin 'kernels' (" in broken.error


@pytest.mark.parametrize("part", ["decode", "preempt"])
def test_a_plan_without_an_end_is_refused(llm, part):
    llm.engine.scheduler.plan = lambda view: Plan(**{part: itertools.count()})
    rule = r"names more requests in (decode|preempt) than the 2 that there are|names req"
    with pytest.raises(
        PlanError, match=rf"^scheduler 'prefill_first' of plugin 'schedulers' \(hookline [\d.]+\) ({rule})"
    ):
        llm.generate(PROMPTS, PARAMS)


def no_memory(*arguments):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


def test_a_step_without_memory_ends_its_requests_and_the_engine_goes_on(llm):
    expected = llm.generate(PROMPTS, PARAMS)
    object.__setattr__(llm.engine.executor.runner.model, "forward", no_memory)
    with pytest.raises(CapacityError) as caught:
        llm.generate(PROMPTS, PARAMS)
    assert str(caught.value) == (
        "out of memory in a step of 0 decodes and 7 prompt tokens: RuntimeError: [enforce fail at alloc_cpu.cpp:127] "
        "DefaultCPUAllocator: can't allocate memory; lower engine.max_num_batched_tokens, engine.max_num_seqs or "
        "engine.memory_fraction. The requests of this step have ended, the engine goes on"
    )
    del llm.engine.executor.runner.model.forward
    assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == [one.token_ids for one in expected]


def test_a_processor_without_memory_ends_its_requests_alone(llm, monkeypatch):
    expected = llm.generate(PROMPTS, PARAMS)
    (index,) = [n for n, one in enumerate(llm.engine.limits.extensions.stages) if one.entry.name == "penalties"]
    processor = llm.engine.executor.runner.extensions.extension(index).extension
    monkeypatch.setattr(processor, "process", no_memory)
    broken, done = llm.generate(PROMPTS, [PROCESSED, PARAMS])
    assert "processor 'penalties' of plugin" in broken.error and "can't allocate memory" in broken.error
    assert done.token_ids == expected[1].token_ids


def test_after_a_device_was_lost_every_call_gets_the_same_error(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.executor, "failure", "an illegal memory access; the engine has ended")
    for _ in range(2):
        with pytest.raises(EngineError, match="an illegal memory access; the engine has ended"):
            llm.generate(PROMPTS, PARAMS)
        assert not llm.engine.has_work
