"""The command `hookline warm`: from a command line to compiled kernels. Imports no torch before it is called."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.cli.command import guarded, is_sweep
from hookline.core.cli.output import say

if TYPE_CHECKING:
    from hookline.core.config.settings import Config
    from hookline.core.plugin.host import PluginHost
    from hookline.core.prebuild.pretended import Card


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments, name="warm")


def _run(arguments: list[str]) -> int:
    from hookline.core.config.compose import compose
    from hookline.core.config.schema import check_keys
    from hookline.core.config.settings import ENGINE_KEYS, validate
    from hookline.core.errors import ConfigError
    from hookline.core.plugin.host import PluginHost
    from hookline.core.util.ranges import check_ranges
    from hookline.core.warm.settings import WarmKeys

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        raise ConfigError("kernels are compiled for one configuration; leave out -m (--multirun)")
    jobs = compose(arguments, host, WarmKeys, "warm")
    if not jobs:
        return 0
    tree = jobs[0].tree
    check_keys(tree, (*ENGINE_KEYS, "card", "processes", "export"))
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    processes = tree.get("processes")
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int)):
        raise ConfigError(f"processes={processes!r} is not an int")
    check_ranges(WarmKeys, {"processes": processes})
    export = tree.get("export")
    return warm(config, host, tree.get("card"), processes, Path(str(export)) if export is not None else None)


def warm(
    config: Config,
    host: PluginHost,
    card_name: str | None,
    num_processes: int | None = None,
    export: Path | None = None,
) -> int:
    """Compile what the configuration launches, and print the outcome; returns the exit code.

    export: a folder to put it into, see `core.assembly.exported_kernels`, in place of Triton's cache.
    Raises: ConfigError for an unknown card, or if there is none, or for a folder that cannot be used; whatever an
    engine of the configuration raises.
    """
    from dataclasses import asdict

    from hookline.core.assembly.kernel_build import code_versions, mark_done, stamp_of
    from hookline.core.assembly.resolve import resolve
    from hookline.core.errors import ConfigError
    from hookline.core.prebuild.build import build
    from hookline.core.prebuild.child import num_processes as all_cores
    from hookline.core.prebuild.driver_library import linkable_driver
    from hookline.core.prebuild.dry_run import on_cuda
    from hookline.core.prebuild.pretended import pretended
    from hookline.core.warm.export import compiled_into, num_bytes

    if config.num_ranks > 1:
        ranks = f"tp={config.tp}" + f" with pp={config.pp}" * (config.pp > 1)
        raise ConfigError(f"{ranks}: kernels of several ranks are compiled when their engine starts")
    card = _card(card_name)
    with pretended(card, lambda *_: None):
        resolved = resolve(on_cuda(config), host)
    if "triton" not in resolved.kernels.needs.packages:
        raise ConfigError(f"kernels={resolved.kernels.name} compile nothing ahead; on a GPU, kernels=triton does")
    with ExitStack() as stack:
        if export is not None:
            model, capability = resolved.config.model, ".".join(map(str, card.compute_capability))
            name = resolved.checkpoint.reference or model.name
            made_for = f"{name} in {resolved.attention.dtype} on {card_name or f'compute capability {capability}'}"
            stack.enter_context(compiled_into(export, made_for))
        stack.enter_context(linkable_driver())
        built = build(config, host, card, num_processes or all_cores())
        if not built.failed:
            found = asdict(built) | {"versions": code_versions(resolved)}
            mark_done(stamp_of(resolved, card_facts_of(card)), found)
    for line in built.failed:
        say(f"not compiled: {line}")
    say(f"{built.num_compiled} of {built.num_kernels} kernels compiled in {built.seconds:.1f} s, the others were there")
    if export is not None:
        say(f"{export} takes {num_bytes(export) / 1e6:.1f} MB; an engine takes kernels from it by engine.kernel_cache")
    return 2 if built.failed else 0


def card_facts_of(card: Card) -> dict[str, Any]:
    """The facts of a card as `core.assembly.kernel_build.card_facts` returns them."""
    return {
        "compute_capability": list(card.compute_capability),
        "num_sms": card.num_sms,
        "shared_memory_bytes": card.shared_memory_bytes,
    }


def _card(name: str | None) -> Card:
    from hookline.core.errors import ConfigError
    from hookline.core.prebuild.pretended import CARDS, card_here, card_named

    if name is not None:
        return card_named(name)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"there is no GPU here to compile for; name one: card={', card='.join(CARDS)}")
    return card_here(torch.device("cuda", 0))
