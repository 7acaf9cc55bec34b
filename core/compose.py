"""Lets Hydra compose the command line into plain trees: one for a run, one for each job of a sweep.

The only place that runs Hydra. Its errors leave as our own, in one line; nothing of the engine happens inside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from core.compose_errors import explain
from core.errors import ConfigError
from core.options import search_path_overrides, store_options
from core.plugin_host import PluginHost
from core.presets import CONF
from core.raw_values import is_raw, quote_raw_values
from core.registry import KINDS

_UNSET = "{kind} needs an option; it can be neither null nor deleted: python -m core.info lists them"


@dataclass(frozen=True)
class Job:
    """What Hydra composed: a tree of plain values, and for a job of a sweep its arguments and its folder."""

    tree: dict[str, Any]
    arguments: tuple[str, ...] = ()
    folder: Path | None = None


def compose(arguments: Sequence[str], host: PluginHost, config_name: str = "config") -> list[Job]:
    """The jobs that the arguments ask for; none if Hydra was only asked to show something.

    Raises: ConfigError or PluginError with the near miss and what is available. SystemExit after `--help`.
    """
    arguments = flags_first(arguments)
    _refuse_name_overrides(arguments)
    store_options(host)
    raw = [argument for argument in arguments if is_raw(argument)]
    with _argv(search_path_overrides(quote_raw_values(arguments), host.config_packages)):
        try:
            return [_job(composed, raw) for composed in _run_hydra(config_name)]
        except Exception as error:
            explained = explain(error, host)
            if explained is None:
                raise
            raise explained from error


@dataclass(frozen=True)
class _Composed:
    config: Any
    overrides: list[str]
    folder: Path | None


def _run_hydra(config_name: str) -> list[_Composed]:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    found: list[_Composed] = []

    def collect(config: Any) -> None:
        # Nothing here may raise: Hydra would print the error on its own before it lets it out.
        settings = HydraConfig.get()
        folder = Path(settings.runtime.output_dir) if settings.mode is RunMode.MULTIRUN else None
        # Unresolved: an override's text may hold a ${...} that means nothing at this place.
        overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        found.append(_Composed(config, overrides, folder))

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(collect)()
    return found


def _job(composed: _Composed, raw: list[str]) -> Job:
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(composed.config, resolve=True)
    assert isinstance(tree, dict)
    for kind in KINDS:
        if tree.get(kind) is None:
            raise ConfigError(_UNSET.format(kind=kind))
    # Hydra's spelling of a raw value is quoted already; the job's own process quotes what was typed.
    own = [override for override in composed.overrides if not is_raw(override)]
    return Job({str(key): value for key, value in tree.items()}, (*_config_dir(), *own, *raw), composed.folder)


def _config_dir() -> tuple[str, ...]:
    from hydra._internal.utils import get_args_parser

    folder = get_args_parser().parse_args().config_dir
    return ("--config-dir", folder) if folder else ()


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with all flags before all key=value pairs: Hydra's parser refuses them mixed.

    Raises: ConfigError for a flag that does not exist.
    """
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help and --hydra-help")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    pairs = list(parser.parse_intermixed_args(arguments).overrides)
    flags = list(arguments)
    for pair in pairs:
        flags.remove(pair)
    return [*flags, *pairs]


def _refuse_name_overrides(arguments: Sequence[str]) -> None:
    for argument in arguments:
        key, equals, value = argument.partition("=")
        kind, _, name = key.lstrip("+~").partition(".")
        if kind in KINDS and not name and value in ("", "null") and equals:
            raise ConfigError(_UNSET.format(kind=kind))
        if equals and name == "name" and kind in KINDS:
            raise ConfigError(f"'{argument}' would change a name and not the option; write {kind}={value}")


@contextmanager
def _argv(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0] if before else "hookline", *arguments]
    # Hydra would otherwise print its errors itself and exit with code 1.
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
