"""What an engine leaves behind, and what it does in the wrong process or thread."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.errors import HooklineError

FEW = SamplingParams(max_tokens=2, temperature=0)


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if one_is_open(one)}


def one_is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def sockets() -> set[str]:
    return {one for one in descriptors() if one.startswith(("socket:", "pipe:", "anon_inode:"))}


def in_a_fork(run) -> str:
    """What `run` raises in a forked child, which then ends as a script does that unwinds."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            run()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


@pytest.fixture(scope="module")
def two_ranks():
    with LLM(tp=2, device="cpu") as llm:
        yield llm


@pytest.mark.slow
def test_a_forked_child_gets_an_error_and_its_parent_keeps_the_ranks(two_ranks) -> None:
    before = two_ranks.generate("a", FEW)[0].token_ids
    said = in_a_fork(lambda: two_ranks.generate("b", FEW))
    assert said.startswith("HooklineError: this engine belongs to process") and "Make a new engine" in said
    assert in_a_fork(two_ranks.close) == "nothing"
    assert two_ranks.generate("a", FEW)[0].token_ids == before


@pytest.mark.slow
def test_an_async_engine_in_a_forked_child_is_an_error_and_never_a_wait() -> None:
    import asyncio

    llm = AsyncLLM(device="cpu")
    said = in_a_fork(lambda: asyncio.run(llm.generate("b", FEW)))
    assert said.startswith("HooklineError: this engine belongs to process")
    assert len(asyncio.run(llm.generate("a", FEW)).token_ids) == 2
    llm.close()


@pytest.mark.slow
def test_a_second_thread_is_refused_while_another_one_generates(two_ranks) -> None:
    stream = two_ranks.stream("a", SamplingParams(max_tokens=20))
    next(stream)
    errors = []

    def generate() -> None:
        try:
            two_ranks.generate("b", FEW)
        except HooklineError as error:
            errors.append(str(error))

    with two_ranks.output_processor.exclusively():  # as while the first thread is inside a step
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    assert errors == ["another thread is using this LLM; take AsyncLLM, or one LLM for each thread"]
    assert sum(delta.output is not None for delta in stream) == 1


@pytest.mark.slow
def test_closing_gives_back_every_socket_and_pipe_and_dropping_ends_the_ranks() -> None:
    gc.collect()
    before = sockets()
    gc.disable()
    try:
        llm = LLM(tp=2, device="cpu")
        children = [child.process for child in llm.engine.executor.links.children]
        llm.close()
        assert sockets() - before == set()
        del llm
        llm = LLM(tp=2, device="cpu")
        children += [child.process for child in llm.engine.executor.links.children]
        del llm
        assert all(child.poll() is not None for child in children)
    finally:
        gc.enable()


@pytest.mark.slow
def test_ranks_of_a_script_start_without_standard_files(tmp_path: Path) -> None:
    script = (
        "from hookline import LLM, SamplingParams\nwith LLM(tp=2, device='cpu') as llm:\n"
        "    [output] = llm.generate('a', SamplingParams(max_tokens=2, ignore_eos=True))\n"
        "open('a', 'w').write(str(len(output.token_ids)))\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "a").read_text() == "2"
