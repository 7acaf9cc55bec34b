import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hookline.core.contracts import Needs
from hookline.core.errors import PluginError
from hookline.core.plugin import needs as needs_module
from hookline.core.plugin.needs import Facts, choose_kernels, unavailable, unmet, unmet_invariance
from hookline.core.testing.plain_kernels import PlainKernels
from tests.core.plugin_fakes import full_plugin, host_with

CPU = Facts("cpu", "float32")
GPU = Facts("cuda", "bfloat16", (9, 0), block_size=256, head_dim=128)


@pytest.mark.parametrize("facts", [CPU, GPU])
def test_empty_needs_are_always_met(facts: Facts) -> None:
    assert unmet(Needs(), facts) == []


@pytest.mark.parametrize(
    ("needs", "facts", "reason"),
    [
        (Needs(devices=("cuda",)), CPU, "device is cpu, needs cuda"),
        (Needs(dtypes=("bfloat16", "float16")), CPU, "dtype is float32, needs bfloat16 or float16"),
        (
            Needs(block_size_multiple=256),
            replace(GPU, block_size=100),
            "engine.block_size is 100, needs a multiple of 256",
        ),
        (Needs(head_dims=(64, 128)), replace(GPU, head_dim=80), "the model's head_dim is 80, needs 64 or 128"),
        (
            Needs(compute_capability=(8, 0)),
            replace(GPU, compute_capability=(7, 5)),
            "compute capability is 7.5, needs at least 8.0",
        ),
        (
            Needs(compute_capability=(8, 0)),
            replace(GPU, compute_capability=None),
            "compute capability is unknown, needs at least 8.0",
        ),
        (Needs(packages=("no_such_package",)), CPU, "package 'no_such_package' is not installed"),
        (Needs(packages=("no_such_package.inner",)), CPU, "package 'no_such_package.inner' is not installed"),
    ],
)
def test_an_unmet_need_is_named_with_value_and_limit(needs: Needs, facts: Facts, reason: str) -> None:
    assert unmet(needs, facts) == [reason]


def test_met_needs_have_no_reasons() -> None:
    needs = Needs(
        devices=("cuda",),
        dtypes=("bfloat16",),
        block_size_multiple=16,
        head_dims=(128,),
        compute_capability=(8, 0),
        packages=("json",),
    )
    assert unmet(needs, GPU) == []


def test_all_reasons_are_given_together() -> None:
    assert len(unmet(Needs(devices=("cuda",), dtypes=("float16",), packages=("no_such_package",)), CPU)) == 3


def test_what_is_not_known_yet_is_not_held_against_an_entry() -> None:
    assert unmet(Needs(block_size_multiple=256, head_dims=(64,)), Facts("cuda", "float16", (8, 0))) == []


def test_compute_capability_does_not_matter_on_a_cpu() -> None:
    assert unmet(Needs(devices=("cpu", "cuda"), compute_capability=(9, 0)), CPU) == []


# --- this machine


def test_a_missing_package_makes_an_entry_unavailable() -> None:
    assert unavailable(Needs(packages=("no_such_package", "json"))) == ["package 'no_such_package' is not installed"]


def test_without_a_cuda_device_an_entry_that_needs_one_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs_module, "_has_cuda", lambda: False)
    assert unavailable(Needs(devices=("cuda",))) == ["no cuda device here"]
    assert unavailable(Needs(devices=("cpu", "cuda"))) == []


@pytest.mark.parametrize("usable", [True, False])
def test_a_torch_that_is_imported_is_asked_for_the_device(monkeypatch: pytest.MonkeyPatch, usable: bool) -> None:
    torch = ModuleType("torch")
    vars(torch)["cuda"] = SimpleNamespace(is_available=lambda: usable)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert unavailable(Needs(devices=("cuda",))) == ([] if usable else ["no cuda device here"])


