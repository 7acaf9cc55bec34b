"""Values become dataclasses literally: whatever a text holds, it is neither interpolated nor a missing value."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING

from hookline.core.config.schema import build
from hookline.core.errors import ConfigError
from tests.fuzzing import examples

SECRET = "the-secret-of-the-environment"
TEXTS = st.text(st.characters()) | st.lists(
    st.sampled_from(["${", "}", "\\", "$", "oc.env:", "HF_TOKEN", "???", "⟦text 0⟧", "x" * 300, "\n"]), max_size=6
).map("".join)


@dataclass
class Inner:
    text: str = "inner"
    number: int = 1


@dataclass(frozen=True)
class Outer:
    text: str = "outer"
    texts: list[str] = field(default_factory=list)
    pair: tuple[str, ...] = ()
    anything: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    path: Path = Path("a")
    optional: str | None = None
    number: float = 0.0
    flag: bool = False


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(TEXTS.filter(lambda text: text != "???"))
@example("${oc.env:HF_TOKEN}")
@example("\\${a}")
@example("a\\\\${a}\\")
@example("⟦text 0⟧${")
def test_a_text_arrives_exactly_as_it_was(text: str) -> None:
    values = {
        "text": text,
        "texts": ["before", text, text],
        "pair": (text, "after"),
        "anything": {"a": text, "b": [1, {text: [text]}]},
        "inner": {"text": text},
        "path": text,
        "optional": text,
    }
    assert build(Outer, values, "it") == Outer(
        text=text,
        texts=["before", text, text],
        pair=(text, "after"),
        anything={"a": text, "b": [1, {text: [text]}]},
        inner=Inner(text),
        path=Path(text),
        optional=text,
    )


def test_a_dataclass_sees_the_text_itself_when_it_checks_its_values() -> None:
    @dataclass
    class Checking:
        text: str = ""

        def __post_init__(self) -> None:
            if self.text:
                raise ConfigError(f"got {self.text}")

    with pytest.raises(ConfigError, match=re.escape("got ${a}")):
        build(Checking, {"text": "${a}"}, "it")


@pytest.mark.parametrize("given", [Inner("${oc.env:HF_TOKEN}"), {"text": Path("${oc.env:HF_TOKEN}")}])
def test_texts_in_objects_are_literal_too(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert build(Outer, {"inner": given}, "it").inner == Inner("${oc.env:HF_TOKEN}")


@pytest.mark.parametrize("key", ["number", "flag", "inner", "texts", "anything", "inner.number"])
def test_a_text_for_a_field_of_another_type_is_shown_and_not_resolved(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    name, _, below = key.partition(".")
    text = "${oc.env:HF_TOKEN}"
    with pytest.raises(ConfigError) as caught:
        build(Outer, {name: {below: text} if below else text}, "it")
    message = str(caught.value)
    assert (
        message.startswith("it: " if key == "inner" else f"it.{key}") and SECRET not in message and "\n" not in message
    )
    if key == "number":
        assert message == "it.number='${oc.env:HF_TOKEN}' is not a float"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"number": "???"}, "it.number"),
        ({"text": "???"}, "it.text"),
        ({"texts": ["a", "???"]}, "it.texts[1]"),
        ({"anything": {"b": {"c": "???"}}}, "it.anything.b.c"),
        ({"inner": {"number": "???"}}, "it.inner.number"),
        ({"inner": "???"}, "it.inner"),
    ],
)
def test_the_mark_of_a_missing_value_is_refused_with_its_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, values, "it")
    assert str(caught.value) == f"{key}='???' stands for a value that is missing; set {key}=..."


def test_a_field_without_a_default_has_to_be_given() -> None:
    @dataclass
    class Needy:
        inner: str = MISSING

    with pytest.raises(ConfigError, match=r"it\.inner has no value and no default"):
        build(Needy, {}, "it")


@pytest.mark.parametrize("value", ["x" * 10**6, "a\nb", "${" * 10**5, ["y" * 10**6], {"z" * 10**6: 1}])
def test_an_error_is_one_line_of_sane_length_whatever_the_value(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, {"number": value}, "it")
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["⟦text 99⟧", "⟦text " + "9" * 5000 + "⟧"])
def test_a_key_that_looks_like_a_stand_in_is_only_a_key(key: str) -> None:
    assert build(Outer, {"anything": {key: "${"}}, "it").anything == {key: "${"}
    with pytest.raises(ConfigError, match=r"it\.inner"):
        build(Outer, {"inner": {key: "${"}}, "it")


@pytest.mark.slow
def test_values_nested_too_deeply_are_an_error_and_no_traceback() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError) as caught:
        build(Outer, {"anything": {"a": value}}, "it")
    assert str(caught.value).startswith("it: ") and "\n" not in str(caught.value)
