"""A plugin that calls sys.exit(0), or raises anything else, has failed: one line that names it, and exit code 2."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.bench import command as core_bench
from hookline.core.cli.command import guarded
from hookline.core.errors import HooklineError, PlanError, PluginError, PluginFault, RankError, RequestError
from hookline.core.info import command as core_info
from hookline.core.run.command import main
from hookline.core.simulate import command as core_simulate
from hookline.core.sweep.results import read_results
from tests.faulty_exit import RANK_0, VARIABLE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
ORIGIN = "of plugin 'tests.faulty_exit' (HOOKLINE_PLUGINS -)"
OPTIONS = ["device=cpu", "scheduler=faulty", "sampler=faulty", "model=faulty", "kernels=faulty", "observers=[faulty]"]
RUN = [
    *OPTIONS,
    "scheduler.wait_ms=2",
    "prompt=import os",
    "sampling.max_tokens=3",
    "+sampling.extra_args.faulty.amount=1.0",
]
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
PROCESSED = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={"faulty": {"amount": 1.0}})
PLACES = {
    "scheduler.config": f"scheduler 'faulty' {ORIGIN} fails while its fields are checked",
    "scheduler.__init__": f"scheduler 'faulty' {ORIGIN} fails in __init__ while starting",
    "sampler.__init__": f"sampler 'faulty' {ORIGIN} fails in __init__ while starting",
    "model.__init__": f"model 'faulty' {ORIGIN} fails in __init__ while starting",
    "model.spec": f"model 'faulty' {ORIGIN} fails in spec while starting",
    "model.weight_targets": f"model 'faulty' {ORIGIN} fails in weight_targets while starting",
    "kernels.__init__": f"kernels 'faulty' {ORIGIN} fails in __init__ while starting",
    "observer.__init__": f"observer 'faulty' {ORIGIN} fails in __init__",
    "observer.on_engine_start": f"on_engine_start of observer 'faulty' {ORIGIN} raised",
    "scheduler.plan": f"scheduler 'faulty' {ORIGIN} fails in plan",
    "model.forward": f"model 'faulty' {ORIGIN} fails in forward during a step",
    "kernels.attend": f"kernels 'faulty' {ORIGIN} fails in attend during a step",
    "sampler.sample": f"sampler 'faulty' {ORIGIN} fails in sample during a step",
    "processor.__init__": f"processor 'faulty' {ORIGIN} fails in __init__ during a step",
    "processor.load": f"processor 'faulty' {ORIGIN} fails in load during a step",
    "processor.process": f"processor 'faulty' {ORIGIN} fails in process during a step",
    "processor.config": f"processor 'faulty' {ORIGIN} fails while a request's arguments are prepared",
    "observer.on_step_end": f"on_step_end of observer 'faulty' {ORIGIN} raised",
    "observer.on_request_end": f"on_request_end of observer 'faulty' {ORIGIN} raised",
    "observer.on_engine_stop": f"on_engine_stop of observer 'faulty' {ORIGIN} raised",
}
OF_ONE_REQUEST = {"processor.__init__", "processor.load", "processor.process"}
AFTERWARDS = {"observer.on_step_end", "observer.on_request_end", "observer.on_engine_stop"}
"""Where an exit is reported when all requests are done."""


@pytest.fixture(autouse=True)
def faulty(monkeypatch, tmp_path):
    """Sets where a plugin raises what, and forgets it, for plugins are imported once."""
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_exit")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(RANK_0, str(os.getpid()))
    monkeypatch.chdir(tmp_path)
    yield lambda what: monkeypatch.setenv(VARIABLE, what)
    for name in [name for name in sys.modules if name.startswith("tests.faulty_exit")]:
        del sys.modules[name]


def make(kind=LLM, engine=None, **options):
    chosen = dict.fromkeys(("model", "scheduler", "sampler", "kernels"), "faulty")
    return kind(device="cpu", engine=dict(num_blocks=50, **(engine or {})), **{**chosen, **options})


def error_line(capsys):
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    errors = [line for line in shown.err.splitlines() if line.startswith("hookline: error: ")]
    assert len(errors) == 1 and shown.err.splitlines()[-1] == errors[0]
    return errors[0].removeprefix("hookline: error: ")


def failure_line(capsys):
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and "error:" not in shown
    return shown.splitlines()[-1].partition("request 1/1 failed: request 0: ")[2]


@pytest.mark.parametrize("place", PLACES)
def test_a_plugin_that_exits_is_no_success(place, faulty, capsys):
    faulty(f"{place}:exit")
    assert main([*RUN, "output=out.jsonl"]) == 2
    line = failure_line(capsys) if place in OF_ONE_REQUEST else error_line(capsys)
    assert line.startswith(PLACES[place]) and "SystemExit: 0" in line
    assert Path("out.jsonl").exists() == (place in OF_ONE_REQUEST or place in AFTERWARDS)


@pytest.mark.parametrize("error", ["GeneratorExit", "CancelledError", "StopIteration", "Own", "ValueError"])
@pytest.mark.parametrize(
    "place", ["scheduler.plan", "kernels.attend", "observer.on_step_end", "observer.__init__", "model.spec"]
)
def test_whatever_a_plugin_raises_is_one_line(place, error, faulty, capsys):
    faulty(f"{place}:{error}")
    assert main(RUN) == 2
    line = error_line(capsys)
    assert line.startswith(PLACES[place]) and f"{error}: on purpose" in line


@pytest.mark.parametrize(
    "place", ["scheduler.config", "model.spec", "scheduler.plan", "sampler.sample", "observer.on_step_end"]
)
def test_an_interrupt_in_a_plugin_is_the_users(place, faulty, capsys):
    faulty(f"{place}:KeyboardInterrupt")
    assert main(RUN) == 130
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == "hookline: interrupted" and "Traceback" not in shown


@pytest.mark.parametrize("place", ["processor.num_draws", "processor.encode"])
def test_a_processor_that_exits_on_arrival_ends_that_request_alone(place, faulty):
    with make() as llm:
        faulty(f"{place}:exit")
        refused, done = llm.generate([[1, 2], [1, 2]], [PROCESSED, PARAMS])
    assert refused.finish_reason.value == "error" and len(done.token_ids) == 3
    method = place.partition(".")[2]
    named = f"processor 'faulty' {ORIGIN} fails in {method} while a request's arguments are prepared: SystemExit: 0"
    assert refused.error.startswith(named)


def test_a_refusal_of_a_processor_stays_as_it_said_it(monkeypatch):
    from tests.faulty_exit_options import Processor

    def refuse(arguments, request):
        raise RequestError("not like this")

    with make() as llm:
        monkeypatch.setattr(Processor, "encode", staticmethod(refuse))
        assert llm.generate([[1, 2]], PROCESSED)[0].error == "not like this"


def test_the_caller_whose_processor_exits_hears_it_and_the_others_go_on(faulty):
    async def check(llm):
        faulty("processor.encode:exit")
        both = [llm.generate([1, 2], PROCESSED), llm.generate([1, 2], PARAMS)]
        refused, done = await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 60)
        assert type(refused) is PluginFault and ORIGIN in str(refused)
        assert len(done.token_ids) == 3
        await llm.aclose()

    asyncio.run(check(make(AsyncLLM)))


def test_everybody_who_waits_hears_of_a_step_that_a_plugin_ends(faulty):
    async def check(llm):
        faulty("sampler.sample:exit")
        both = [llm.generate([1, 2], PARAMS), llm.generate([3], PARAMS)]
        for error in await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 60):
            assert isinstance(error, HooklineError) and PLACES["sampler.sample"] in str(error)
        faulty("")
        assert len((await asyncio.wait_for(llm.generate([1, 2], PARAMS), 60)).token_ids) == 3
        await llm.aclose()

    asyncio.run(check(make(AsyncLLM)))


@pytest.mark.parametrize(("place", "kind"), [("sampler.sample", PluginError), ("scheduler.plan", PlanError)])
def test_a_caller_gets_a_plugin_error_with_its_cause_and_the_engine_goes_on(place, kind, faulty):
    with make() as llm:
        faulty(f"{place}:ValueError")
        with pytest.raises(kind) as caught:
            llm.generate([[1, 2], [3]], PARAMS)
        assert isinstance(caught.value, PluginError) and isinstance(caught.value.__cause__, ValueError)
        assert not llm.engine.has_work
        faulty("")
        assert len(llm.generate([[1, 2]], PARAMS)[0].token_ids) == 3


def test_what_is_raised_while_text_is_streamed_is_the_plugins_too(faulty):
    with make() as llm:
        faulty("kernels.attend:GeneratorExit")
        with pytest.raises(PluginError, match=r"kernels 'faulty' .* fails in attend during a step"):
            list(llm.stream([[1, 2]], PARAMS))


def test_kernels_of_a_wrong_shape_are_named_with_the_step_in_one_line(faulty, capsys):
    faulty("kernels.silu_mul:ValueError")
    assert main(RUN) == 2
    line = error_line(capsys)
    assert line.startswith(f"kernels 'faulty' {ORIGIN} breaks its contract in silu_mul: it returned shape (")
    assert " of float32; the step had 0 decodes and 2 prompt tokens. The requests of this step have ended" in line


def test_the_traceback_is_printed_when_it_is_asked_for(faulty, monkeypatch, capsys):
    monkeypatch.setenv("HOOKLINE_TRACEBACK", "1")
    faulty("kernels.attend:ValueError")
    assert main(RUN) == 2
    shown = capsys.readouterr().err
    assert "ValueError: on purpose\n\nThe above exception was the direct cause" in shown and "in helper\n" in shown
    assert shown.splitlines()[-1].startswith(f"hookline: error: {PLACES['kernels.attend']}")


def test_an_exit_that_nobody_knows_the_origin_of_is_no_success(capsys):
    assert guarded(lambda arguments: sys.exit(0), []) == 2
    assert error_line(capsys).startswith("something ended the process from within: SystemExit: 0 (")


def test_an_option_whose_module_exits_cannot_be_loaded(capsys):
    assert main([*RUN, "scheduler=unloadable"]) == 2
    assert error_line(capsys) == (
        f"scheduler 'unloadable' {ORIGIN} cannot be loaded from tests.faulty_exit_module:Nothing: "
        "SystemExit: 0 (faulty_exit_module.py:3)"
    )


@pytest.mark.parametrize("error", ["exit", "GeneratorExit", "CancelledError", "Own"])
@pytest.mark.parametrize("place", ["import", "register"])
def test_a_plugin_that_exits_while_it_is_loaded_stops_nobody_else(place, error, faulty, capsys):
    faulty(f"{place}:{error}")
    sys.modules.pop("tests.faulty_exit", None)
    assert main(["device=cpu", "prompt=import os", "sampling.max_tokens=1"]) == 0
    assert "hookline: not loaded: plugin 'tests.faulty_exit' (HOOKLINE_PLUGINS -): " in capsys.readouterr().err


@pytest.mark.parametrize("command", [core_bench, core_simulate], ids=["bench", "simulate"])
@pytest.mark.parametrize("place", ["scheduler.__init__", "scheduler.plan", "observer.on_step_end"])
def test_benchmarks_and_simulations_say_it_too(command, place, faulty, capsys):
    faulty(f"{place}:exit")
    options = ["scheduler=faulty", "observers=[faulty]", "workload=smoke", "repeats=1", "engine.num_blocks=64"]
    assert command.main(options) == 2
    assert error_line(capsys).startswith(PLACES[place])


@pytest.mark.parametrize("place", ["import", "register"])
def test_info_lists_a_plugin_that_exits_among_the_problems(place, faulty, capsys):
    faulty(f"{place}:GeneratorExit")
    sys.modules.pop("tests.faulty_exit", None)
    assert core_info.main([]) == 0
    assert "tests.faulty_exit (HOOKLINE_PLUGINS -), " in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--help"], ["--hydra-help"], ["--version"], ["--cfg", "job"]])
def test_who_asks_hydra_to_show_something_has_success(flags, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # --hydra-help adds one, to the standard error of this test
    assert main(flags) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("place", ["sampler.sample", "model.weight_targets"])
def test_with_several_ranks_it_is_named_all_the_same(place, faulty, capsys):
    faulty(f"{place}:exit")
    assert main([*RUN, "tp=2", "engine.num_blocks=50"]) == 2
    shown = capsys.readouterr().err
    assert PLACES[place] in shown.splitlines()[-1] and "SystemExit: 0" in shown.splitlines()[-1]


@pytest.mark.parametrize("place", ["model.forward", "model.weight_targets"])
def test_another_rank_that_exits_has_not_ended_well(place, faulty, capfd):
    faulty(f"{place}:exit:1")
    with pytest.raises(RankError) as caught:
        with make(tp=2) as llm:
            llm.generate([[1, 2]], PARAMS)
    message = str(caught.value)
    kind = "StepFault" if place == "model.forward" else "PluginError"
    assert message.startswith("rank 1 of 2 (pid ") and f"{kind}: {PLACES[place]}" in message
    assert "SystemExit: 0" in message and "in act\n" not in capfd.readouterr().err


@pytest.mark.usefixtures("ranks_are_forked")
def test_an_error_of_rank_0s_plugin_is_the_callers_and_ends_the_others(faulty):
    faulty("model.forward:exit:0")
    with make(tp=2) as llm:
        with pytest.raises(PluginError, match=r"model 'faulty' .* fails in forward during a step") as caught:
            llm.generate([[1, 2]], PARAMS)
        assert isinstance(caught.value.__cause__, SystemExit)
        with pytest.raises(RankError, match=r"rank 0 \(this process\) broke off a step: StepFault: model 'faulty'"):
            llm.generate([[1, 2]], PARAMS)


@pytest.mark.parametrize("error", [pytest.param("exit", marks=pytest.mark.nightly), "_exit"])
def test_jobs_whose_plugin_exits_have_failed(error, faulty, tmp_path):
    faulty(f"scheduler.plan:{error}")
    command = [sys.executable, "-m", "core.run", *RUN, "-m", "seed=1,2", "hydra.sweep.dir=swept"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and "0 of 2 jobs succeeded" in done.stderr and "Traceback" not in done.stderr
    for record in read_results(tmp_path / "swept"):
        assert record["status"] == "failed"
        if error == "exit":
            assert record["error"].startswith(PLACES["scheduler.plan"])
        else:
            assert record["error"] == "exit code 0, but it wrote no output.jsonl"


@pytest.mark.parametrize("place", ["processor.__init__", "processor.load", "processor.process"])
@pytest.mark.parametrize(
    "engine", [{}, {"overlap": True}, {"max_num_batched_tokens": 4, "max_num_seqs": 4, "overlap": True}]
)
def test_of_three_requests_the_one_whose_processor_raises_ends_alone(place, engine, faulty):
    prompts, params = [[1, 2, 3], list(range(9)), [7] * 6], [PARAMS, PROCESSED, PARAMS]
    with make(engine=engine) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, PARAMS)]
        faulty(f"{place}:ValueError")
        first, ended, last = llm.generate(prompts, params)
        assert [first.token_ids, last.token_ids] == expected[::2]
        assert ended.finish_reason.value == "error"
        named = f"request {ended.request_id}: {PLACES[place]}: ValueError: on purpose ("
        assert ended.error.startswith(named) and "\n" not in ended.error
        faulty("")
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected


def test_completions_of_one_prompt_end_by_a_processor_and_say_so(faulty):
    with make() as llm:
        faulty("processor.process:ValueError")
        (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, n=2, extra_args={"faulty": {"amount": 1.0}}))
        assert [one.finish_reason.value for one in output.completions] == ["error", "error"]
        assert not llm.engine.has_work


def test_the_caller_whose_processor_raises_in_a_step_gets_it_as_its_end(faulty):
    async def check(llm):
        faulty("processor.process:ValueError")
        broken, done = await asyncio.wait_for(
            asyncio.gather(llm.generate([1, 2], PROCESSED), llm.generate([1, 2], PARAMS)), 60
        )
        assert broken.finish_reason.value == "error" and PLACES["processor.process"] in broken.error
        assert len(done.token_ids) == 3
        await llm.aclose()

    asyncio.run(check(make(AsyncLLM)))


def test_a_request_that_waits_is_served_after_a_step_that_a_sampler_lost(faulty):
    async def check(llm):
        engine = llm.llm.engine
        launch = engine.executor.launch

        def fail_once(step):
            faulty("sampler.sample:ValueError")
            try:
                return launch(step)
            finally:
                faulty("")
                engine.executor.launch = launch

        engine.executor.launch = fail_once
        calls = [llm.generate([1, 2, number], PARAMS) for number in range(4)]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        broken = [one for one in results if isinstance(one, HooklineError)]
        assert len(broken) == 1 and PLACES["sampler.sample"] in str(broken[0])
        assert "the step had 0 decodes and 3 prompt tokens" in str(broken[0])
        assert all(len(one.token_ids) == 3 for one in results if one not in broken)
        await llm.aclose()

    asyncio.run(check(make(AsyncLLM, engine=dict(max_num_seqs=1))))


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_over_several_ranks_a_processor_that_fails_on_all_of_them_ends_its_request_alone(faulty):
    prompts, params = [[1, 2, 3], list(range(9)), [7] * 6], [PARAMS, PROCESSED, PARAMS]
    faulty("processor.process:ValueError")
    with make(tp=2, engine={"overlap": True}) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, PARAMS)]
        for _ in range(2):
            first, ended, last = llm.generate(prompts, params)
            assert [first.token_ids, last.token_ids] == expected[::2]
            assert ended.finish_reason.value == "error" and PLACES["processor.process"] in ended.error


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("place", ["processor.load", "processor.process"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_processor_that_fails_on_one_rank_alone_ends_the_engine(place, rank, faulty):
    faulty(f"{place}:ValueError:{rank}")
    with make(tp=2, engine={"step_timeout_s": 3.0}) as llm:
        for _ in range(2):
            with pytest.raises(RankError) as caught:
                llm.generate([[1, 2, 3], [4, 5]], [PROCESSED, PARAMS])
            assert str(caught.value).startswith(f"rank {rank} of 2 (") and " alone failed in a step: " in str(
                caught.value
            )
            assert f"{PLACES[place]}: ValueError: on purpose (" in str(caught.value)
            assert str(caught.value).endswith("The engine has ended; make a new one")


def test_an_observer_that_was_switched_off_does_not_hide_what_ends_the_block(faulty, caplog):
    faulty("observer.on_step_end:ValueError")
    with pytest.raises(ZeroDivisionError), make(observers=["faulty"]) as llm:
        assert [len(output.token_ids) for output in llm.generate([[1], [2], [3]], PARAMS)] == [3, 3, 3]
        _ = 1 / 0
    switched_off = f"observer 'faulty' {ORIGIN} is switched off, the engine goes on"
    assert f"{switched_off}: {PLACES['observer.on_step_end']}" in caplog.text
