import json
import logging
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookline.core.contracts import ModelConfig, Needs, bounded, hookimpl
from hookline.core.errors import ConfigError, PluginError
from hookline.core.plugin.check_entry import is_plain_schema
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers
from hookline.core.plugin.problems import Phase, Problem
from hookline.core.plugin.sources import in_development, installed
from tests.core.plugin_fakes import (
    PatientConfig,
    full_plugin,
    host_with,
    offering_presets,
    plugin_module,
    preset_package,
    registering,
    scheduler_plugin,
    source,
)


def only_problem(plugin: ModuleType | Any) -> Problem:
    host = PluginHost.load([source(plugin)], {})
    assert len(host.registry.of_kind("scheduler")) == 0
    assert len(host.problems) == 1
    return host.problems[0]


def cause_of_config(config: Any, kind: str = "scheduler") -> str:
    hook = {"model": "register_models", "scheduler": "register_schedulers"}[kind]
    problem = only_problem(plugin_module(**{hook: registering(kind, "mine", config=config)}))
    assert problem.stage is Phase.REGISTER
    assert problem.wanted == ((kind, "mine"),)
    return problem.cause


# --- sound plugins


def test_a_registered_name_can_be_chosen() -> None:
    entry = host_with(scheduler_plugin("mine", config=PatientConfig, help="h")).choose("scheduler", "mine")
    assert (entry.kind, entry.name, entry.help, entry.config) == ("scheduler", "mine", "h", PatientConfig)
    assert str(entry.origin) == "plugin 'plugin0' (their-dist 1.2)"


def test_one_plugin_may_register_all_kinds() -> None:
    host = host_with(full_plugin())
    assert [host.registry.names(kind) for kind in ("model", "scheduler", "sampler", "kernels")] == [
        ["tiny"],
        ["hasty", "patient"],
        ["dice"],
        ["quick", "slow"],
    ]
    assert host.problems == []


def test_choosing_imports_nothing_until_the_target_is_loaded() -> None:
    entry = host_with(scheduler_plugin("mine", target="no.such.module:Thing")).choose("scheduler", "mine")
    with pytest.raises(PluginError, match=r"scheduler 'mine' of plugin 'plugin0' \(their-dist 1.2\) cannot be loaded"):
        entry.load()


def test_observers_are_found_and_called() -> None:
    seen: list[Any] = []

    def on_step_end(stats: Any) -> None:
        seen.append(stats)

    host = host_with(plugin_module(on_step_end=hookimpl(on_step_end)))
    observers = Observers(host.manager)
    observers.notify("on_request_end", output=2)
    observers.notify("on_step_end", stats=3)
    assert seen == [3]


def test_hooks_of_a_plugin_are_listed() -> None:
    host = host_with(full_plugin())
    assert host.hooks_of(host.plugins[0]) == [
        "register_kernels",
        "register_models",
        "register_samplers",
        "register_schedulers",
    ]


def test_replace_takes_the_place_of_an_entry_openly() -> None:
    host = host_with(scheduler_plugin("same"), scheduler_plugin("same", help="new", replace=True))
    assert host.choose("scheduler", "same").help == "new"
    assert host.problems == []


def test_a_hook_may_be_named_with_specname() -> None:
    def anything(register: Any) -> None:
        register("mine", "fake_package.fake:Fake")

    module = plugin_module(anything=hookimpl_named("register_schedulers")(anything))
    assert host_with(module).registry.names("scheduler") == ["mine"]


def hookimpl_named(name: str) -> Any:
    return lambda function: hookimpl(function, specname=name)


# --- broken plugins


def test_an_import_error_is_reported_with_its_distribution_and_cause() -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named\n'flash_thing'")

    problem = only_problem(load)
    assert problem.stage is Phase.IMPORT
    assert (problem.plugin, problem.distribution, problem.version) == ("theirs", "their-dist", "1.2")
    assert problem.cause == "ModuleNotFoundError: No module named 'flash_thing'"


def test_a_module_that_exits_at_import_stops_nobody() -> None:
    def load() -> None:
        raise SystemExit(3)

    assert only_problem(load).cause == "SystemExit: 3"


