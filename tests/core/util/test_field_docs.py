"""The docstrings under the fields of dataclasses, as a listing shows them."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass, make_dataclass
from pathlib import Path

import pytest

from hookline.core.util.field_docs import field_docs


@dataclass
class Base:
    size: int = 1
    """How large
    it is."""
    bare: int = 2
    name: str = ""
    """Of the base."""


@dataclass
class Derived(Base):
    name: str = "x"
    """Of the derived one."""


def test_a_class_s_own_docstring_goes_before_that_of_its_base() -> None:
    assert field_docs(Derived) == {"size": "How large it is.", "name": "Of the derived one."}


def test_a_class_within_a_function_is_found_and_not_mistaken_for_its_namesake() -> None:
    @dataclass
    class Base:
        size: int = 1
        """Of the inner one."""

    assert field_docs(Base) == {"size": "Of the inner one."}


def test_a_class_without_source_has_no_docstrings() -> None:
    assert field_docs(int) == field_docs(make_dataclass("Made", ["size"])) == {}


def test_a_file_is_parsed_once_for_all_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time of `core.info` was spent on parsing the same files again."""
    (tmp_path / "two_configs.py").write_text(
        "class First:\n    a: int = 1\n    'One.'\n\nclass Second(First):\n    b: int = 2\n    'Two.'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    two = importlib.import_module("two_configs")
    parsed: list[object] = []
    real = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *given, **named: parsed.append(given) or real(*given, **named))
    assert (field_docs(two.First), field_docs(two.Second)) == ({"a": "One."}, {"a": "One.", "b": "Two."})
    assert len(parsed) == 1
