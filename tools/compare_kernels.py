"""Compiles the Triton kernels of two checkouts for a card that need not be here, and says whose machine code differs.

    python tools/compare_kernels.py ../main                      # a checkout of before the change, built for an H200
    python tools/compare_kernels.py                              # no other: registers, spills and shared memory alone
    python tools/compare_kernels.py ../main --only silu --of "model=qwen3_0_6b engine.max_num_seqs=8"

Compiled is what engines of a few models launch until they are ready, found on a card that is pretended, and the sums of
several ranks; --of takes a configuration, or a Python file whose launch() launches kernels. Line numbers are left out,
so that code which only moved is the same, and what is the same before its machine code is made is compiled once. A
kernel's variants are told apart by their arguments' types and constants; where a change alters those, variants of the
same code count as the same. The exit code is 1 if anything differs, 2 if anything does not compile. --keep DIR keeps
all PTX there, to be compared by diff; --save FILE keeps what was found here, which can stand for the other checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import re
import runpy
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parents[1]
MODELS = (
    "model=qwen3_0_6b",
    "model=qwen3_8b",
    "model=qwen3_30b_a3b",
    "model=gemma3_4b",
    "model=gpt_oss_20b",
    "model=qwen3_next_80b_a3b",
    "model=qwen3_0_6b engine.batch_invariant=true",
    "model=qwen3_30b_a3b engine.batch_invariant=true",
    "model=qwen3_30b_a3b quantization=fp8_block",
)
"""Overrides of a configuration each, as of hookline run."""
RANKS = "ranks"
"""Stands for what an engine of several ranks launches to sum up."""
MOST_TOLD = 20
"""Differences that are printed."""
NAME = r"%[\w$.-]+"
"""Of a value in Triton's code."""


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled for some arguments.

    told: their types, constants and alignment. registers: of a thread. spilled, shared: bytes, of a thread and of a
    program. source: digest of what machine code is made of, without the names that values have in Python. ptx, code:
    digests of the PTX, and of the machine code with its constants.
    """

    kernel: str
    told: str
    registers: int
    spilled: int
    shared: int
    source: str
    ptx: str
    code: str

    @property
    def use(self) -> str:
        """What it takes of a multiprocessor."""
        return f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared} bytes shared"


@dataclass(frozen=True)
class Compiled:
    """All kernels of a checkout. unlaunched: those that nothing launched. failed: what could not be compiled."""

    variants: list[Variant]
    unlaunched: list[str]
    failed: list[str]


Launch = tuple[str, str, str]
"""A kernel's module and name, and Triton's JSON of what a variant is compiled for."""


# ---- in a process that imports one checkout


def launches_of(overrides: str, card_name: str) -> list[Launch]:
    """What is launched. overrides: see --of."""
    from hookline.core.config.compose import compose
    from hookline.core.plugin.host import PluginHost
    from hookline.core.prebuild.build import launch_all
    from hookline.core.prebuild.pretended import card_named, pretended
    from hookline.core.run.settings import RunKeys, validate_run

    found: dict[Launch, None] = {}

    def seen(kernel: Any, specialization: str) -> None:
        found[kernel.__module__, kernel.__name__, specialization] = None

    card = card_named(card_name)
    if overrides == RANKS or overrides.endswith(".py"):
        launch = _launch_sums if overrides == RANKS else runpy.run_path(overrides)["launch"]
        with pretended(card, seen):
            launch()
    else:
        host = PluginHost.load()
        tree = compose(["model.weights=random", *overrides.split()], host, RunKeys)[0].tree
        launch_all(validate_run(tree, host).config, host, card, seen)
    return list(found)


def _launch_sums() -> None:
    """Sums over 2 and 4 ranks in all ways, at the widths of small and large models."""
    import torch

    from hookline.core.contracts import PeerMemory
    from hookline.plugins.kernels.products.triton_wide import WideScratch
    from hookline.plugins.kernels.triton_exchange import TritonExchange

    def tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="cuda")

    for size in (2, 4):
        peers = PeerMemory(0, size, 256, 16384, tensor(size, dtype=torch.int64), tensor(256, dtype=torch.int64))
        exchange = TritonExchange(peers, WideScratch.make(torch.device("cuda")))
        for rows in (1, 2, 4, 16, 64, 128, 256):
            exchange.best_tokens(tensor(rows, dtype=torch.float32), tensor(rows, dtype=torch.int64))
            for width in (1024, 5120):
                x_TD, residual_TD, weight_D = tensor(rows, width), tensor(rows, width), tensor(width)
                exchange.all_reduce(x_TD)
                exchange.add_rms_norm(x_TD, residual_TD, weight_D, 1e-6)
                exchange.add_rms_norm_own(x_TD, residual_TD, weight_D, 1e-6)
                exchange.linear_add_rms_norm(tensor(rows, 2048), tensor(width, 2048), None, residual_TD, weight_D, 1e-6)


class Known(Exception):
    """Raised where a compiler stops that would compile the same once more; its argument is the digest of that."""


def compiled(launch: Launch, card_name: str, keep: str | None, known: Mapping[str, Variant]) -> Variant | str:
    """One variant, or why it cannot be compiled. keep: a folder for its PTX. known: what was compiled, by source."""
    from hookline.core.prebuild.pretended import card_named, target_of

    module, name, specialization = launch
    given = json.loads(specialization)
    told = described(given)
    try:
        with target_of(card_named(card_name)), stopped_at(given["options"], known if keep is None else ()):
            kernel = getattr(importlib.import_module(module), name).preload(specialization)
        source = source_digest(kernel.asm["ttir"], given["options"])
        ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
        registers, spilled = usage(cubin)
    except Known as found:
        return replace(known[str(found)], kernel=name, told=told)
    except Exception as error:  # whatever a compiler raises
        return f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]} ({told})"
    digests = source, digest(ptx.encode()), digest(machine_code(cubin))
    if keep is not None:
        (Path(keep) / f"{name}-{digest(told.encode())}.ptx").write_text(f"// {told}\n{ptx}")
    return Variant(name, told, registers, spilled, kernel.metadata.shared, *digests)


@contextmanager
def stopped_at(options: Any, known: Container[str]) -> Iterator[None]:
    """Inside, Triton raises Known where it has the code of a kernel whose machine code is known."""
    from triton.backends.nvidia.compiler import CUDABackend

    made = CUDABackend.make_ttir

    def stopped(module: Any, *given: Any) -> Any:
        module = made(module, *given)
        source = source_digest(str(module), options)
        if source in known:
            raise Known(source)
        return module

    with patch.object(CUDABackend, "make_ttir", staticmethod(stopped)):
        yield


def source_digest(ttir: str, options: Any) -> str:
    """A digest of Triton's code, in which functions are inlined, but not of its places and its values' names."""
    code = re.sub(r" ?loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", ttir)
    numbers: dict[str, int] = {}
    lines = [_numbered(line, numbers) for line in code.splitlines() if not line.startswith("#loc")]
    return digest("\n".join((*lines, json.dumps(options, sort_keys=True))).encode())


def _numbered(line: str, numbers: dict[str, int]) -> str:
    """The line with numbers for names: a new one where a value is made, for a name may stand for one in each region."""
    made = set(re.findall(rf"({NAME})(?::\d+)?(?=(?:, {NAME}(?::\d+)?)* = )", line))
    if line.lstrip().startswith("^"):
        made |= set(re.findall(rf"({NAME}):", line))
    for name in re.findall(NAME, line):
        if name in made or name not in numbers:
            made.discard(name)
            numbers[name] = numbers["last"] = numbers.get("last", 0) + 1
    return re.sub(NAME, lambda found: f"%{numbers[found[0]]}", line)


def described(specialization: dict[str, Any]) -> str:
    """What a variant is compiled for, in an order that does not depend on that of its arguments."""
    names = list(specialization["signature"])

    def named(path: Sequence[int]) -> str:
        return ".".join((names[path[0]], *map(str, path[1:])))

    keys, values = specialization["constant_keys"], specialization["constant_vals"]
    constants = [f"{named(path)}={value}" for path, value in zip(keys, values, strict=True)]
    types = [f"{name}:{kind}" for name, kind in specialization["signature"].items() if kind != "constexpr"]
    known = zip(specialization["attrs_keys"], specialization["attrs_vals"], strict=True)
    aligned = [f"{named(path)}%{value}" for path, values in known for _, value in values]
    given = specialization["options"]
    options = [f"{name}={given.get(name)}" for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl")]
    return " ".join((*sorted(constants), *options, *sorted(types), *sorted(aligned)))


def digest(data: bytes) -> str:
    """A short name of these bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def sections(cubin: bytes) -> Iterator[tuple[int, bytes]]:
    """Flags and content of each section of an ELF file of 64 bits that has any."""
    at, size, count = struct.unpack_from("<Q", cubin, 0x28)[0], *struct.unpack_from("<HH", cubin, 0x3A)
    for number in range(count):
        _, kind, flags, _, offset, length = struct.unpack_from("<IIQQQQ", cubin, at + number * size)
        if kind == 1:  # PROGBITS
            yield flags, cubin[offset : offset + length]