def test_a_missing_api_version_is_reported() -> None:
    module = ModuleType("bare")
    assert only_problem(module).cause == "it states no API_VERSION; put API_VERSION = 2 at its top"


def test_a_wrong_api_version_is_reported() -> None:
    problem = only_problem(plugin_module(API_VERSION=99))
    assert problem.stage is Phase.VERSION
    assert problem.cause == "it was written for API_VERSION 99, this Hookline has 2"


def test_a_misspelt_hook_is_reported_with_the_near_miss() -> None:
    def register_schedulrs(register: Any) -> None: ...

    problem = only_problem(plugin_module(register_schedulrs=hookimpl(register_schedulrs)))
    assert problem.stage is Phase.HOOKS
    assert problem.cause.startswith("no hook named 'register_schedulrs'. Did you mean 'register_schedulers'? Hooks: ")


def test_a_hook_without_the_marker_is_reported() -> None:
    def register_schedulers(register: Any) -> None: ...

    module = plugin_module(register_schedulers=register_schedulers, register_samplers=registering("sampler", "s"))
    assert only_problem(module).cause.startswith("function 'register_schedulers' is not marked with @hookimpl")


def test_a_hook_with_other_arguments_is_reported() -> None:
    def register_schedulers(register: Any, extra: int) -> None: ...

    problem = only_problem(plugin_module(register_schedulers=hookimpl(register_schedulers)))
    assert problem.stage is Phase.HOOKS
    assert "register_schedulers" in problem.cause and "extra" in problem.cause
    assert "\n" not in problem.cause


