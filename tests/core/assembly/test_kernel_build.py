"""The child process that compiles kernels while an engine starts: once for each model and card, never in the way."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace

import pytest
import torch

from hookline.core.assembly import compiler_child, kernel_build
from hookline.core.assembly.compiler_child import STAMP
from hookline.core.assembly.exported_kernels import MANIFEST, compiler_versions
from hookline.core.assembly.kernel_build import (
    AWAITED,
    KernelBuild,
    code_files,
    key_of,
    known_keys,
    stamp_ahead,
    variants_ahead,
)
from hookline.core.contracts import Needs
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.util.start_phases import StartPhases
from hookline.core.util.task_child import TaskChild

FOUND = {"num_kernels": 3, "num_compiled": 2, "seconds": 1.25, "failed": [], "variants": ["_norm-1"]}
KERNEL = SimpleNamespace(__module__="plugin.kernels", __name__="_norm_kernel")


def child(tmp_path, code):
    return KernelBuild(TaskChild([sys.executable, "-c", code]), tmp_path / "cache" / "stamp.json")


def test_what_came_of_it_is_its_last_line_and_is_noted_beside_the_kernels(tmp_path):
    build = child(tmp_path, f"print('a plugin says hello'); print({json.dumps(json.dumps(FOUND))})")
    assert build.finish() == "2 of 3 kernels compiled ahead in 1.2 s"
    assert json.loads(build.stamp.read_text()) == {**FOUND, "versions": None}


def test_a_child_that_fails_is_no_reason_not_to_start_and_is_said_and_remembered(tmp_path, caplog):
    build = child(tmp_path, "raise RuntimeError('no compiler here')")
    assert build.finish() is None and json.loads(build.stamp.read_text())["failed"] == [
        "RuntimeError: no compiler here"
    ]
    assert (
        f"(RuntimeError: no compiler here), so they are compiled as they are needed; remove {build.stamp}"
        in caplog.text
    )


def test_a_child_that_was_killed_is_told_with_its_signal(tmp_path, caplog):
    assert child(tmp_path, "import os; os.kill(os.getpid(), 9)").finish() is None
    assert "(it was killed by SIGKILL" in caplog.text


def test_a_child_of_which_nothing_comes_is_ended(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(kernel_build, "PATIENCE_S", 0.2)
    assert child(tmp_path, "import time; time.sleep(600)").finish() is None
    assert "(nothing came of it in 0 s)" in caplog.text


@pytest.mark.parametrize("line", [b"", b"\xff\xfe", b"kernel-done", b"[1]", b'{"seconds": 1}', b"5"])
def test_lines_that_say_nothing_stop_nobody(tmp_path, line):
    written = b"\n".join([line, json.dumps(FOUND).encode(), line, b""])
    build = child(tmp_path, f"import sys; sys.stdout.buffer.write({written!r})")
    started = time.monotonic()
    assert build.finish() == "2 of 3 kernels compiled ahead in 1.2 s"
    assert time.monotonic() - started < 30


CHILD_WITH_PROCESSES = """
import multiprocessing, os, time
from hookline.core.prebuild.build import _begin_process
def work():
    _begin_process()
    print(f"worker {{os.getpid()}}", flush=True)
    time.sleep(600)
multiprocessing.get_context("fork").Process(target=work).start()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_child_that_ends_early_takes_its_processes_along_and_nobody_waits_on(tmp_path, monkeypatch, is_killed):
    pytest.importorskip("triton")
    heard, hear = [], KernelBuild._hear
    monkeypatch.setattr(KernelBuild, "_hear", lambda build, line: heard.append(line) or hear(build, line))
    build = child(tmp_path, CHILD_WITH_PROCESSES.replace("{{", "{").replace("}}", "}"))
    started = time.monotonic()
    while not heard:
        assert time.monotonic() - started < 60
        time.sleep(0.02)
    worker = int(heard[0].split()[1])
    started = time.monotonic()
    if is_killed:  # by the system, for its memory
        os.kill(build._child.process.pid, signal.SIGKILL)
        with build.awaited(StartPhases()):
            assert launch("first")
        assert build.finish() is None
    else:
        build.end()
    assert time.monotonic() - started < 20
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() - started < 30
        time.sleep(0.02)


def test_engines_that_start_in_several_threads_wait_each_for_its_own_kernels(tmp_path):
    pytest.importorskip("triton")
    builds = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        keys = [("first", key_of(KERNEL, "first"))]
        builds.append(child(tmp_path / name, waiting_child(tmp_path / name, keys)))
    phases, is_inside = [StartPhases(), StartPhases()], Event()

    def start(index):
        with builds[index].awaited(phases[index]):
            if index:
                is_inside.set()
                return launch("first")
            return is_inside.wait(30)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(start, 1)
        assert pool.submit(start, 0).result(30)  # the one has left by now, and the other waits on
        assert not other.done()
        (tmp_path / "other" / "first").touch()
        assert other.result(30) and phases[1].seconds[AWAITED] > 0 and not phases[0].seconds
    for build in builds:
        build.end()