def machine_code(cubin: bytes) -> bytes:
    """What is loaded of a cubin: instructions and constants."""
    return b"".join(content for flags, content in sections(cubin) if flags & 2)  # ALLOC


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its registers that lie in memory."""
    from triton.backends import nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "REG:" in line)
    found = {name: int(value) for name, _, value in (word.partition(":") for word in line.split()) if value.isdigit()}
    return found["REG"], found["STACK"] + found["LOCAL"]


def entry_points() -> list[str]:
    """Triton functions of the plugins that no other of them calls."""
    from hookline import plugins

    called, functions, root = set[str](), set[str](), Path(plugins.__path__[0])
    for path in root.rglob("*.py"):
        if "triton.jit" in path.read_text():
            module = importlib.import_module(
                ".".join((plugins.__name__, *path.relative_to(root).with_suffix("").parts))
            )
            for function in vars(module).values():
                if getattr(getattr(function, "fn", None), "__module__", None) == module.__name__:
                    functions.add(function.__name__)
                    read = inspect.getclosurevars(function.fn).globals.values()
                    called |= {one.__name__ for one in read if hasattr(one, "fn")}
    return sorted(functions - called)


def compile_tree(task: dict[str, Any]) -> Compiled:
    """Compile all kernels of the checkout that this process imports."""
    import hookline

    tree, card, keep = Path(task["tree"]), task["card"], task["keep"]
    if (found := Path(hookline.__path__[0]).parent) != tree:
        raise SystemExit(f"{tree} has no package hookline of its own: {found}'s was imported")
    importlib.import_module("triton")
    with ProcessPoolExecutor(task["processes"], multiprocessing.get_context("fork")) as pool:
        many = [pool.submit(launches_of, overrides, card) for overrides in task["of"]]
        launches = dict.fromkeys(launch for one in many for launch in one.result())
        wanted = [one for one in launches if any(part in one[1] for part in task["only"] or [""])]
        known = {one["source"]: Variant(**one) for one in task["known"]}
        done = [pool.submit(compiled, launch, card, keep, known) for launch in wanted]
        outcomes = [one.result() for one in done]
    launched = {name for _, name, _ in launches}
    return Compiled(
        [one for one in outcomes if isinstance(one, Variant)],
        [name for name in entry_points() if name not in launched] if task["all"] else [],
        [one for one in outcomes if isinstance(one, str)],
    )


# ---- in the process that compares


def compiled_in(
    tree: Path, options: argparse.Namespace, keep: Path | None = None, known: Sequence[Variant] = ()
) -> Compiled:
    """Compile a checkout in a process of its own, but for what is known.

    Raises: SystemExit if that process failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(tree), environment.get("PYTHONPATH"))))  # where another Triton may be
    environment |= {"PYTHONPATH": path, "TRITON_DISABLE_LINE_INFO": "1", "OMP_NUM_THREADS": "1"}
    environment.setdefault("PYTHONWARNINGS", "ignore")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    task = {
        "tree": str(tree), "card": options.card, "of": options.of or [*MODELS, RANKS], "only": options.only,
        "all": not options.of, "processes": options.processes, "keep": None if keep is None else str(keep.resolve()),
        "known": [asdict(one) for one in known],
    }  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command, told = [sys.executable, __file__, "--task", answer.name], json.dumps(task)
        if subprocess.run(command, env=environment, input=told, text=True).returncode:
            raise SystemExit(f"the kernels of {tree} could not be compiled")
        return saved(Path(answer.name))