def test_a_plugin_without_any_hook_is_reported() -> None:
    assert only_problem(plugin_module()).cause.startswith("it implements no hook; mark a function with @hookimpl: ")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("\nimport no_such_module\n", "No module named 'no_such_module' (importing.py:2)"),
        ("from hookline.core.contracts import Smapler\n", "__init__.py) (importing.py:1)"),
        ("import json\njson.loads('x')\n", "Expecting value: line 1 column 1 (char 0) (importing.py:2)"),
        ("def (\n", "SyntaxError: invalid syntax (importing.py, line 1)"),
        (None, "No module named 'importing'"),
    ],
)
def test_an_import_that_fails_is_reported_with_its_line(
    text: str | None, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "importing.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    host = PluginHost.load(in_development({"HOOKLINE_PLUGINS": "importing"}), {})
    assert host.problems[0].cause.endswith(cause)


def test_what_a_plugin_prints_while_it_is_loaded_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    def config_packages() -> Any:
        print("loaded")
        return []

    assert not host_with(plugin_module(config_packages=hookimpl(config_packages))).problems
    assert capsys.readouterr() == ("", "loaded\n")


def test_an_exception_in_a_hook_is_reported_with_all_names_wanted() -> None:
    def register_models(register: Any) -> None:
        raise KeyError("lost")

    module = plugin_module(
        register_models=hookimpl(register_models), register_schedulers=registering("scheduler", "mine")
    )
    problem = only_problem(module)
    line = register_models.__code__.co_firstlineno + 1
    assert problem.cause == f"register_models raised KeyError: 'lost' (test_host.py:{line})"
    assert problem.wanted == (("scheduler", "mine"),)


def test_a_register_call_with_an_unknown_argument_is_reported() -> None:
    problem = only_problem(scheduler_plugin("mine", prority=3))
    assert "raised TypeError: register() got an unexpected keyword argument 'prority'" in problem.cause


def test_a_plugin_that_raises_on_every_attribute_stops_nobody() -> None:
    class Hostile:
        API_VERSION = 2

        @property
        def register_models(self) -> None:
            raise RuntimeError("no")

    host = PluginHost.load([source(lambda: Hostile(), "hostile"), source(scheduler_plugin("mine"))], {})
    assert host.registry.names("scheduler") == ["mine"]
    assert [problem.plugin for problem in host.problems] == ["hostile"]


def test_a_duplicate_name_disables_the_later_plugin_alone(caplog: pytest.LogCaptureFixture) -> None:
    host = host_with(scheduler_plugin("same", help="first"), scheduler_plugin("same", "other"))
    assert host.problems[0].cause == (
        "scheduler 'same' is already registered by plugin 'plugin0' (their-dist 1.2); choose another name, or pass "
        "replace=True"
    )
    assert host.choose("scheduler", "same").help == "first"
    assert "not from broken plugin 'plugin1'" in caplog.text
    assert host.registry.find("scheduler", "other") is None


def test_a_name_registered_twice_by_one_plugin_is_reported() -> None:
    assert only_problem(scheduler_plugin("mine", "mine")).cause == (
        "scheduler 'mine' is registered twice by this plugin"
    )


@pytest.mark.parametrize("target", ["module.Class", "a b:C", "module:", "", 3])
def test_a_bad_target_is_reported(target: Any) -> None:
    problem = only_problem(scheduler_plugin("mine", target=target))
    assert problem.cause == f"scheduler 'mine': target {target!r} is not of the form 'package.module:Class'"


@pytest.mark.parametrize("name", ["a/b", "", "9", "a.b", "a b", 7])
def test_a_name_that_cannot_be_an_option_is_reported(name: Any) -> None:
    assert "a name consists of letters, digits, _ and -" in only_problem(scheduler_plugin(name)).cause


def test_the_name_auto_is_reserved() -> None:
    assert "reserved" in only_problem(scheduler_plugin("auto")).cause


@pytest.mark.parametrize(("argument", "value"), [("needs", "cuda"), ("priority", "high"), ("help", 3)])
def test_a_registration_argument_of_the_wrong_type_is_reported(argument: str, value: Any) -> None:
    problem = only_problem(scheduler_plugin("mine", **{argument: value}))
    assert problem.cause.startswith(f"scheduler 'mine': {argument}={value!r} is not of type ")


@pytest.mark.parametrize(
    ("needs", "fault"),
    [
        (Needs(devices="cuda"), "needs.devices='cuda' is not a tuple of strings"),  # type: ignore[arg-type]
        (Needs(dtypes=[1]), "needs.dtypes=[1] is not a tuple of strings"),  # type: ignore[arg-type]
        (Needs(packages=(3,)), "needs.packages=(3,) is not a tuple of strings"),  # type: ignore[arg-type]
        (Needs(block_size_multiple=0), "needs.block_size_multiple=0 is not a whole number of at least 1"),
        (Needs(head_dims=("64",)), "needs.head_dims=('64',) is not a tuple of whole numbers"),  # type: ignore[arg-type]
        (Needs(attention="window"), "needs.attention='window' is not a tuple of strings"),  # type: ignore[arg-type]
        (
            Needs(attention=("sinks", "windows")),
            "needs.attention has 'windows'. Did you mean 'window'? There is: window, scale, softcap, sinks",
        ),
        (Needs(attention=("alibi",)), "needs.attention has 'alibi'. There is: window, scale, softcap, sinks"),
        (Needs(compute_capability=9), "needs.compute_capability=9 is not a pair"),  # type: ignore[arg-type]
    ],
)
def test_malformed_needs_are_reported_before_anything_is_compared_with_them(needs: Needs, fault: str) -> None:
    assert fault in only_problem(scheduler_plugin("mine", needs=needs)).cause


def test_a_config_that_is_no_dataclass_is_reported() -> None:
    assert cause_of_config(dict) == "scheduler 'mine': config dict is not a dataclass"


def test_a_config_field_without_default_is_reported() -> None:
    @dataclass
    class Bare:
        wait_ms: float

    assert cause_of_config(Bare) == "scheduler 'mine': config Bare has no default for field 'wait_ms'"


def test_a_config_field_called_name_is_reported() -> None:
    @dataclass
    class Named:
        name: str = "x"

    assert "has a field 'name', which is the option's own name" in cause_of_config(Named)


def test_a_config_type_that_is_no_schema_is_reported() -> None:
    @dataclass
    class Odd:
        path: set[int] = field(default_factory=set)

    assert "config Odd cannot be a configuration schema: " in cause_of_config(Odd)


def test_a_config_default_of_another_type_is_reported() -> None:
    @dataclass
    class Wrong:
        wait_ms: float = "soon"  # type: ignore[assignment]

    assert "cannot be a configuration schema" in cause_of_config(Wrong)


class Color(Enum):
    RED = 1


@dataclass
class Inner:
    b: int = 0


ANNOTATIONS = (
    *(bool, int, float, str, Any, Path, bytes, Color, Inner, set[int], object, int | str, list, dict, tuple),
    *(int | None, str | None, list[int] | None, Inner | None, list[int | None], list[list[int]], tuple[int, str]),
    *(list[str], list[Any], list[set[int]], tuple[int, ...], tuple[Any, ...], dict[str, Any], dict[int, float]),
    *(dict[Any, int], dict[str, list[int]], dict[set[int], int]),
)
DEFAULTS = (True, 1, 1.5, "a", "${b}", "${", "???", b"a", None, [], [1], ["a"], [True], (), (1,), (1, "a"), (None,))
DEFAULTS = (*DEFAULTS, {}, {"a": 1}, {1: 1.0}, {1, 2}, Path("a"), object())


def made_schema(annotation: Any, value: Any) -> type:
    return make_dataclass("Made", [("a", annotation, field(default_factory=lambda: value))])


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
def test_a_schema_that_is_taken_without_omegaconf_is_one_that_it_takes_and_that_has_all_values(annotation: Any) -> None:
    for value in DEFAULTS:
        config = made_schema(annotation, value)
        if is_plain_schema(config):
            assert not OmegaConf.missing_keys(OmegaConf.structured(config)), value


def test_plain_schemas_and_all_of_our_own_are_taken_without_omegaconf() -> None:
    plain = [(int, 1), (int | None, None), (tuple[str, ...], ("a",)), (dict[str, Any], {}), (list[int], [2])]
    own = [entry.config for entry in PluginHost.load(environ={}).registry if entry.config is not None]
    assert len(own) > 20
    assert all(map(is_plain_schema, [*own, *(made_schema(*one) for one in plain)]))


@dataclass
class TooLow:
    a: int = bounded(0, 1)


@dataclass
class Inside:
    deep: TooLow = field(default_factory=TooLow)


@dataclass
class Refusing:
    a: int = 0

    def __post_init__(self) -> None:
        if self.a < 1:
            raise ConfigError("scheduler.a must be at least 1")


@dataclass
class Failing:
    a: str = ""

    def __post_init__(self) -> None:
        self.b = json.loads(self.a)


@dataclass
class Exiting:
    def __post_init__(self) -> None:
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (TooLow, "a=0 must be at least 1"),
        (Inside, "deep.a=0 must be at least 1"),
        (Refusing, "scheduler.a must be at least 1"),
        (Failing, "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (test_host.py:{})"),
        (Exiting, "SystemExit: 0 (test_host.py:{})"),
    ],
)
def test_a_config_that_refuses_its_own_defaults_is_reported(config: Any, fault: str) -> None:
    line = config.__post_init__.__code__.co_firstlineno + 1 if "{}" in fault else 0
    cause = f"scheduler 'mine': config {config.__name__} refuses its own defaults: {fault.format(line)}"
    assert cause_of_config(config) == cause


