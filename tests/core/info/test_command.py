import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.contracts import Needs
from hookline.core.errors import ConfigError
from hookline.core.info.command import inventory, main, only
from hookline.core.info.layout import show_all, show_one
from hookline.core.plugin.host import PluginHost
from tests.core.plugin_fakes import full_plugin, plugin_module, registering, scheduler_plugin, source


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    needy = plugin_module(
        register_samplers=registering("sampler", "exotic", needs=Needs(packages=("no_such_package",)), help="rare")
    )
    sources = [
        source(full_plugin(), "base"),
        source(needy, "needy", "needy-dist", "0.3"),
        source(scheduler_plugin("wanted", target="nonsense"), "broken", "broken-dist", "2"),
        source(plugin_module(), "noisy"),
    ]
    host = PluginHost.load(sources, {"HOOKLINE_BLOCK": "noisy"})
    host.presets.clear()
    monkeypatch.setattr(PluginHost, "load", classmethod(lambda cls: host))
    return host


def test_each_option_is_shown_with_kind_summary_origin_and_fields(host: PluginHost) -> None:
    text = show_all(inventory(host))
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith("scheduler")}
    assert rows["patient"] == ["scheduler", "patient", "yes", "their-dist", "1.2", "waits", "a", "little"]
    assert "    scheduler.max_wait_ms: float = 1.0" in text.splitlines()
    assert "    model.hf_overrides: dict[str, Any] = {}" in text.splitlines()


def test_an_option_that_cannot_run_here_says_why(host: PluginHost) -> None:
    assert "no: package 'no_such_package' is not installed  needy-dist 0.3" in show_all(inventory(host))


def test_broken_and_blocked_plugins_are_shown_with_their_cause(host: PluginHost) -> None:
    lines = show_all(inventory(host)).splitlines()
    assert lines[lines.index("not loaded") + 1 :] == [
        "broken (broken-dist 2), register: scheduler 'wanted': target 'nonsense' is not of the form "
        "'package.module:Class'",
        "    wanted: scheduler 'wanted'",
        "noisy (their-dist 1.2), block: blocked by HOOKLINE_BLOCK",
    ]


def test_loaded_plugins_are_shown_with_their_hooks(host: PluginHost) -> None:
    lines = [line.split() for line in show_all(inventory(host)).splitlines()]
    assert ["needy", "needy-dist", "0.3", "needy_module", "register_samplers"] in lines


def test_one_name_is_shown_in_full(host: PluginHost) -> None:
    text = show_one(only(inventory(host), "exotic"))
    assert text.splitlines() == [
        "sampler=exotic: rare",
        "  available: no: package 'no_such_package' is not installed",
        "  from:      plugin 'needy' of needy-dist 0.3",
        "  target:    fake_package.fake:Fake",
        "  file:      not found",
        "  priority:  0",
        "  needs:     packages=('no_such_package',)",
        "  fields: none",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wanted", "broken"])
def test_a_name_that_a_broken_plugin_wanted_shows_the_plugin(host: PluginHost, name: str) -> None:
    assert "target 'nonsense'" in show_one(only(inventory(host), name))


def test_an_unknown_name_gets_the_near_miss(host: PluginHost) -> None:
    with pytest.raises(ConfigError, match=r"nothing is named 'patiant'\. Did you mean 'patient'\? Available: base, "):
        only(inventory(host), "patiant")


def test_an_unknown_name_names_the_plugins_that_are_not_loaded_as_choosing_it_does(host: PluginHost) -> None:
    with pytest.raises(ConfigError) as caught:
        only(inventory(host), "nobody")
    for problem in host.problems:
        assert f"; not loaded: {problem}" in str(caught.value)
    assert str(caught.value).partition("; not loaded")[2] in str(host.unknown("scheduler", "nobody"))


def test_an_unknown_name_exits_with_2_and_one_line(host: PluginHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patiant"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hookline: error: nothing is named 'patiant'") and err.count("\n") == 1


def test_json_holds_the_same_facts(host: PluginHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["api_version"] == 2
    patient = next(one for one in facts["options"] if one["name"] == "patient")
    assert patient["fields"][0] == {"name": "max_wait_ms", "type": "float", "default": "1.0", "doc": ""}
    assert [one["plugin"] for one in facts["problems"]] == ["broken", "noisy"]
    assert facts["problems"][0]["wanted"] == [["scheduler", "wanted"]]


def test_a_preset_shows_its_option_and_what_it_sets(host: PluginHost, tmp_path: Path) -> None:
    from hookline.core.plugin.presets import presets_in

    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "eager.yaml").write_text("# eager: no waiting\ndefaults: [patient, _self_]\nlimit: 3\n")
    (tmp_path / "scheduler" / "lost.yaml").write_text("defaults: [gone, _self_]\n")
    host.presets.extend(presets_in(tmp_path, "their-dist"))
    facts = inventory(host)
    assert "  option:    patient\n  sets:\n    scheduler.limit: 3" in show_one(only(facts, "eager"))
    assert "available: no: its option 'gone' is not there" in show_one(only(facts, "lost"))
    assert ["scheduler", "eager", "yes"] in [line.split()[:3] for line in show_all(facts).splitlines()]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "mixed256",
            [
                "workload=mixed256: 256 requests of 100-1024 tokens in and out, the benchmark nano-vLLM ships",
                "    workload.prompt_len: [100, 1024]",
            ],
        ),
        ("batch32_json", ["    workload.num_prompts: 32"]),
        (
            "latency",
            [
                "experiment=latency: short waits between tokens, for few requests at a time",
                "    scheduler: 'chunked'",
                "    engine.max_num_seqs: 32",
            ],
        ),
        ("experiment", ["    scheduler: 'longest_first'", "    scheduler.pace: True"]),
    ],
)
def test_loads_and_experiments_show_what_they_set(
    host: PluginHost, capsys: pytest.CaptureFixture[str], name: str, lines: list[str]
) -> None:
    assert set(lines) <= set(shown(name, capsys))


