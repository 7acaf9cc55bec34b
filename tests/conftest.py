"""Settings of the whole suite: three processes, Triton's interpreter where there is no GPU, why a test was skipped.

pytest-xdist spreads a run of whole folders over processes, a file at a time; without it one process does everything.
"""

import asyncio
import gc
import os
import signal
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

# A shell that starts this in the background has Ctrl-C ignored, and so would every run that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other, several times the run time
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, so before any test does
# A usual run tries the same examples each time, however busy the machine is; the night's are new ones.
UNHURRIED = settings(settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("usual", UNHURRIED, derandomize=True)
settings.load_profile("usual")
settings.register_profile("nightly", UNHURRIED, max_examples=5000)

NUM_PROCESSES = 3
"""For a run of whole folders, unless `-n` says otherwise: one more than two cores, as many tests wait for a process, a
connection or a time limit. More than that would disturb those that wait for a time limit."""
IS_QUICK = "hookline_is_quick"
"""An attribute of Triton's interpreter once `quick_interpreter` has been there."""
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Seeds every device that is there. `torch.manual_seed` notes for each that is not from where it was called: 0.4 ms."""
YOUNG_OBJECTS = 10_000
"""So many are made before some are searched for garbage. With Python's 700 that takes 3 % of the processor time."""
SLOW_S = 1.0
"""A test that takes longer should be marked slow."""
SLOW_IN_SUITES = {
    "test_a_tight_pool_still_finishes_everybody",
    "test_another_number_of_rows_leaves_nothing_behind",
    "test_another_number_of_tokens_leaves_nothing_behind",
    "test_arrivals_that_never_end_starve_nobody_who_has_begun",
    "test_every_request_gets_the_tokens_it_gets_alone",
    "test_every_weight_changes_the_logits",
    "test_layers_that_keep_fewer_tokens_are_planned_for",
    "test_nothing_is_kept_of_a_request_that_ended",
    "test_several_ranks_give_what_one_does",
    "test_the_same_view_gives_the_same_plan_and_changes_nothing",
}
"""Tests of the suites in core/testing that are slow in every class which takes them."""
LONGEST = (
    "test_ray_data.py",
    "test_distributions.py",
    "test_speculation.py",
    "plugins/test_warm_up.py",
    "test_third_party_types.py",
    "test_ray_serve.py",
    "plugins/test_quantizations.py",
    "core/test_suites_catch_faults.py",
    "plugins/test_schedulers.py",
    "plugins/test_triton_scaled.py",
    "core/serve/http/test_server.py",
    "core/run/test_command.py",
    "core/worker/graphs/test_token_graphs.py",
    "core/worker/graphs/test_replayed_steps.py",
    "plugins/test_triton_exchange.py",
    "plugins/test_prebuild.py",
    "plugins/test_deadline.py",
)
"""Files that take longest, or whose few tests do, in an order in which no two clusters of Ray start at once."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Use several processes, unless tests share a GPU or somebody looks into a test with -s or --pdb."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput") or torch.cuda.is_available():
        return
    is_decided = option.numprocesses is not None or option.tx or option.usepdb or option.capture == "no"
    if not is_decided and all(Path(argument).is_dir() for argument in config.args):
        option.numprocesses, option.dist, option.loadscopereorder = NUM_PROCESSES, "loadfile", False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    """Collect without a search for garbage, and leave what is there out of all later searches.

    Torch, the modules and the tests are a million objects: a full search takes 0.9 s, and the start of an engine that
    freezes its heap begins with one. Engines leave a frozen heap alone; tests of what they do thaw it first.
    """
    gc.disable()
    try:
        cache = getattr(session.config, "cache", None)  # not there under -p no:cacheprovider
        with bytecode_kept(cache.mkdir("bytecode")) if cache else nullcontext():
            return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        gc.enable()


@contextmanager
def bytecode_kept(folder):
    """Keep what modules are compiled to in pytest's own folder, where the environment forbids keeping it beside them.

    Rewriting the asserts of all tests is half of the collection's time.
    """
    before = sys.dont_write_bytecode, sys.pycache_prefix
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.originalname in SLOW_IN_SUITES:
            item.add_marker(pytest.mark.slow)
    skip_where_it_cannot_run(config, items)
    if hasattr(config, "workerinput"):
        items.sort(key=long_files_first(items))


def long_files_first(items):
    """The order for several processes, which should end together: after LONGEST, files beside this one take longest."""
    num_slow = Counter(item.path for item in items if "slow" in item.keywords)
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    return lambda item: (places.get(item.path, len(places)), item.path.parent != here, -num_slow[item.path])


def skip_where_it_cannot_run(config, items):
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if config.getoption("hypothesis_profile", None) != "nightly":
        reasons["nightly"] = "takes long: --hypothesis-profile=nightly"
    for item in items:
        for name in reasons.keys() & item.keywords.keys():
            item.add_marker(pytest.mark.skip(reason=reasons[name]))


def pytest_terminal_summary(terminalreporter):
    """Name the tests that the fast loop should leave out and does not."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    slow = {
        report.nodeid: report.duration
        for report in reports
        if getattr(report, "when", None) == "call" and report.duration > SLOW_S and "slow" not in report.keywords
    }
    if slow:
        terminalreporter.section(f"over {SLOW_S:g} s and not marked slow", sep="-")
        for nodeid, duration in sorted(slow.items(), key=lambda item: -item[1])[:20]:
            terminalreporter.line(f"{duration:5.1f} s  {nodeid}")