def test_a_config_with_a_value_that_users_must_give_may_refuse_to_be_without() -> None:
    @dataclass
    class Needy:
        path: str = "???"
        size: int = bounded(1, 1)

        def __post_init__(self) -> None:
            if self.path == "???":
                raise ConfigError("scheduler.path is missing")

    host = host_with(scheduler_plugin("mine", config=Needy))
    assert host.choose("scheduler", "mine").config is Needy


@pytest.mark.parametrize("config", [PatientConfig, None])
def test_a_model_config_must_extend_the_base(config: type | None) -> None:
    assert "hookline.core.contracts.ModelConfig" in cause_of_config(config, "model")


def test_a_config_package_that_does_not_exist_is_reported() -> None:
    problem = only_problem(offering_presets("no_such_package.conf"))
    assert problem.stage is Phase.PRESETS
    assert problem.cause == (
        "config_packages names 'no_such_package.conf', which is no importable package with an __init__.py"
    )


def test_config_packages_of_another_type_are_reported() -> None:
    def config_packages() -> Any:
        return "one.package"

    problem = only_problem(plugin_module(config_packages=hookimpl(config_packages)))
    assert problem.cause == "config_packages returned 'one.package', not a list of package names"


def test_an_exception_in_config_packages_is_reported() -> None:
    def config_packages() -> Any:
        raise ValueError("oops")

    problem = only_problem(plugin_module(config_packages=hookimpl(config_packages)))
    line = config_packages.__code__.co_firstlineno + 1
    assert problem.cause == f"config_packages raised ValueError: oops (test_host.py:{line})"