def test_a_load_of_a_plugin_is_shown_and_a_broken_one_with_its_fault(
    host: PluginHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_conf" / "workload").mkdir(parents=True)
    (tmp_path / "their_conf" / "__init__.py").touch()
    (tmp_path / "their_conf" / "workload" / "rush.yaml").write_text("# rush: all at once\nnum_prompts: 9\n")
    (tmp_path / "their_conf" / "workload" / "torn.yaml").write_text("num_prompts: [\n")
    far = "defaults: [/workload/smoke, rush, _self_]\nnum_prompts: 7\n"
    (tmp_path / "their_conf" / "workload" / "far.yaml").write_text(far)
    monkeypatch.syspath_prepend(tmp_path)
    host.config_packages.append("their_conf")
    facts = inventory(host)
    assert "workload=rush: all at once" in show_one(only(facts, "rush"))
    assert "available: no: ParserError: while parsing" in show_one(only(facts, "torn"))
    assert "available: yes" in (told := show_one(only(facts, "far"))) and "workload.num_prompts: 7" in told


def test_the_command_imports_no_library_that_composes_or_computes() -> None:
    code = "import sys; from hookline.core.info.command import main; assert main([]) == 0; "
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["kind", "name", "available", "from", "summary"]
    imported = done.stderr.split()
    assert "hookline.plugins.models" in imported
    assert not {"torch", "numpy", "hydra", "omegaconf", "antlr4", "transformers", "asyncio"}.intersection(imported)
    # What takes milliseconds and serves single requests or errors alone.
    slow = {"ctypes", "hashlib", "secrets", "gzip", "difflib", "hookline.core.json_schemas"}
    assert not slow.intersection(imported)


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([name]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("key", "field", "doc"),
    [
        ("engine", "engine.max_num_seqs: int = 512", "Most requests running at the same time."),
        (
            "sampling",
            "sampling.min_p: float | None = None",
            "Draw from the tokens at least min_p times as likely as the ",
        ),
        (
            "workload",
            "workload.burstiness: float = 1.0",
            "Shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less comes in bursts.",
        ),
        ("slo", "slo.ttft_s: float | None = None", "Time to the first token."),
    ],
)
def test_a_root_key_is_shown_with_defaults_and_docs(
    host: PluginHost, capsys: pytest.CaptureFixture[str], key: str, field: str, doc: str
) -> None:
    lines = [line.strip() for line in shown(key, capsys)]
    assert lines[lines.index(field) + 1].startswith(doc)


def test_a_root_key_without_fields_is_shown_with_its_docstring(
    host: PluginHost, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown("tp", capsys)[0] == "tp = 1: Tensor-parallel ranks: one process each, on GPUs device, device + 1, ..."


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("engine.block_size", "engine.block_size = None: Tokens per KV block; None takes what the kernels prefer."),
        ("sampling.top_k", "sampling.top_k = None: Draw from the k most likely tokens"),
        ("scheduler.max_wait_ms", "    scheduler.max_wait_ms: float = 1.0"),
    ],
)
def test_a_key_within_another_is_shown_with_its_docstring(
    host: PluginHost, capsys: pytest.CaptureFixture[str], key: str, line: str
) -> None:
    lines = shown(key, capsys)
    assert any(one.startswith(line) for one in lines)
    assert not any("limit" in one for one in lines)


def test_a_mistyped_key_within_another_gets_the_near_miss(host: PluginHost) -> None:
    with pytest.raises(ConfigError, match=r"'engine\.blocksize'\. Did you mean 'engine\.block_size'\?"):
        only(inventory(host), "engine.blocksize")


def test_every_root_key_of_every_command_is_explained(host: PluginHost) -> None:
    from hookline.core.plugin.registry import KINDS
    from hookline.core.simulate.settings import SimulateKeys

    facts = inventory(host)
    for key in {one.name for one in dataclasses.fields(SimulateKeys)} - set(KINDS):
        (found,) = only(facts, key)["keys"]
        assert found["doc"] or found["fields"], key
        assert all(field["doc"] for field in found["fields"]), key
    assert [one["name"] for one in only(facts, "scheduler")["options"]] == ["patient", "hasty"]
