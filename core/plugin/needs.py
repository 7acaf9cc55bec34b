"""Compares an entry's needs with the facts, once, before any weight is loaded; picks the kernels for "auto".

`unavailable` is quick and imports no torch, since `hookline info` calls it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.contracts import Needs, is_offered
from hookline.core.errors import PluginError, RequestError
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import AUTO, GRAMMARS, Entry, Option
from hookline.core.plugin.sources import spec_of

if TYPE_CHECKING:
    from hookline.core.json_schemas import SchemaRules

_log = logging.getLogger("hookline")


@dataclass(frozen=True)
class Facts:
    """The facts about the machine, the model and the engine that needs are compared with.

    device: "cpu" or "cuda". dtype: name of a torch dtype. compute_capability: None without a CUDA device.
    block_size: tokens per KV block; None means the kernels choose. head_dim: None if it is not known yet, or not to be
    checked.
    """

    device: str
    dtype: str
    compute_capability: tuple[int, int] | None = None
    block_size: int | None = None
    head_dim: int | None = None
    num_ranks: int = 1
    num_stages: int = 1
    attention: frozenset[str] = frozenset()
    """Which of ATTENTION_FEATURES the model needs of its kernels."""
    batch_invariant: bool = False
    """Whether a row's results must have the same bits in every batch."""
    kv_dtype: str | None = None
    """Name of the torch dtype that keys and values are stored in; None: the model's own."""


def unmet(needs: Needs, facts: Facts) -> list[str]:
    """Why the needs are not met: one short phrase each, with the value and the allowed ones."""
    reasons = [f"package '{package}' is not installed" for package in _missing_packages(needs)]
    reasons += _unmet_device(needs, facts)
    if needs.dtypes and facts.dtype not in needs.dtypes:
        reasons.append(f"dtype is {facts.dtype}, needs {_either(needs.dtypes)}")
    if facts.block_size is not None and facts.block_size % needs.block_size_multiple:
        reasons.append(f"engine.block_size is {facts.block_size}, needs a multiple of {needs.block_size_multiple}")
    if needs.head_dims and facts.head_dim is not None and facts.head_dim not in needs.head_dims:
        reasons.append(f"the model's head_dim is {facts.head_dim}, needs {_either(needs.head_dims)}")
    return reasons


def unfit_kernels(needs: Needs, facts: Facts) -> list[str]:
    """Why kernels with these needs do not fit: one short phrase each."""
    return [why for each in (unmet, _lacking, _cannot_store, unmet_invariance) for why in each(needs, facts)]


def _lacking(needs: Needs, facts: Facts) -> list[str]:
    """The attention features that the model needs and the kernels do not have."""
    missing = sorted(facts.attention.difference(needs.attention))
    return [f"the model's attention needs {', '.join(missing)}"] if missing else []


def _cannot_store(needs: Needs, facts: Facts) -> list[str]:
    """Why kernels cannot store keys and values as engine.kv_dtype says, in one phrase; empty if they can."""
    is_declared = facts.kv_dtype is None or facts.kv_dtype in needs.kv_dtypes
    return [] if is_declared else [f"engine.kv_dtype asks for a cache in {facts.kv_dtype}, which it does not declare"]


def unmet_invariance(needs: Needs, facts: Facts) -> list[str]:
    """Why engine.batch_invariant=true rules out a model, kernels or a sampler, in one phrase; empty if it does not."""
    is_refused = facts.batch_invariant and not needs.batch_invariant
    return ["engine.batch_invariant is true, which it does not declare"] if is_refused else []


def unavailable(needs: Needs) -> list[str]:
    """Why an entry cannot run on this machine, whatever the model and the engine: packages and devices only."""
    reasons = [f"package '{package}' is not installed" for package in _missing_packages(needs)]
    if needs.devices and "cpu" not in needs.devices and not ("cuda" in needs.devices and _has_cuda()):
        reasons.append(f"no {_either(needs.devices)} device here")
    return reasons


