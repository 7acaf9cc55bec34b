"""Public names say what they are: fields and constants of the public packages, and the errors that they raise.

ruff asks for docstrings of modules, classes and functions; what it cannot see is held here. The parts of a suite's
package in core/testing are private, and left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hookline

ROOT = Path(__file__).parents[1]
PUBLIC = ("contracts", "layers", "testing")
"""Packages of docs/plugins.md#stability, beside single modules."""
MODULES = (
    "errors",
    "outputs",
    "parsing",
    "pooling_params",
    "sampling_params",
    "scheduling",
    "structured_outputs",
)
PATHS = (
    *(path for package in PUBLIC for path in sorted((ROOT / "core" / package).glob("*.py"))),
    *(ROOT / "core" / f"{module}.py" for module in MODULES),
)


def undescribed(tree: ast.Module) -> Iterator[str]:
    """Public constants and fields without a line of their own or a word in their class's docstring."""
    for statement, following in _pairs(tree.body):
        yield from (name for name in _assigned(statement) if not _is_text(following))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            words = re.findall(r"\w+", ast.get_docstring(node) or "")
            for statement, following in _pairs(node.body):
                if isinstance(statement, ast.AnnAssign) and not _is_text(following):
                    yield from (f"{node.name}.{name}" for name in _assigned(statement) if name not in words)


def unmentioned_errors(tree: ast.Module) -> Iterator[str]:
    """Public functions that raise an error which their docstring, or that of their class, does not tell of."""
    for node in ast.walk(tree):
        inner = node.body if isinstance(node, ast.ClassDef) else []
        doc = (ast.get_docstring(node) or "") if isinstance(node, ast.ClassDef) else ""
        for function in [*inner, *(tree.body if node is tree else [])]:
            if isinstance(function, ast.FunctionDef) and (not function.name.startswith("_") or doc):
                told = doc + (ast.get_docstring(function) or "")
                for error in _raised(function) - {"AssertionError", "NotImplementedError"}:
                    if "Raises" not in told and error not in told:
                        yield f"{function.name}: {error}"


def _pairs(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    return zip(body, [*body[1:], None], strict=True)


def _assigned(statement: ast.stmt) -> list[str]:
    single = [statement.target] if isinstance(statement, ast.AnnAssign) else []
    targets = statement.targets if isinstance(statement, ast.Assign) else single
    names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def _is_text(statement: ast.stmt | None) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _raised(function: ast.FunctionDef) -> set[str]:
    found, ahead = set(), [*function.body]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(ast.unparse(error))
        ahead += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef | ast.Lambda)]
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT / "core")))
def test_public_fields_constants_and_errors_are_described(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [*undescribed(tree), *unmentioned_errors(tree)] == []


def test_the_names_for_users_are_those_of_the_table() -> None:
    """And each of them is there."""
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `hookline` \| (.*) \|$", page, re.M)
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(hookline.__all__)
    assert all(hasattr(hookline, name) for name in hookline.__all__)


def test_the_search_of_the_site_finds_a_key_by_its_own_name() -> None:
    (separator,) = re.findall(r"search: \{separator: '(.+)'\}", (ROOT / "mkdocs.yml").read_text())
    assert re.split(separator, "serve.drain_s=30, torch 2.11") == ["serve", "drain_s", "30", "torch", "2.11"]


def test_what_is_not_described_would_be_found() -> None:
    code = (
        'LIMIT = 3\nTOLD = 4\n"""Most of it."""\n'
        'class Sizes:\n    """num_heads: of this rank."""\n    num_heads: int\n    head_dim: int\n'
        'def read():\n    """Read."""\n    raise ValueError\n'
    )
    tree = ast.parse(code)
    assert [*undescribed(tree), *unmentioned_errors(tree)] == ["LIMIT", "Sizes.head_dim", "read: ValueError"]
