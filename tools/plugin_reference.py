"""Writes docs/plugins_reference.md from core's sources: every hook, contract, layer and conformance suite, as it is.

Run `python tools/plugin_reference.py` after changing one; a test compares. Reads source files and imports nothing of
Hookline.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "plugins_reference.md"
KINDS = (
    "model",
    "cache",
    "weights",
    "quantized",
    "quantization",
    "kernels",
    "norms",
    "latents",
    "batch",
    "ranks",
    "exchange",
    "sampler",
    "extension",
    "processor",
    "grammar",
    "pooler",
    "drafter",
    "draft_head",
    "scheduler",
    "observer",
    "parser",
    "api",
    "executor",
    "needs",
)
"""Modules of core/contracts, in the order of the page."""
LAYERS = (
    "residual", "stage", "linear", "norm", "vocab", "experts", "expert_products", "clamped_experts", "weights",
    "recurrent", "rope_config", "rope", "config_values",
)  # fmt: skip
HEAD = """# Reference: hooks, contracts, layers

Generated from the sources by `python tools/plugin_reference.py`; a test keeps it true. [plugins.md](plugins.md) says
how to use them, and what may change when. Contracts are imported from `hookline.core.contracts`, layers from
`hookline.core.layers`, what policies are made of from `hookline.core.scheduling`, what parsers are made of from
`hookline.core.parsing`, what API surfaces are made of from `hookline.core.serving`, what executors are made of from
`hookline.core.launching`, outputs from `hookline.core.outputs`, errors from `hookline.core.errors`, and each suite from
its module of `hookline.core.testing`.
"""
SUITES = {
    "SchedulerSuite": ("scheduler_suite/suite.py",),
    "SamplerSuite": ("sampler_suite/suite.py",),
    "ProcessorSuite": ("processor_suite.py",),
    "ExtensionSuite": ("extension_suite.py",),
    "GrammarSuite": ("grammar_suite.py",),
    "PoolerSuite": ("pooler_suite.py",),
    "DrafterSuite": ("drafter_suite.py",),
    "QuantizationSuite": ("quantization_suite.py",),
    "KernelsSuite": ("kernels_suite/suite.py", "kernels_suite/cases.py", "kernels_suite/invariance.py"),
    "ModelSuite": ("model_suite/suite.py",),
    "ParserSuite": ("parser_suite.py",),
    "ApiSuite": ("api_suite.py",),
    "ExecutorSuite": ("executor_suite.py",),
}
"""Conformance suite -> modules of core/testing with its class and that of the attributes it inherits."""
OVERRIDDEN = ("make", "distribution", "hf_config", "reference", "refused_configs", "expected", "write")
"""Methods of suites that an author writes or may write."""


def reference() -> str:
    """The whole file."""
    hooks = _module("core/contracts/hooks.py")
    lines = [HEAD, "## Hooks\n"]
    for node in hooks.body:
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "hookspec" for one in node.decorator_list):
            lines += _function(node)
    registrar = next(node for node in hooks.body if isinstance(node, ast.ClassDef) and node.name == "Registrar")
    lines += _class(registrar)
    for kind in KINDS:
        lines += _section(f"Contracts: {kind}", f"core/contracts/{kind}.py")
    lines += _section("Contracts: options", "core/util/ranges.py", only=("bounded",))
    lines += _section("Contracts: optional methods", "core/contracts/optional.py", only=("is_offered",))
    lines += _section("What policies are made of", "core/scheduling.py")
    lines += _section("What parsers are made of", "core/parsing.py")
    for facade, what in (("serving", "API surfaces"), ("launching", "executors")):
        for node in _module(f"core/{facade}.py").body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                path, names = node.module.removeprefix("hookline."), [one.name for one in node.names]
                title = f"What {what} are made of: {path.rpartition('.')[2]}"
                lines += _section(title, f"{path.replace('.', '/')}.py", only=names)
    for name in LAYERS:
        lines += _section(f"Layers: {name}", f"core/layers/{name}.py")
    lines += _section("Layers: parts", "core/distributed/partition.py", only=("even_part",))
    lines.append("## Sampling parameters\n")
    for node in _module("core/sampling_params.py").body:
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams":
            lines += _class(node)
    lines += _section("Structured outputs", "core/structured_outputs.py")
    lines += _section("Outputs", "core/outputs.py")
    lines += _section("Errors", "core/errors.py")
    lines += _suites()
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, path: str, only: Sequence[str] = ()) -> Iterator[str]:
    """A module's public classes and functions; `only`: those of these names."""
    module = _module(path)
    yield from (f"## {title}\n", inspect.cleandoc(ast.get_docstring(module) or ""), "")
    for node in module.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        if not only or node.name in only:
            yield from _class(node) if isinstance(node, ast.ClassDef) else _function(node)


def _suites() -> Iterator[str]:
    yield "## Conformance suites\n"
    yield "Subclass one in your tests. The attributes are what you may set, the methods what you write or may write.\n"
    for name, files in SUITES.items():
        classes = [node for file in files for node in _module(f"core/testing/{file}").body if _is_suite(node, name)]
        yield f"### {name}\n"
        module = files[0].partition("/")[0].removesuffix(".py")
        yield f"```python\nfrom hookline.core.testing.{module} import {name}\n```\n"
        yield f"{inspect.cleandoc(ast.get_docstring(classes[0]) or '')}\n"
        members = [*(field for one in classes for field in _fields(one))]
        for method in (method for one in classes for method in one.body if isinstance(method, ast.FunctionDef)):
            if method.name in OVERRIDDEN:
                members.append(f"- `{_signature(method)}`: {_doc(method, fenced=False)}")
        yield "\n".join(members) + "\n"


def _is_suite(node: ast.stmt, name: str) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and node.name in (name, "AttentionCases", "InvarianceCases")


def _module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _function(node: ast.FunctionDef) -> list[str]:
    return [f"### {node.name}\n", f"```python\n{_signature(node)}\n```\n", _doc(node), ""]


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(map(ast.unparse, node.bases))
    yield f"### {node.name}\n"
    yield f"```python\nclass {node.name}{f'({bases})' if bases else ''}\n```\n\n{_doc(node)}\n"
    members = [*_fields(node), *_methods(node)]
    if members:
        yield "\n".join(members) + "\n"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for statement, following in pairwise([*node.body, ast.Pass()]):
        if isinstance(statement, ast.AnnAssign):
            text = following.value if isinstance(following, ast.Expr) else None
            doc = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            yield f"- `{ast.unparse(statement)}`" + (f": {' '.join(doc.split())}" if doc else "")
        elif isinstance(statement, ast.Assign):
            yield f"- `{ast.unparse(statement)}`"


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and _doc(method) and not re.match("_[^_]", method.name):
            marks = "".join(f"@{ast.unparse(one)} " for one in method.decorator_list)
            yield f"- `{marks}{_signature(method)}`: {' '.join(_doc(method, fenced=False).split())}"


def _signature(node: ast.FunctionDef) -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){result}"


def _doc(node: ast.FunctionDef | ast.ClassDef, *, fenced: bool = True) -> str:
    """The docstring; what is laid out in columns stays so."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    summary, _, rest = text.partition("\n\n")
    return f"{summary}\n\n```contract\n{rest}\n```" if fenced and rest else text


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