def choose_kernels(host: PluginHost, name: str, facts: Facts) -> Entry:
    """The kernels entry to use: the named entry, or for "auto" the entry of highest priority that fits and loads.

    The choice for "auto" is logged, and at level DEBUG the entries that were passed over and why.
    Raises: PluginError with the reasons, and the entries that would fit.
    """
    entries = host.registry.of_kind("kernels")
    reasons = {entry.name: unfit_kernels(entry.needs, facts) for entry in entries}
    fitting = sorted((entry for entry in entries if not reasons[entry.name]), key=lambda entry: -entry.priority)
    if name == AUTO:
        return _best(fitting, reasons)
    entry = host.choose("kernels", name)
    if reasons[name]:
        others = ", ".join(one.name for one in fitting) or "none"
        why = "; ".join(reasons[name])
        raise PluginError(f"kernels '{name}' of {entry.origin} do not fit: {why}. Would fit: {others}")
    entry.load()
    return entry


def choose_grammars(host: PluginHost, option: Option) -> tuple[Entry, Any]:
    """The grammar back end to use, and its config: the chosen entry; for "auto" the available one of highest priority.

    Raises: RequestError with the reasons and what to install, if there is none.
    """
    entries = [option.entry] if option.entry is not None else host.registry.of_kind(GRAMMARS)
    reasons = {entry.name: unavailable(entry.needs) for entry in entries}
    fitting = sorted((entry for entry in entries if not reasons[entry.name]), key=lambda entry: -entry.priority)
    if fitting:
        config = option.config if option.entry is not None else fitting[0].config and fitting[0].config()
        return fitting[0], config
    why = (
        "; ".join(f"{GRAMMARS} '{name}': {'; '.join(found)}" for name, found in reasons.items()) or "none is installed"
    )
    raise RequestError(
        f'sampling.structured_outputs needs a grammar back end ({why}); pip install "hookline[grammar]" brings one'
    )


def schema_rules(entry: Entry, *, opens_objects: bool = False) -> SchemaRules:
    """How schemas are written for a grammar back end.

    Raises: PluginError if it cannot be loaded.
    """
    from hookline.core.json_schemas import SchemaRules

    cannot_hold = getattr(entry.load(), "cannot_hold", None)
    if cannot_hold is None or not is_offered(cannot_hold):
        return SchemaRules(opens_objects=opens_objects)

    def _cannot_hold(keyword: str, value: Any) -> bool:
        with Blaming((), "in cannot_hold", otherwise=entry):
            return bool(cannot_hold(keyword, value))

    return SchemaRules(_cannot_hold, opens_objects)


def _best(fitting: list[Entry], reasons: dict[str, list[str]]) -> Entry:
    passed_over = [f"{name} ({'; '.join(why)})" for name, why in reasons.items() if why]
    broken = list(takewhile(lambda entry: not _loads(entry), fitting))
    passed_over += [f"{entry.name} (cannot be loaded)" for entry in broken]
    if len(broken) == len(fitting):
        raise PluginError(f"no kernels fit: {', '.join(passed_over) or 'none are registered'}")
    best = fitting[len(broken)]
    _log.info("kernels=%s takes '%s'", AUTO, best.name)
    _log.debug("it has the highest priority (%d) that fits; not %s", best.priority, ", ".join(passed_over) or "others")
    return best


def _loads(entry: Entry) -> bool:
    """Whether an entry that the user did not name can be loaded; if not, a warning says so and it is passed over."""
    try:
        entry.load()
    except PluginError as error:
        _log.warning("%s", error)
        return False
    return True


def _unmet_device(needs: Needs, facts: Facts) -> list[str]:
    if needs.devices and facts.device not in needs.devices:
        return [f"device is {facts.device}, needs {_either(needs.devices)}"]
    if needs.compute_capability is None or facts.device != "cuda":
        return []
    if facts.compute_capability is None or facts.compute_capability < needs.compute_capability:
        value = "unknown" if facts.compute_capability is None else _version(facts.compute_capability)
        return [f"compute capability is {value}, needs at least {_version(needs.compute_capability)}"]
    return []


def _missing_packages(needs: Needs) -> list[str]:
    return [package for package in needs.packages if spec_of(package) is None]


def _has_cuda() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None:
        return bool(torch.cuda.is_available())
    # torch's metadata is a long file, so it is read last.
    return (
        os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and _has_driver() and _torch_is_built_for_cuda()
    )


def _torch_is_built_for_cuda() -> bool:
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _has_driver() -> bool:
    # /dev/dxg is the driver's device under WSL.
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def _either(values: Iterable[object]) -> str:
    return " or ".join(str(value) for value in values)


def _version(capability: tuple[int, int]) -> str:
    return ".".join(str(part) for part in capability)