def test_presets_of_a_sound_plugin_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    preset_package(tmp_path, "known_presets", {"scheduler/eager": "# eager: no waiting\ndefaults: [mine, _self_]\n"})
    host = host_with(
        offering_presets("known_presets", register_schedulers=registering("scheduler", "mine", config=PatientConfig))
    )
    found = [(one.kind, one.name, one.help) for one in host.presets if one.distribution == "their-dist"]
    assert found == [("scheduler", "eager", "no waiting")]
    assert host.config_packages == ["known_presets"]


def test_a_preset_bearing_an_options_own_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    preset_package(tmp_path, "clashing_presets", {"scheduler/mine": "defaults: [mine, _self_]\n"})
    problem = only_problem(offering_presets("clashing_presets", register_schedulers=registering("scheduler", "mine")))
    assert problem.cause == "preset scheduler/mine bears the name of an option or preset"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "# eager\ndefaults: [mine, _self_\n",
            ":3: broken YAML: while parsing a flow sequence, expected ',' or ']', but",
        ),
        ("a: 1\na: 2\n", ":2: broken YAML: while constructing a mapping, found duplicate key a"),
        ("a: 4\n", ": `defaults: [OPTION, _self_]` is missing, which says whose values these are"),
    ],
)
def test_a_broken_preset_is_reported_with_its_file_and_line(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = f"broken_presets_{abs(hash(text))}"
    preset_package(tmp_path, package, {"scheduler/eager": text})
    host = host_with(offering_presets(package, register_samplers=registering("sampler", "mine")))
    assert host.problems[0].cause.startswith(f"{package}/scheduler/eager.yaml{fault}")
    assert host.problems[0].wanted == (("sampler", "mine"), ("scheduler", "eager"))
    blame = (
        rf"^scheduler 'eager' of plugin 'plugin0' \(their-dist 1.2\) cannot be used: {package}/scheduler/eager.yaml:"
    )
    with pytest.raises(PluginError, match=blame):
        host.choose("scheduler", "eager")


def test_an_option_bearing_a_presets_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    preset_package(tmp_path, "earlier_presets", {"scheduler/eager": "defaults: [mine, _self_]\n"})
    host = host_with(offering_presets("earlier_presets"), scheduler_plugin("eager"))
    assert host.problems[0].cause == "scheduler 'eager' is already a preset of their-dist"


def test_a_broken_plugin_registers_nothing_at_all() -> None:
    module = plugin_module(
        register_schedulers=registering("scheduler", "good"),
        register_samplers=registering("sampler", "bad", target="nonsense"),
    )
    host = host_with(module)
    assert list(host.registry) == []
    assert host.problems[0].wanted == (("scheduler", "good"), ("sampler", "bad"))
    assert not host.manager.hook.register_schedulers.get_hookimpls()


def test_a_broken_plugin_stops_nobody_else() -> None:
    host = host_with(plugin_module(API_VERSION=3), scheduler_plugin("mine"), plugin_module())
    assert host.choose("scheduler", "mine").name == "mine"
    assert len(host.problems) == 2


# --- choosing


def test_choosing_what_a_broken_plugin_wanted_blames_it() -> None:
    host = host_with(scheduler_plugin("good", "bad", target="nonsense"))
    with pytest.raises(PluginError) as error:
        host.choose("scheduler", "good")
    assert str(error.value) == (
        "scheduler 'good' of plugin 'plugin0' (their-dist 1.2) cannot be used: scheduler 'good': target 'nonsense' is "
        "not of the form 'package.module:Class'"
    )


def test_an_unknown_name_gets_the_near_miss_and_what_is_available() -> None:
    sources = [source(scheduler_plugin("patient", "hasty"), distribution="hookline")]
    with pytest.raises(PluginError) as error:
        PluginHost.load(sources, {}).choose("scheduler", "patiant")
    assert str(error.value) == "no scheduler named 'patiant'. Did you mean 'patient'? Available: hasty, patient"


def test_an_unknown_name_mentions_broken_plugins() -> None:
    host = host_with(scheduler_plugin("patient"), plugin_module(API_VERSION=7))
    with pytest.raises(PluginError, match=r"not loaded: plugin 'plugin1' \(their-dist 1.2\): .* API_VERSION 7"):
        host.choose("scheduler", "mystery")


def test_without_our_own_distribution_the_fix_is_named() -> None:
    with pytest.raises(PluginError, match=r"Available: none; the hookline distribution is not installed here: pip"):
        PluginHost.load([], {}).choose("scheduler", "any")


def test_further_names_count_as_near_misses() -> None:
    error = host_with(scheduler_plugin("patient")).unknown("scheduler", "presett", ["preset"])
    assert str(error).startswith("no scheduler named 'presett'. Did you mean 'preset'? Available: patient, preset")


# --- the same plugins in every process


def test_processes_that_see_the_same_plugins_agree() -> None:
    seen = host_with(full_plugin(), plugin_module(API_VERSION=3)).description
    assert "scheduler 'patient' of plugin 'plugin0' (their-dist 1.2) from fake_package.fake:Fake" in seen
    assert any(line.startswith("broken plugin 'plugin1'") and "API_VERSION 3" in line for line in seen)
    host_with(full_plugin(), plugin_module(API_VERSION=3)).check_same(seen, "rank 1")


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([], "missing: plugin 'plugin0' (their-dist 1.2) in plugin0_module; scheduler 'mine' of plugin 'plugin0'"),
        (["mine", "more"], "not expected: scheduler 'more' of plugin 'plugin0' (their-dist 1.2)"),
        (["other"], "from fake_package.fake:Fake. not expected: scheduler 'other'"),
    ],
)
def test_a_process_that_sees_other_plugins_is_refused_with_the_difference(theirs: list[str], words: str) -> None:
    seen = host_with(scheduler_plugin("mine")).description
    other = host_with(*([scheduler_plugin(*theirs)] if theirs else []))
    with pytest.raises(PluginError, match="rank 1 sees other plugins than the process that started it: ") as error:
        other.check_same(seen, "rank 1")
    assert words in str(error.value)