@pytest.fixture(autouse=True)
def same_import_path():
    """Loading plugins in development adds the working folder, where the next test would find this one's modules."""
    before = sys.path[:]
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def same_random_numbers():
    """A test that draws random tensors without saying from what draws the same ones in each run."""
    SEED(0)


@pytest.fixture(autouse=True)
def quick_interpreter():
    """Triton's interpreter, from the first test on that finds it imported."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not hasattr(interpreter, IS_QUICK):
        from tests.interpreted import interpret_quickly

        interpret_quickly(interpreter)
        setattr(interpreter, IS_QUICK, True)


@pytest.fixture(scope="module", autouse=True)
def quick_servers():
    """Servers in this process end ten times as soon: uvicorn looks each 0.1 s whether to end, then waits as long."""
    server = sys.modules.get("uvicorn.server")
    if server is not None and server.asyncio is asyncio:
        names = {**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)}
        server.asyncio = SimpleNamespace(**names)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """What is left of the modules before is left out of searches for garbage, too, also if one of them thawed it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a small random Qwen3."""
    from tests.hf_models import make_qwen3

    folder = tmp_path_factory.mktemp("checkpoint")
    make_qwen3(folder)
    return str(folder)


@pytest.fixture(scope="session")
def worded(tmp_path_factory):
    """A checkpoint of a small random Qwen3 with a tokenizer."""
    from tests.hf_models import make_worded

    folder = tmp_path_factory.mktemp("worded")
    make_worded(folder)
    return str(folder)


@pytest.fixture(scope="session")
def origin():
    """The process whose forks become ranks and jobs; it is ready after some seconds."""
    from tests.forked_ranks import Origin

    origin = Origin()
    yield origin
    origin.close()


@pytest.fixture(scope="module")
def ranks_are_forked(origin):
    """From here on in this module, ranks in other processes are forks of a process that has torch already."""
    from tests.forked_ranks import forked_ranks

    with forked_ranks(origin):
        yield


@pytest.fixture(scope="module")
def jobs_are_forked(origin):
    """From here on in this module, so are the jobs of sweeps that are run in this process."""
    from tests.forked_ranks import forked_jobs

    with forked_jobs(origin):
        yield


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A fresh environment with Hookline's wheel in it, and nothing of this tree."""
    from tests.fresh_environment import ROOT, FreshEnvironment

    environment = FreshEnvironment(tmp_path_factory.mktemp("installed"))
    environment.install([ROOT])
    return environment