def saved(path: Path) -> Compiled:
    """What was found before, from its file."""
    told = json.loads(path.read_text())
    return Compiled([Variant(**one) for one in told["variants"]], told["unlaunched"], told["failed"])


def unlike(here: Sequence[Variant], there: Sequence[Variant]) -> list[tuple[Variant | None, Variant | None]]:
    """What differs between variants of one kernel, here and there; None where one has nothing like it.

    Those compiled for the same are compared; of the others, those of the same machine code are the same.
    """
    others = {one.told: one for one in there}
    pairs = [(one, others.pop(one.told)) for one in here if one.told in others]
    told = {one.told for one, _ in pairs}
    code = Counter(one.code for one in others.values())
    found: list[tuple[Variant | None, Variant | None]] = [(a, b) for a, b in pairs if a.code != b.code]
    for one in here:
        if one.told in told:
            continue
        if code[one.code]:
            code[one.code] -= 1
        else:
            found.append((one, None))
    for other in others.values():
        if code[other.code]:
            code[other.code] -= 1
            found.append((None, other))
    return found


def by_kernel(variants: Sequence[Variant]) -> dict[str, list[Variant]]:
    """Variants of each kernel by its name."""
    found = defaultdict[str, list[Variant]](list)
    for one in variants:
        found[one.kernel].append(one)
    return found


