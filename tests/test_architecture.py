"""Core knows no plugin, not even in a string, and what is bare at import stays bare."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS

ROOT = Path(__file__).parents[1]
CORE = sorted(path for path in ROOT.glob("core/**/*.py"))
ORDINARY_WORDS = {"torch", "triton"}
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
    "hookline.core.config.settings",
    "hookline.core.config.compose",
    "hookline.core.sweep.sweep",
    "hookline.core.contracts",
    "hookline.core.scheduling",
    *(f"hookline.plugins.{kind}" for kind in ("models", "schedulers", "samplers", "kernels")),
)


def plugin_names() -> set[str]:
    host = PluginHost.load(environ={})
    ours = [entry.name for entry in host.registry if entry.origin.distribution == "hookline"]
    assert ours, "the hookline distribution is not installed: pip install -e ."
    return {*ours, *(preset.name for preset in host.presets)} - ORDINARY_WORDS


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
    assert mentions(path, plugin_names()) == []


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


def test_loading_all_plugins_imports_no_torch() -> None:
    assert_bare(
        "from hookline.core.plugin.host import PluginHost\nfrom hookline.core.config.settings import validate\n"
        "host = PluginHost.load(environ={})\nassert not host.problems, host.problems\nvalidate({}, host)"
    )


def test_the_entry_point_imports_the_standard_library_alone() -> None:
    assert_bare("import hookline.core.run", "omegaconf", "hydra", "pluggy", "numpy")


def test_reading_the_command_line_imports_no_numpy() -> None:
    """A mistake in an argument is answered before anything large is imported."""
    assert_bare(
        "from hookline.core.run import main\nassert main(['sampling.top_kk=1', 'prompt=x']) == 2\n"
        "try: main(['--help'])\nexcept SystemExit: pass",
        "numpy",
    )


def assert_bare(code: str, *further: str) -> None:
    check = f"import sys\nfound = {{'torch', 'triton', *{further!r}}} & set(sys.modules)\nassert not found, found"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_default_that_exists(kind: str) -> None:
    from hookline.core.plugin.presets import default_options

    name = default_options()[kind]
    assert name == "auto" or PluginHost.load(environ={}).choose(kind, name).name == name
