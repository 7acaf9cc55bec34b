"""A rank that dies, raises, stops or hangs ends the engine with an error that names it; no process is left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.assembly import engine as assembly_engine
from hookline.core.errors import ConfigError, EngineError, HooklineError, PluginError, RankError
from hookline.core.executor.monitor import Monitor
from tests.faulty_rank import VARIABLE
from tests.faulty_rank_model import SLOW_S
from tests.hf_models import make_qwen3

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def make(folder, monkeypatch):
    """An engine of which one rank is faulty."""
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_rank")
    monkeypatch.chdir(ROOT)

    def make(fault, tp=2, kind=LLM, pp=1, **engine):
        monkeypatch.setenv(VARIABLE, fault)
        return kind(folder, model="faulty", device="cpu", tp=tp, pp=pp, engine=dict(num_blocks=50, **engine))

    return make


def assert_gone(processes):
    assert all(process.poll() is not None for process in processes)


# Ranks as users start them, down to the first test with ranks_are_forked: a fork may fail before rank 0 does.
@pytest.mark.parametrize(
    ("fault", "tp", "engine", "message"),
    [
        ("1:3:SIGKILL", 2, {}, r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL, as the system does"),
        (
            "2:3:raise",
            4,
            {},
            r"rank 2 of 4 \(pid \d+\) failed: StepFault: model 'faulty' of .* ValueError: a bug in this rank",
        ),
        pytest.param("1:3:exit", 2, {}, r"rank 1 of 2 \(pid \d+\) ended with exit code 3", marks=pytest.mark.nightly),
        (
            "1:3:SIGSTOP",
            2,
            dict(rank_timeout_s=1.0),
            r"rank 1 of 2 \(pid \d+\) has given no sign of life for 1 s \(engine.rank_timeout_s\)",
        ),
        (
            "1:3:hang",
            2,
            {},
            r"rank 1 of 2 \(pid \d+\) got no further in a step for 4.\d s .* raise engine.step_timeout_s",
        ),
        (
            "0:3:loop",
            2,
            dict(step_timeout_s=2.0),
            r"rank 0 of 2 \(this process\) got no further in a step for 2.\d s .* raise engine.step_timeout_s",
        ),
        pytest.param(
            "0:3:hang",
            2,
            dict(step_timeout_s=2.0),
            r"rank 0 of 2 \(this process\) got no further in a step",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["killed", "raises", "exits", "stopped", "hangs", "rank_0_loops", "rank_0_sleeps"],
)
def test_a_lost_rank_ends_the_engine_with_its_name_and_the_cause(make, fault, tp, engine, message):
    with make(fault, tp, **engine) as llm:
        processes = [child.process for child in llm.engine.executor.links.children]
        with pytest.raises(RankError, match=message):
            llm.generate([[1, 2, 3], [4, 5]], PARAMS)
        assert not llm.engine.has_work
        with pytest.raises(RankError, match=message):
            llm.generate([[1, 2, 3]], PARAMS)
    assert_gone(processes)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("1:0:memory", r"rank 1 of 2 \(pid \d+\) failed while starting: CapacityError: no room for a KV cache here"),
        ("1:0:exit", r"rank 1 of 2 \(pid \d+\) ended with exit code 3 while starting"),
    ],
)
def test_a_rank_that_cannot_start_is_named_with_the_cause(make, fault, message, monkeypatch):
    given_back, threads = [], threading.enumerate()  # another test's engine may be stuck for good

    def sharing(*given):
        ranks = connect(*given)  # the other rank may fail from here on, before this one has begun to build anything
        ranks.shared.append(lambda: given_back.append(ranks.rank))
        return ranks

    connect = assembly_engine.connect
    monkeypatch.setattr(assembly_engine, "connect", sharing)
    with pytest.raises(RankError, match=message):
        make(fault)
    assert given_back == [0], "memory that rank 0 shares with the others"
    left = [one for one in threading.enumerate() if one not in threads and one.name == "hookline-ranks"]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_what_no_rank_can_split_is_refused_as_with_one_rank(tmp_path):
    make_qwen3(tmp_path, intermediate_size=51)
    with pytest.raises(ConfigError, match="tp=2 does not divide intermediate_size 51"):
        LLM(str(tmp_path), device="cpu", tp=2)


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 1, "pp": 2}], ids=["tp", "pp"])
def test_logits_that_are_nan_end_their_request_and_no_rank_is_lost(make, sizes):
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=8, ignore_eos=True)
    with make("all:4:nan", **sizes, overlap=True) as llm:
        first, last = llm.generate([[1, 2, 3], [4, 5]], params)
        assert first.error is None and len(first.token_ids) == 8
        assert len(last.token_ids) < 8 and "fails in logits: they are NaN, so that sampler 'gumbel'" in last.error
        again = llm.generate([[1, 2, 3], [4, 5]], params)
        assert again[0].token_ids == first.token_ids and len(again[1].token_ids) == 8
        assert again[1].token_ids[: len(last.token_ids)] == last.token_ids


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("fault", ["all:3:slow", "1:3:compile", pytest.param("0:3:compile", marks=pytest.mark.nightly)])
def test_a_slow_step_of_all_ranks_and_a_compilation_on_one_are_waited_for(make, fault):
    with make(fault, step_timeout_s=1.5) as llm:
        assert SLOW_S > 2 * llm.engine.executor.links.monitor.timeouts.step_s
        outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [5, 5]


@pytest.mark.usefixtures("ranks_are_forked")
def test_ranks_that_all_hang_are_all_named_and_get_longer(make, monkeypatch):
    monkeypatch.setattr("hookline.core.assembly.engine.STEP_TIMEOUTS", 2)
    with make("all:3:hang", step_timeout_s=1.5) as llm:
        with pytest.raises(RankError, match=r"rank 0 of 2 .* and rank 1 of 2 .* got no further in a step for 3.\d s"):
            llm.generate([[1, 2, 3], [4, 5]], PARAMS)


@pytest.mark.usefixtures("ranks_are_forked")
def test_rank_0_stuck_in_a_thread_of_its_own_is_broken_off_there(make):
    with make("0:3:loop", step_timeout_s=2.0) as llm:
        found = []

        def run():
            try:
                llm.generate([[1, 2, 3]], PARAMS)
            except RankError as error:
                found.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
    assert len(found) == 1 and "rank 0 of 2 (this process) got no further in a step" in found[0]


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_while_starting_is_named_with_where_it_is(make, rank, monkeypatch):
    judge = Monitor._judge_start

    def judge_once_it_hangs(monitor, passed_s):
        if (rank == 0 and not monitor._awaited) or "faulty_rank_model" in monitor._places.get(rank, ""):
            judge(monitor, passed_s)

    monkeypatch.setattr(Monitor, "_judge_start", judge_once_it_hangs)
    who = (
        r"rank 1 of 2 \(pid \d+\), at .*faulty_rank_model.py:\d+, in act," if rank else r"rank 0 of 2 \(this process\)"
    )
    with pytest.raises(
        RankError, match=rf"{who} kept the others waiting for 1 s \(engine.start_timeout_s\) while start"
    ):
        make(f"{rank}:0:hang", start_timeout_s=1.0)


@pytest.mark.usefixtures("ranks_are_forked")
def test_nobody_waits_for_a_rank_0_that_sleeps_in_the_engine_s_own_thread(make):
    """Nothing gets that thread out of a call that never returns, so those who wait are told without it."""

    async def ask(llm):
        return await asyncio.wait_for(llm.generate([1, 2, 3], PARAMS), 60)

    async def run(llm):
        found = await asyncio.gather(ask(llm), ask(llm), return_exceptions=True)
        assert [type(error) for error in found] == [EngineError, EngineError]
        assert all("rank 0 of 2 (this process) got no further in a step" in str(error) for error in found)
        with pytest.raises(HooklineError, match="the engine is closed"):
            await ask(llm)
        await asyncio.wait_for(llm.aclose(), 60)

    llm = make("0:3:hang", kind=AsyncLLM, step_timeout_s=1.0)
    processes = [child.process for child in llm.llm.engine.executor.links.children]
    asyncio.run(run(llm))
    for process in processes:
        process.wait(60)


@pytest.mark.usefixtures("ranks_are_forked")
def test_rank_0_that_hangs_while_another_rank_is_lost_is_broken_off_too(make):
    with make("0:3:loop", step_timeout_s=2.0) as llm:
        (child,) = llm.engine.executor.links.children
        monitor = llm.engine.executor.links.monitor
        judge = monitor._judge_progress

        def kill_when_stuck(passed_s):
            judge(passed_s)
            if monitor._stuck_s > 0.5:
                child.process.kill()

        monitor._judge_progress = kill_when_stuck
        with pytest.raises(RankError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
            llm.generate([[1, 2, 3]], PARAMS)


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_rank_that_dies_between_two_calls_is_noticed_at_the_next(make):
    with make("9:9:none") as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        (child,) = llm.engine.executor.links.children
        child.process.kill()
        child.process.wait()
        with pytest.raises(RankError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
            llm.generate([[1, 2, 3]], PARAMS)


@pytest.mark.usefixtures("ranks_are_forked")
def test_an_error_of_rank_0_is_raised_as_it_is_and_ends_the_others(make):
    with make("0:3:raise") as llm:
        processes = [child.process for child in llm.engine.executor.links.children]
        with pytest.raises(PluginError, match=r"model 'faulty' of .* ValueError: a bug in this rank"):
            llm.generate([[1, 2, 3]], PARAMS)
        with pytest.raises(
            RankError, match=r"rank 0 \(this process\) broke off a step: StepFault: .* ValueError: a bug in this rank"
        ):
            llm.generate([[1, 2, 3]], PARAMS)
    assert_gone(processes)


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_start_that_is_broken_off_at_its_end_leaves_no_cache_behind(make, monkeypatch):
    workers, build_worker, wait_until_all = [], assembly_engine.build_worker, Monitor.wait_until_all

    def interrupted(monitor, said):
        if said == "ready":
            raise KeyboardInterrupt
        wait_until_all(monitor, said)

    monkeypatch.setattr(
        assembly_engine, "build_worker", lambda *given: workers.append(build_worker(*given)) or workers[0]
    )
    monkeypatch.setattr(Monitor, "wait_until_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make("1:9999:exit")
    assert workers[0].runner.kv_layers == []


def descendants(pid):
    """Child processes of a process, from /proc."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_memory():
    """Names of shared memory as Python and torch make it; what other tests start meanwhile, as Ray, has other names."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if path.name.startswith(("psm_", "torch_"))}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_to_a_run_leaves_no_process_and_no_shared_memory(number, code, tmp_path):
    # Token ids need no tokenizer, whose imports might swallow an interrupt.
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    before = shared_memory()
    options = ["tp=2", "device=cpu", "sampling.max_tokens=4000", "sampling.ignore_eos=true"]
    command = [sys.executable, "-m", "core.run", *options, f"prompts_file={tmp_path / 'prompts.jsonl'}"]
    run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    line = next(line for line in run.stderr if "bundled checkpoint" in line)  # it has started and generates now
    assert line
    (child,) = descendants(run.pid)
    child_end = select.poll()
    child_end.register(os.pidfd_open(child), select.POLLIN)
    run.send_signal(number)
    run.communicate(timeout=240)
    assert run.returncode == code
    child_end.poll(30_000)
    assert not is_alive(child)
    assert shared_memory() <= before