def launch(specialization):
    """What Triton does when a kernel of ours is launched for the first time in this process; whether it compiles it."""
    from triton import knobs

    hook = knobs.runtime.jit_cache_hook
    return hook is None or not hook(
        key="", fn=SimpleNamespace(jit_function=KERNEL), compile={"specialization_data": specialization}
    )


WAITING_CHILD = """
import pathlib, sys, time
def wait_for(name):
    while not pathlib.Path({folder!r}, name).exists():
        time.sleep(0.01)
for name, key in {keys!r}:
    wait_for(name)
    pathlib.Path({folder!r}, name + "-done").touch()
    print("kernel-done", key, "_norm-" + name, flush=True)
wait_for("end")
print({found!r})
"""


def waiting_child(folder, keys):
    """Its code: it is done with each of these kernels once there is a file of its name in the folder."""
    return WAITING_CHILD.format(folder=str(folder), keys=keys, found=json.dumps(FOUND))


@pytest.fixture
def waiting(tmp_path):
    """A child that says that the kernels "first" and "second" are compiled once there is a file of that name."""
    pytest.importorskip("triton")
    keys = [(name, key_of(KERNEL, name)) for name in ("first", "second")]
    build = child(tmp_path, waiting_child(tmp_path, keys))
    yield build
    build.end()


def test_an_engine_waits_for_the_kernel_that_it_launches_and_for_no_other(waiting, tmp_path):
    phases = StartPhases()
    with phases.part("graphs"), waiting.awaited(phases):
        timer = Timer(0.3, (tmp_path / "first").touch)
        timer.start()
        assert launch("first") and (tmp_path / "first-done").exists() and not (tmp_path / "second-done").exists()
        assert waiting.variants == {"_norm-first"}
        assert launch("first")
    assert launch("second") and not (tmp_path / "second-done").exists()  # outside, it would be compiled here
    assert list(phases.seconds) == ["graphs", AWAITED] and phases.seconds[AWAITED] > 0.2 > phases.seconds["graphs"]
    (tmp_path / "second").touch()
    (tmp_path / "end").touch()
    assert waiting.finish() == "2 of 3 kernels compiled ahead in 1.2 s"
    assert waiting.variants == {"_norm-first", "_norm-second"}


def test_a_kernel_of_another_configurations_stamp_is_not_waited_for(tmp_path):
    pytest.importorskip("triton")
    versions, other = {"triton": "3.6.0", "files": "1f"}, {"triton": "3.6.0", "files": "2e"}
    keys = {name: key_of(KERNEL, name) for name in ("first", "second")}
    stamps = {"versions": versions, "keys": [keys["first"]]}, {"versions": versions}, {"versions": other, "keys": ["x"]}
    for number, stamp in enumerate((*stamps, [])):
        (tmp_path / STAMP.format(number)).write_text(json.dumps(stamp))
    (tmp_path / STAMP.format("torn")).write_text("{")
    known = known_keys([tmp_path, tmp_path / "absent"], versions)
    assert known == {keys["first"]}
    command = [sys.executable, "-c", waiting_child(tmp_path, list(keys.items()))]
    build = KernelBuild(TaskChild(command), tmp_path / "stamp.json", versions, known)
    with build.awaited(StartPhases()):
        assert launch("first") and not (tmp_path / "first-done").exists()
        for name in ("first", "second", "end"):
            (tmp_path / name).touch()
        assert launch("second") and (tmp_path / "second-done").exists()
    assert build.finish() and json.loads(build.stamp.read_text()) == {**FOUND, "versions": versions}


def test_a_kernel_that_the_child_never_compiles_is_waited_for_until_it_has_ended(waiting, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).touch()
    timer = Timer(0.3, (tmp_path / "end").touch)
    with waiting.awaited(StartPhases()):
        timer.start()
        assert launch("third") and (tmp_path / "end").exists()


def test_the_kernels_of_other_threads_do_not_wait_and_a_hook_of_somebody_else_is_asked(waiting, monkeypatch):
    from triton import knobs

    asked = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **given: asked.append(given) or True)
    with waiting.awaited(StartPhases()), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(launch, "first").result(10)
    assert asked == [
        {"key": "", "fn": SimpleNamespace(jit_function=KERNEL), "compile": {"specialization_data": "first"}}
    ]