def test_blocking_a_plugin_in_one_process_alone_is_noticed() -> None:
    sources = [source(scheduler_plugin("mine"), "noisy")]
    seen = PluginHost.load(sources, {}).description
    with pytest.raises(PluginError, match="the same HOOKLINE_BLOCK and HOOKLINE_PLUGINS"):
        PluginHost.load(sources, {"HOOKLINE_BLOCK": "noisy"}).check_same(seen, "job 3")


def test_a_process_checks_what_the_one_that_started_it_expects() -> None:
    sources = [source(scheduler_plugin("mine"))]
    environ = PluginHost.load(sources, {}).for_children()
    assert PluginHost.load(sources, environ).choose("scheduler", "mine").name == "mine"
    with pytest.raises(
        PluginError, match="this process sees other plugins than the process that started it: missing: "
    ):
        PluginHost.load([], environ)


# --- blocking, development, order


def test_a_blocked_plugin_is_not_imported_and_is_mentioned() -> None:
    def load() -> None:
        raise AssertionError("imported")

    host = PluginHost.load([source(load, "noisy")], {"HOOKLINE_BLOCK": " noisy , "})
    assert [(problem.plugin, problem.stage, problem.cause) for problem in host.problems] == [
        ("noisy", Phase.BLOCK, "blocked by HOOKLINE_BLOCK")
    ]
    with pytest.raises(PluginError, match="blocked by HOOKLINE_BLOCK"):
        host.choose("scheduler", "anything")


def test_blocking_an_unknown_plugin_is_reported() -> None:
    host = PluginHost.load([source(scheduler_plugin("a"), "noisy")], {"HOOKLINE_BLOCK": "noisi"})
    assert str(host.problems[0]) == (
        "plugin 'noisi' (HOOKLINE_BLOCK -): HOOKLINE_BLOCK names no installed plugin. Did you mean 'noisy'? "
        "Available: noisy"
    )