def table(here: Sequence[Variant], there: Sequence[Variant] | None) -> list[str]:
    """A line for each kernel: its variants, how many have the same code in the other checkout, and what they take."""
    mine, theirs = by_kernel(here), by_kernel(there or ())
    lines = [f"{'kernel':34} {'variants':>8} {'same':>5}  {'registers':>9}  {'spilled':>7}  {'shared':>7}"]
    for name in sorted({*mine, *theirs}):
        variants = mine[name] or theirs[name]
        least, most = min(one.registers for one in variants), max(one.registers for one in variants)
        num_same = len(mine[name]) - sum(one is not None for one, _ in unlike(mine[name], theirs[name]))
        registers, same = str(most) if least == most else f"{least}-{most}", "" if there is None else num_same
        spilled, shared = max(one.spilled for one in variants), max(one.shared for one in variants)
        lines.append(f"{name:34} {len(mine[name]):8} {same:>5}  {registers:>9}  {spilled:7}  {shared:7}")
    return lines


def differences(here: Sequence[Variant], there: Sequence[Variant]) -> list[str]:
    """What differs, one each."""
    mine, theirs, lines = by_kernel(here), by_kernel(there), list[str]()
    for name in sorted({*mine, *theirs}):
        for one, other in unlike(mine[name], theirs[name]):
            told = next(variant.told for variant in (one, other) if variant is not None)
            uses = " -> ".join("none" if variant is None else variant.use for variant in (other, one))
            lines.append(f"{name}: {uses}\n    {told}")
    return lines


def report(here: Compiled, there: Compiled | None, *, every: bool) -> int:
    """Print what was found, and return the exit code. every: each variant by itself, too."""
    for line in table(here.variants, None if there is None else there.variants):
        print(line)
    for one in here.variants if every else ():
        print(f"{one.kernel}: {one.use}\n    {one.told}")
    if here.unlaunched:
        print(f"launched by none of these: {', '.join(here.unlaunched)}")
    failed = [*here.failed, *(there.failed if there is not None else ())]
    for line in failed:
        print(f"not compiled: {line}")
    if there is None:
        return 2 if failed else 0
    found = differences(here.variants, there.variants)
    for line in found[:MOST_TOLD]:
        print(line)
    theirs = {(one.kernel, one.told): one.ptx for one in there.variants}
    same_ptx = sum(theirs.get((one.kernel, one.told)) == one.ptx for one in here.variants)
    counts = f"{len(here.variants)} variants here, {len(there.variants)} there"
    print(f"{counts}; {same_ptx} of the same PTX, {len(found)} differ")
    return 2 if failed else 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="another checkout, or what --save wrote in it")
    parser.add_argument("--of", action="append", help="what is compiled in place of the models' kernels")
    parser.add_argument("--only", action="append", help="kernels with this in their name")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a folder for all PTX")
    parser.add_argument("--save", type=Path, help="a file for what is found here")
    parser.add_argument("--all", action="store_true", help="also print each variant")
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task is not None:
        options.task.write_text(json.dumps(asdict(compile_tree(json.load(sys.stdin)))))
        return 0
    keep, there = options.keep, None
    if options.other is not None and options.other.is_file():
        there = saved(options.other)
    elif options.other is not None:
        there = compiled_in(options.other.resolve(), options, keep and keep / "there")
    here = compiled_in(HERE, options, keep and keep / "here", there.variants if there is not None else ())
    if options.save is not None:
        options.save.write_text(json.dumps(asdict(here)))
    return report(here, there, every=options.all)


if __name__ == "__main__":
    sys.exit(main())