@pytest.fixture
def resolved(monkeypatch, tmp_path):
    """A configuration on a card, as far as it matters here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_build, "card_facts", lambda device: {"num_sms": 132})
    monkeypatch.setattr(kernel_build, "config_tree", lambda *_: {})
    of_model = SimpleNamespace(origin=__file__, parent="")
    monkeypatch.setattr(
        kernel_build, "find_spec", lambda name: of_model if name == "stranger" else SimpleNamespace(origin=None)
    )
    sizes = dict(dtype=torch.bfloat16, kv_dtype=None, block_size=64, num_heads=16, num_kv_heads=8)
    config = SimpleNamespace(
        engine=SimpleNamespace(compile_ahead=True, prepared_sampling=(), kernel_cache=None),
        sampler=SimpleNamespace(name="gumbel", config=None, entry=None),
        model=SimpleNamespace(name="qwen3", entry=None),
        extension_options={},
    )
    return SimpleNamespace(
        device=torch.device("cuda"), config=config, ranks=LocalRanks(), attention=SimpleNamespace(**sizes),
        kernels=SimpleNamespace(name="triton", needs=Needs(packages=("triton",)), target="plugin.kernels:Kernels"),
        checkpoint=SimpleNamespace(config={"hidden_size": 1024}, sampling_defaults={}), plugins=(),
    )  # fmt: skip


def start_build(resolved):
    return kernel_build.start_build(resolved, stamp_ahead(resolved))


def test_nothing_is_begun_twice_for_a_model_and_a_card(resolved, monkeypatch):
    monkeypatch.setattr(
        compiler_child, "python_command", lambda *_: [sys.executable, "-c", f"print('''{json.dumps(FOUND)}''')"]
    )
    build = start_build(resolved)
    assert variants_ahead(stamp_ahead(resolved)) == frozenset()
    assert build.finish() and start_build(resolved) is None and variants_ahead(stamp_ahead(resolved)) == {"_norm-1"}
    resolved.checkpoint.config = {"hidden_size": 2048}
    other = start_build(resolved)
    assert other.finish() and other.stamp != build.stamp
    resolved.checkpoint.sampling_defaults = {"top_p": 0.95}
    third = stamp_ahead(resolved)
    resolved.plugins = ("processor 'top_n_sigma' of stranger 0.2 from stranger:TopNSigma",)
    fourth = stamp_ahead(resolved)
    resolved.config.model.entry = SimpleNamespace(target="stranger:Model")
    assert len({build.stamp, other.stamp, third, fourth, stamp_ahead(resolved)}) == 5


def test_nothing_is_begun_with_an_export_for_this_configuration_and_one_for_another_is_told(
    resolved, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(
        compiler_child, "python_command", lambda *_: [sys.executable, "-c", f"print('''{json.dumps(FOUND)}''')"]
    )
    export = tmp_path / "export"
    export.mkdir()
    (export / MANIFEST).write_text(json.dumps({"versions": compiler_versions(), "made_for": ["a model on h200"]}))
    resolved.config.engine.kernel_cache = str(export)
    build = start_build(resolved)
    assert build.finish() and build.stamp.parent == tmp_path
    assert caplog.messages[0] == (
        f"engine.kernel_cache={export} was made for a model on h200, and not for just this configuration; "
        "what it lacks is compiled"
    )
    caplog.clear()
    build.stamp.rename(export / build.stamp.name)
    assert start_build(resolved) is None and variants_ahead(stamp_ahead(resolved)) == {"_norm-1"} and not caplog.text


def test_a_stamp_is_the_same_with_torch_for_another_cuda_or_for_none(resolved, monkeypatch):
    versions = {"torch": "2.11.0", "triton": "3.6.0", "hookline": "0.1.0"}
    monkeypatch.setattr(kernel_build, "version", lambda name: versions[name])
    stamps = []
    for versions["torch"] in ("2.11.0", "2.11.0+cpu", "2.11.0+cu130", "2.11.1"):
        stamps.append(stamp_ahead(resolved))
    assert stamps[0] == stamps[1] == stamps[2] != stamps[3]


def test_nothing_is_begun_where_nothing_is_compiled_or_somebody_said_so(resolved):
    resolved.config.engine.compile_ahead = False
    assert start_build(resolved) is None and variants_ahead(stamp_ahead(resolved)) == frozenset()
    resolved.config.engine.compile_ahead, resolved.device = True, torch.device("cpu")
    assert start_build(resolved) is None


def test_kernels_are_the_files_of_their_package_with_those_inside_it_and_of_a_lone_module_that_file(
    tmp_path, monkeypatch
):
    (tmp_path / "fast" / "attention").mkdir(parents=True)
    files = [tmp_path / name for name in ("fast/__init__.py", "fast/attention/decode.py", "fast/kernels.py", "lone.py")]
    for path in files:
        path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert code_files("fast.kernels") == [files[0], files[1], files[2]] and code_files("fast") == files[:3]
    assert code_files("lone") == [files[3]] and code_files("absent") == []
