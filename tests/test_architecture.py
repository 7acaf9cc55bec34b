"""The architecture that is checked by machine, beside pyproject.toml's contracts of imports.

Core knows no plugin, not even in a string; no module of core imports itself by a detour; examples and what `core.new`
writes use the public names alone; what is bare at import stays bare.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

from hookline.core import COMMANDS
from hookline.core.new.command import kinds, write_skeleton
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS
from tools.count_lines import NOT_SERVING, lines_by_package
from tools.feature_files import FEATURES, beyond_own, files_by_feature, in_step, words_of

ROOT = Path(__file__).parents[1]
CORE = sorted(ROOT.glob("core/**/*.py"))
ORDINARY_WORDS = {"torch", "triton", "ray"}
"""Names of entries that are also names of libraries core deals with."""
BARE = (
    "hookline",
    "hookline.__main__",
    "core",
    "core.run",
    "hookline.core.run.command",
    "hookline.core.bench.command",
    "hookline.core.simulate.command",
    "hookline.core.info.command",
    "hookline.core.serve.command",
    "hookline.core.batch.command",
    "hookline.core.config.settings",
    "hookline.core.config.compose",
    "hookline.core.sweep.sweep",
    "hookline.core.contracts",
    "hookline.core.scheduling",
    "hookline.core.launching",
    *(f"hookline.plugins.{kind}" for kind in ("models", "schedulers", "samplers", "kernels", "executors")),
)

PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/*.md")} - {ROOT / "docs" / "plugins_reference.md"})
HEAVY = {"torch", "triton", "transformers"}


def public_names() -> set[str]:
    """What plugins may import of core, as the contract in pyproject.toml says it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (one for one in settings["contracts"] if one["name"] == "plugins use the public names")
    return {imported for _, imported in (line.split(" -> ") for line in contract["ignore_imports"])}


def imports_in(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that some code imports, wherever in it: `a.b.c` for `from a.b import c`, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def import_graph(root: Path) -> dict[str, set[str]]:
    """Each module of core and the modules of core that it imports, those for type checkers included."""
    files = {".".join(("hookline", *path.relative_to(root).with_suffix("").parts)): path for path in core_files(root)}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}

    def imported(path: Path) -> Iterator[str]:
        for name in imports_in(parsed(path)):
            module = name if name in files else name.rpartition(".")[0]
            if module in files:
                yield module

    return {module: set(imported(path)) - {module} for module, path in files.items()}


def core_files(root: Path) -> list[Path]:
    return sorted(root.glob("core/**/*.py"))


