"""How much code a step runs: files and functions of core and plugins, for a prefill step, a decode step and a request.

Run `python tools/step_path.py [--files]`; --files lists the files of a decode step. Calls are traced on a CPU with the
bundled checkpoint, without overlap, so every step is planned, launched and committed in one call. A function counts
with its lines from def to its end. docs/architecture.md quotes the figures.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from hookline import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
ENGINE = {"overlap": False}


class Measured(NamedTuple):
    """The code that a piece of work runs."""

    files: list[Path]
    num_lines_of_files: int
    num_functions: int
    num_lines_of_functions: int


def traced(work: Callable[[], Any]) -> set[CodeType]:
    """The functions of core and plugins that some work calls."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    threading.setprofile(note)  # of threads that are started meanwhile
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {code for code in seen if is_counted(Path(code.co_filename).resolve())}


def is_counted(path: Path) -> bool:
    """Whether a file belongs to core or to the plugins, without what only tests use."""
    folders = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    return folders[:1] in (("core",), ("plugins",)) and "testing" not in folders


def path_of(codes: set[CodeType]) -> Measured:
    """Count the files and lines of some functions."""
    files = sorted({Path(code.co_filename).resolve() for code in codes})
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return Measured(files, lines, len(codes), sum(len(inspect.getsourcelines(code)[0]) for code in codes))


def measure() -> dict[str, Measured]:
    """Trace a whole request, and of another one its first step and a decode step."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(device="cpu", engine=ENGINE) as llm:
        llm.generate(["import os"], params)  # what is imported or made once does not count
        request = traced(lambda: llm.generate(["import sys"], params))
        prompt = llm.codec.encode("import re")
        llm.engine.add(prompt, params)
        prefill = traced(llm.engine.step)
        llm.engine.step()
        decode = traced(llm.engine.step)
    return {"decode step": path_of(decode), "prefill step": path_of(prefill), "one request": path_of(request)}


if __name__ == "__main__":
    for name, path in (measured := measure()).items():
        num_core = sum(file.relative_to(ROOT).parts[0] == "core" for file in path.files)
        print(
            f"{name:13} {len(path.files):3} files ({num_core} of core) of {path.num_lines_of_files:6,} lines, "
            f"{path.num_functions:3} functions of {path.num_lines_of_functions:5,} lines"
        )
    if "--files" in sys.argv:
        print("\n".join(str(file.relative_to(ROOT)) for file in measured["decode step"].files))