def test_broken_plugins_are_shown_before_blocked_ones() -> None:
    sources = [source(plugin_module(), "noisy"), source(plugin_module(API_VERSION=3), "old")]
    host = PluginHost.load(sources, {"HOOKLINE_BLOCK": "noisy"})
    assert [problem.plugin for problem in host.problems] == ["old", "noisy"]
    with pytest.raises(PluginError, match=r"not loaded: plugin 'old' .*; not loaded: plugin 'noisy' "):
        host.choose("scheduler", "anything")


def test_problems_are_logged_as_warnings_but_a_wanted_block_is_not(caplog: pytest.LogCaptureFixture) -> None:
    sources = [source(plugin_module(API_VERSION=3), "old"), source(plugin_module(), "noisy")]
    host = PluginHost.load(sources, {"HOOKLINE_BLOCK": "noisy,nobody"})
    with caplog.at_level(logging.WARNING, "hookline"):
        host.log_problems()
    assert [record.args[0].plugin for record in caplog.records] == ["old", "nobody"]  # type: ignore[index,union-attr]


def test_modules_in_development_are_loaded_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_in_development.py").write_text(
        "from hookline.core.contracts import hookimpl\nAPI_VERSION = 2\n"
        "@hookimpl\ndef register_samplers(register):\n    register('fresh', 'plugin_in_development:Fresh')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    host = PluginHost.load([], {"HOOKLINE_PLUGINS": "plugin_in_development, no_such_plugin"})
    assert host.choose("sampler", "fresh").origin.distribution == "HOOKLINE_PLUGINS"
    assert [problem.cause for problem in host.problems] == ["ModuleNotFoundError: No module named 'no_such_plugin'"]


@pytest.mark.parametrize(
    ("named", "module"),
    [("./mine.py", "mine"), ("mine.py", "mine"), ("a/mine", "mine"), ("mine yours.py", "mine,yours")],
)
def test_a_file_in_place_of_a_module_is_told_as_the_module_that_it_holds(named: str, module: str) -> None:
    [problem] = PluginHost.load([], {"HOOKLINE_PLUGINS": named}).problems
    assert f"takes names of modules, with commas between them; write HOOKLINE_PLUGINS={module}, with" in problem.cause


def test_a_module_named_twice_is_loaded_once() -> None:
    module = scheduler_plugin("mine")
    host = PluginHost.load([source(module, "one"), source(module, "two")], {})
    assert host.registry.names("scheduler") == ["mine"]
    assert host.problems[0].cause == "two_module is already loaded as another plugin; name it once"


def test_two_distributions_may_name_their_plugins_alike() -> None:
    sources = [source(scheduler_plugin(name), "policies", name) for name in ("one", "two")]
    host = PluginHost.load(sources, {})
    assert host.registry.names("scheduler") == ["one", "two"]
    assert host.problems == []


def test_installed_plugins_come_ours_first_then_by_distribution_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for distribution, points in {"Zeta_Dist": "b = m1\na = m2", "alpha-dist": "z = m3"}.items():
        info = tmp_path / f"{distribution.replace('-', '_')}-3.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.0\n")
        (info / "entry_points.txt").write_text(f"[hookline]\n{points}\n")
    ours = tmp_path / "hookline-9.dist-info"
    ours.mkdir()
    (ours / "METADATA").write_text("Metadata-Version: 2.1\nName: hookline\nVersion: 9\n")
    (ours / "entry_points.txt").write_text("[hookline]\nown = m0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    found = [(one.origin.distribution, one.origin.version, one.origin.plugin) for one in installed()]
    assert found == [
        ("hookline", "9", "own"),
        ("alpha-dist", "3.0", "z"),
        ("zeta-dist", "3.0", "a"),
        ("zeta-dist", "3.0", "b"),
    ]


def test_a_model_config_that_extends_the_base_is_accepted() -> None:
    @dataclass
    class Mine(ModelConfig):
        width: int = 3

    host = host_with(plugin_module(register_models=registering("model", "mine", config=Mine)))
    assert host.choose("model", "mine").config is Mine