@pytest.mark.parametrize(
    ("version", "visible", "driver", "usable"),
    [
        ("2.13.0", None, True, True),
        ("2.13.0+cpu", None, True, False),
        ("2.13.0", "", True, False),
        ("2.13.0", "-1", True, False),
        ("2.13.0", "1", True, True),
        ("2.13.0", None, False, False),
    ],
)
def test_without_torch_imported_the_driver_tells(
    monkeypatch: pytest.MonkeyPatch, version: str, visible: str | None, driver: bool, usable: bool
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.setattr(needs_module, "_has_driver", lambda: driver)
    assert unavailable(Needs(devices=("cuda",))) == ([] if usable else ["no cuda device here"])
    assert "torch" not in sys.modules


def test_a_package_that_fails_while_it_is_looked_for_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explosive_package.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = "package 'explosive_package.part' is not installed"
    assert unavailable(Needs(packages=("explosive_package.part",))) == [reason]


# --- kernels


@pytest.fixture
def loadable(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the fakes' targets name."""
    module = ModuleType("fake_package.fake")
    vars(module).update(Slow=PlainKernels, Quick=PlainKernels)
    monkeypatch.setitem(sys.modules, "fake_package", ModuleType("fake_package"))
    monkeypatch.setitem(sys.modules, "fake_package.fake", module)
    return module


def test_auto_passes_over_what_cannot_be_loaded(loadable: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    del loadable.Quick
    with caplog.at_level(logging.DEBUG, "hookline"):
        assert choose_kernels(host_with(full_plugin()), "auto", GPU).name == "slow"
    assert "kernels 'quick' of plugin 'plugin0' (their-dist 1.2) cannot be loaded" in caplog.messages[0]
    assert caplog.messages[2].endswith("that fits; not quick (cannot be loaded)")


def test_kernels_that_were_named_and_cannot_be_loaded_are_an_error(loadable: ModuleType) -> None:
    del loadable.Slow
    with pytest.raises(PluginError, match=r"kernels 'slow' of plugin .* cannot be loaded from fake_package\.fake:Slow"):
        choose_kernels(host_with(full_plugin()), "slow", GPU)


def test_auto_without_any_that_can_be_loaded_says_so(loadable: ModuleType) -> None:
    vars(loadable).clear()
    with pytest.raises(PluginError, match=r"no kernels fit: quick \(cannot be loaded\), slow \(cannot be loaded\)"):
        choose_kernels(host_with(full_plugin()), "auto", GPU)


@pytest.mark.usefixtures("loadable")
def test_auto_takes_the_highest_priority_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    host = host_with(full_plugin())
    assert choose_kernels(host, "auto", GPU).name == "quick"
    caplog.clear()
    with caplog.at_level(logging.INFO, "hookline"):
        assert choose_kernels(host, "auto", CPU).name == "slow"
    assert caplog.messages == ["kernels=auto takes 'slow'"]


@pytest.mark.usefixtures("loadable")
def test_why_auto_passes_over_others_is_told_to_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hookline"):
        choose_kernels(host_with(full_plugin()), "auto", CPU)
    assert caplog.messages[1:] == [
        "it has the highest priority (0) that fits; not quick (device is cpu, needs cuda; dtype is float32, needs "
        "bfloat16)"
    ]


@pytest.mark.usefixtures("loadable")
def test_named_kernels_that_fit_are_taken_whatever_their_priority() -> None:
    assert choose_kernels(host_with(full_plugin()), "slow", GPU).name == "slow"


def test_named_kernels_that_do_not_fit_are_refused_with_reasons_and_alternatives() -> None:
    with pytest.raises(PluginError) as error:
        choose_kernels(host_with(full_plugin()), "quick", CPU)
    assert str(error.value) == (
        "kernels 'quick' of plugin 'plugin0' (their-dist 1.2) do not fit: device is cpu, needs cuda; dtype is float32, "
        "needs bfloat16. Would fit: slow"
    )


def test_batch_invariance_is_refused_by_who_does_not_declare_it_and_kept_by_who_does() -> None:
    facts = replace(GPU, batch_invariant=True)
    with pytest.raises(PluginError) as error:
        choose_kernels(host_with(full_plugin()), "quick", facts)
    assert str(error.value) == (
        "kernels 'quick' of plugin 'plugin0' (their-dist 1.2) do not fit: engine.batch_invariant is true, which it "
        "does not declare. Would fit: none"
    )
    assert unmet_invariance(Needs(batch_invariant=True), facts) == []
    assert unmet_invariance(Needs(), GPU) == []


def test_unknown_kernels_get_the_near_miss() -> None:
    with pytest.raises(PluginError, match=r"no kernels named 'quik'\. Did you mean 'quick'\?"):
        choose_kernels(host_with(full_plugin()), "quik", GPU)


def test_auto_without_any_kernels_says_so() -> None:
    with pytest.raises(PluginError, match="no kernels fit: none are registered"):
        choose_kernels(host_with(), "auto", CPU)