def circles(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """Sets of modules each of which imports all of its set, at once or by a detour."""
    reached = {module: reachable(module, graph) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        circle = {other for other in reached[module] if module in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def reachable(start: str, graph: Mapping[str, Set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def private_imports(tree: ast.AST, public: Set[str]) -> list[str]:
    """What some code imports of core that may change without notice."""
    names = [name for name in imports_in(tree) if name.startswith(("hookline.core", "core."))]
    return [name for name in names if not any(is_of(name, one) for one in public)]


def private_attributes(tree: ast.AST) -> list[str]:
    """Attributes that begin with one underscore, of anything but the code's own classes; `os._exit` is documented."""
    own = {"self", "cls", "os", *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)]
    return [ast.unparse(node) for node in found if ast.unparse(node.value) not in own]


def attributes_set_from_outside(tree: ast.AST) -> list[str]:
    """What code sets on objects of other modules' classes, in the order of its lines.

    A module may fill in objects of its own classes, and a function what it has just made by calling a class. What
    modules of other packages have is theirs, too: `sys.stdout = …` is no business of a class of ours.
    """
    fields = own_fields(tree)
    foreign = {name for node in ast.walk(tree) for name in foreign_names(node)}
    found: dict[tuple[int, str], bool] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in (tree, *functions):
        made = (
            {name for node in ast.walk(scope) for name in names_of_made(node, foreign)} if scope is not tree else set()
        )
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                base, key = ast.unparse(node.value), (node.lineno, ast.unparse(node))
                is_ours = base in {"self", "cls"} | made or node.attr in fields or root_name(node) in foreign
                found[key] = found.get(key, True) and not is_ours
    return [text for (_, text), is_outside in sorted(found.items()) if is_outside]


def own_fields(tree: ast.AST) -> set[str]:
    """Names of what the classes of a module have: annotated or assigned in the class, or on `self` in its methods."""
    found: set[str] = set()
    for node in (inner for one in ast.walk(tree) if isinstance(one, ast.ClassDef) for inner in ast.walk(one)):
        targets = (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        )
        for part in (inner for target in targets for inner in ast.walk(target)):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
            elif isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("self", "cls"):
                found.add(part.attr)
    return found


def foreign_names(node: ast.AST) -> Iterator[str]:
    """The names that an import binds to what is not ours."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else None
        for one in node.names:
            if not (one.name if module is None else module).startswith("hookline"):
                yield one.asname or one.name.partition(".")[0]


def names_of_made(node: ast.AST, foreign: Set[str]) -> Iterator[str]:
    """The names that a statement gives to what it makes by calling a class, or anything of another package."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func).rpartition(".")[2].lstrip("_")
        if called[:1].isupper() or root_name(node.value) in foreign:
            yield from (part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name))


def root_name(node: ast.expr) -> str:
    """`a` of `a.b().c[0]`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return ""
    return node.id


def is_of(name: str, public: str) -> bool:
    """Whether an imported name is a public module, a name in it, or below one that is public whole (`x.**`)."""
    if public.endswith(".**"):
        return name.startswith(public.removesuffix("**"))
    return public in (name, name.rpartition(".")[0])


@functools.cache
def plugin_names() -> set[str]:
    host = PluginHost.load(environ={})
    ours = [entry.name for entry in host.registry if entry.origin.distribution == "hookline"]
    assert ours, "the hookline distribution is not installed: pip install -e ."
    return {*ours, *(preset.name for preset in host.presets)} - ORDINARY_WORDS


WORDS_OF_FORMATS = {"tokenizer_growth.py": {"suffix"}}
"""Keys in files of others that a plugin is called, too: tokenizer.json's decoder BPEDecoder has a `suffix`."""


def strings_in(path: Path) -> Iterator[tuple[int, str]]:
    """String literals that the code uses: docstrings may explain with an example."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def mentions(path: Path, names: set[str]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {text!r}" for line, text in strings_in(path) if text in names]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_mentions_no_plugin_by_name(path: Path) -> None:
    assert mentions(path, plugin_names() - WORDS_OF_FORMATS.get(path.name, set())) == []


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_mentions_no_module_of_the_plugins(path: Path) -> None:
    for _, text in strings_in(path):
        assert not text.startswith(
            tuple(f"hookline.plugins.{kind}" for kind in ("models", "schedulers", "samplers", "kernels"))
        )


def test_a_plugin_name_in_core_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "core" / "guilty.py"
    path.parent.mkdir()
    path.write_text('"""A docstring may say gumbel."""\nif option == "gumbel":\n    """gumbel"""\n')
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert mentions(path, {"gumbel"}) == ["core/guilty.py:2: 'gumbel'"]


@pytest.mark.parametrize(
    "module", [*BARE, *(f"hookline.plugins.{kind}" for kind in ("models", "schedulers", "samplers"))]
)
def test_importing_it_imports_no_torch(module: str) -> None:
    assert_bare(f"import {module}")


def test_front_ends_of_the_server_and_made_up_engines_import_no_torch() -> None:
    """Two thirds of a front end's start, and its memory, were torch's."""
    processes = "front_main", "engine_link", "remote_client", "replica_client"
    modules = [*(f"serve.processes.{name}" for name in processes), "serve.http.app", "serve.http.server"]
    assert_bare("\n".join(f"import hookline.core.{name}" for name in [*modules, "tokenizer.codec", "testing.serving"]))


def test_loading_all_plugins_imports_no_torch() -> None:
    assert_bare(
        "from hookline.core.plugin.host import PluginHost\nfrom hookline.core.config.settings import validate\n"
        "host = PluginHost.load(environ={})\nassert not host.problems, host.problems\nvalidate({}, host)"
    )


def test_the_entry_point_of_a_run_imports_no_library() -> None:
    assert_bare("import hookline.core.run.command", "omegaconf", "hydra", "pluggy", "numpy")


def test_the_package_of_every_command_imports_the_standard_library_alone() -> None:
    """Child processes import it again, and a mistake in an argument is answered before anything large is there."""
    for path in (ROOT / "core" / command / "__init__.py" for command in COMMANDS):
        top_level = ast.Module(
            [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        assert {name.partition(".")[0] for name in imports_in(top_level)} <= sys.stdlib_module_names, path


@pytest.mark.slow
def test_reading_the_command_line_imports_no_numpy() -> None:
    """A mistake in an argument is answered before anything large is imported."""
    assert_bare(
        "from hookline.core.run.command import main\nassert main(['sampling.top_kk=1', 'prompt=x']) == 2\n"
        "try: main(['--help'])\nexcept SystemExit: pass",
        "numpy",
    )


@pytest.mark.slow
def test_listing_what_is_installed_imports_nothing_large() -> None:
    assert_bare(
        "from hookline.core.info.command import main\nassert main([]) == 0", "transformers", "hydra", "numpy", "asyncio"
    )


@pytest.mark.slow
def test_text_in_and_out_of_an_engine_imports_no_transformers() -> None:
    """Its import was a fifth of a start of the bundled checkpoint."""
    code = (
        "import sys\nfrom hookline.core.run.command import main\n"
        "assert main(['prompt=x', 'sampling.max_tokens=2']) == 0\nassert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr


def assert_bare(code: str, *further: str) -> None:
    check = f"import sys\nfound = {{'torch', 'triton', *{further!r}}} & set(sys.modules)\nassert not found, found"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_default_that_exists(kind: str) -> None:
    from hookline.core.plugin.presets import default_options

    name = default_options()[kind]
    assert name == "auto" or PluginHost.load(environ={}).choose(kind, name).name == name


@pytest.mark.slow
def test_no_module_of_core_imports_itself_by_a_detour() -> None:
    assert circles(import_graph(ROOT)) == []


@pytest.mark.slow
def test_a_circle_would_be_found_even_if_it_is_for_type_checkers_alone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "core", tmp_path / "core", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "core" / "errors.py").open("a") as file:
        file.write("\nif TYPE_CHECKING:\n    from hookline.core.util import text\n")
    with (tmp_path / "core" / "util" / "text.py").open("a") as file:
        file.write("\ndef planted():\n    from hookline.core.errors import ConfigError\n")
    assert {"hookline.core.errors", "hookline.core.util.text"} in circles(import_graph(tmp_path))


@pytest.mark.parametrize("path", sorted((ROOT / "core" / "contracts").glob("*.py")), ids=lambda path: path.name)
def test_contracts_import_torch_for_type_checkers_alone(path: Path) -> None:
    class Runs(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.If | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else node

    left = Runs().visit(parsed(path))
    assert {name.partition(".")[0] for name in imports_in(left)} & HEAVY == set()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT / "examples"))
)
def test_examples_use_the_public_names(path: Path) -> None:
    tree = parsed(path)
    assert private_imports(tree, public_names()) == private_attributes(tree) == []
    built_in = {name for name in imports_in(tree) if name.startswith("hookline.plugins")}
    assert built_in <= {"hookline.plugins.kernels.TritonKernels"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_the_documents_show_uses_the_public_names(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert [name for block in blocks for name in private_imports(ast.parse(block), public_names())] == []


@pytest.mark.parametrize("kind", kinds())
def test_what_core_new_writes_uses_the_public_names(kind: str, tmp_path: Path) -> None:
    folder = write_skeleton(kind, "mine", tmp_path / "new")
    assert [name for path in folder.rglob("*.py") for name in private_imports(parsed(path), public_names())] == []


OTHER_SPELLING = re.compile(
    r"(?<![\w/.])core\.(contracts|layers|scheduling|parsing|testing|outputs|errors|sampling_params)\b"
)


def test_what_plugin_authors_read_names_modules_as_they_are_imported() -> None:
    """`core.contracts`, as they are called inside the repository, cannot be imported."""
    patterns = ("core/contracts/*.py", "core/testing/**/*.py", "core/layers/*.py", "core/new/templates/**/*.txt")
    paths = [path for pattern in (*patterns, "examples/**/*.py", "examples/**/*.md") for path in ROOT.glob(pattern)]
    found = [path for path in (*paths, *PAGES) if OTHER_SPELLING.search(path.read_text(encoding="utf-8"))]
    assert len(paths) > 50 and found == []


def test_a_private_import_would_be_found() -> None:
    code = (
        "from hookline import LLM\nfrom hookline.core.contracts import Plan\nfrom hookline.core import errors\n"
        "import hookline.core.testing.fakes\nfrom hookline.core.engine.engine import Engine\n"
        "def f():\n    from hookline.core.distributed import ranks\nfrom core.layers import Linear\n"
    )
    found = ["core.layers.Linear", "hookline.core.distributed.ranks", "hookline.core.engine.engine.Engine"]
    assert sorted(private_imports(ast.parse(code), public_names())) == found
    assert private_attributes(ast.parse("self._a = self.b._c + __name__.d")) == ["self.b._c"]


MOST_SET_FROM_OUTSIDE = 20
"""Attributes that core sets on objects of other modules' classes; mostly objects of other packages. May sink alone."""


@pytest.mark.slow
def test_objects_change_by_their_own_methods() -> None:
    found = {path: attributes_set_from_outside(parsed(path)) for path in core_files(ROOT)}
    told = [f"{path.relative_to(ROOT)}: {text}" for path, texts in found.items() for text in texts]
    assert len(told) <= MOST_SET_FROM_OUTSIDE, "\n".join(told)


def test_an_attribute_set_from_outside_would_be_found() -> None:
    code = (
        "import sys\nfrom hookline.core.engine.engine import Engine\n"
        "class Own:\n    def __init__(self, other):\n"
        "        self.size, self.other = 1, other\n        other.is_mine = True\n"
        "def fill(own, engine):\n    own.size += 1\n    sys.stdout = None\n    own.other.executor = None\n"
        "    made = Engine()\n    made.clock = None\n"
        "    made.queue.length, engine.names[0].text = 1, ''\n    del engine.clock\n"
    )
    found = ["other.is_mine", "own.other.executor", "engine.names[0].text", "made.queue.length", "engine.clock"]
    assert attributes_set_from_outside(ast.parse(code)) == found


def test_the_sizes_that_are_quoted_are_those_of_the_tool_within_a_tenth() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = lines_by_package()
    for row, counted in (("are plugins", sum(lines.values())), ("`core/serve`", lines["serve"])):
        (quoted,) = re.findall(rf"^\| .*{row} \| ([\d,]+) \|$", page, re.M)
        assert abs(int(quoted.replace(",", "")) - counted) <= counted / 10, f"{row}: {quoted}, counted {counted}"


def test_what_serves_imports_nothing_that_is_left_out_of_the_count_but_two_names() -> None:
    graph = import_graph(ROOT)
    packages = [(importer.split(".")[2:3], one.split(".")[2]) for importer, found in graph.items() for one in found]
    found = {(own[0], other) for own, other in packages if own and own[0] not in NOT_SERVING and other in NOT_SERVING}
    assert {one for one in found if one[0] != "commands"} == {("serving", "batch"), ("run", "sweep")}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_files_that_are_quoted_for_a_feature_are_those_of_the_tool(feature: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ((told, told_in_step),) = re.findall(rf"^\| {feature}\b.* \| (\d+) \| (\d+) \|$", page, re.M)
    files = files_by_feature()[feature]
    assert abs(int(told) - len(files)) <= 2, files
    assert int(told_in_step) >= len(found := in_step(files)), found


def test_speculation_is_named_in_few_files_beyond_its_own() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"is named in (\d+) files\s+beyond its own", page)
    files = beyond_own("drafts", files_by_feature()["drafts"])
    assert len(files) <= int(told) <= 15, files


def test_a_name_and_a_string_are_found_and_prose_is_not() -> None:
    code = '''"""Pools."""\nimport pooling\nclass MaskRow:\n    """A tap."""\n    kind = "the tapped"  # processors\n'''
    words = words_of(code)
    assert [feature for feature, told in FEATURES.items() if re.search(told, words, re.IGNORECASE)] == ["masks", "taps"]


@pytest.mark.slow
def test_the_path_of_a_step_that_is_quoted_is_that_of_the_tool_within_a_tenth() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "step_path.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
    for row, name in (("decode step", "decode step"), ("admission and prefill step", "prefill step")):
        quoted = re.findall(rf"^\| {row} \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.M)[0]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(name))
        counted = re.findall(r"(?<![\d(])([\d,]+) (?:files|lines|functions)", line)
        for one, other in zip(quoted, counted, strict=True):
            told, found = (int(text.replace(",", "")) for text in (one, other))
            assert abs(told - found) <= max(2, found / 10), f"{name}: {told} is quoted, {found} counted: {line}"


def test_every_file_that_the_page_names_exists_but_those_of_planned_features() -> None:
    page, _, planned = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Planned features")
    assert planned
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page))
    folders = (ROOT, ROOT / "core", ROOT / "core" / "serve")
    missing = {name for name in named if not any((folder / name).is_file() for folder in folders)}
    assert len(named) > 40 and not missing


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
PLANTED = {
    "imports of core point down": ("core/errors.py", f"{FOR_TYPES}    from hookline.core.engine.engine import Engine"),
    "imports of the server point down": (
        "core/serve/errors.py",
        f"{FOR_TYPES}    from hookline.core.serve import http",
    ),
    "imports of the worker point down": (
        "core/worker/request_table.py",
        f"{FOR_TYPES}    from hookline.core.worker import stages",
    ),
    "the host side of a step knows no torch": ("core/engine/engine.py", "import torch"),
    "plugins use the public names": ("plugins/schedulers/chunked.py", "from hookline.core.engine.engine import Engine"),
    "core knows no plugin": ("core/engine/engine.py", "from hookline.plugins.schedulers import chunked"),
    "the kinds do not know each other": ("plugins/schedulers/chunked.py", "from hookline.plugins import samplers"),
    "imports of the kernels point down": (
        "plugins/kernels/triton_launch.py",
        f"{FOR_TYPES}    from hookline.plugins.kernels.norms import triton_norms",
    ),
}


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in ("core", "plugins", "conf", "hookline"):
        ignored = shutil.ignore_patterns("__pycache__", "qwen3_tiny")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


@pytest.fixture(scope="module")
def before_planting(copied_tree: Path) -> str:
    return linted(copied_tree)


@pytest.mark.slow
@pytest.mark.parametrize("contract", PLANTED)
def test_the_contracts_hold_and_an_import_that_breaks_one_is_found(
    contract: str, copied_tree: Path, before_planting: str
) -> None:
    assert f"{contract} KEPT" in before_planting
    name, line = PLANTED[contract]
    path = copied_tree / name
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    try:
        assert f"{contract} BROKEN" in linted(copied_tree)
    finally:
        path.write_text(before)


def linted(tree: Path) -> str:
    pytest.importorskip("importlinter", reason="needs the extra: pip install hookline[dev]")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, timeout=240, check=False
    ).stdout
