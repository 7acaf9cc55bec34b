"""Has Hydra compose the command line into plain trees: one for a run, one for each job of a sweep.

The only place that runs Hydra. Its errors become our own, of one line each. Engines run outside of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from hookline.core.config import known_flags
from hookline.core.config.hydra_errors import explain
from hookline.core.config.hydra_options import (
    add_free_keys,
    as_typed,
    is_raw,
    named_in_mapping,
    quote_raw_values,
    search_path_overrides,
    store_keys,
    store_options,
)
from hookline.core.config.schema import describe, documented, plain_defaults
from hookline.core.config.shorthands import CHECKPOINT, write_out
from hookline.core.contracts.hooks import PROJECT
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF
from hookline.core.plugin.registry import KINDS
from hookline.core.util.process import called_as

SWEPT = "*,("
"""Of these characters, a value that is swept has one: `a,b`, `glob(*)`, `range(1,3)`."""
CHOICES = (*KINDS, "workload", "experiment")
"""Keys whose value is the name of an option or a preset."""


@dataclass(frozen=True)
class ComposedJob:
    """A composed configuration: a tree of plain values and, for a job of a sweep, the arguments of its process.

    overrides: the arguments, as results show them. arguments: the command line of the job's process. fault: the error
    of an interpolation in the tree that cannot be resolved.
    """

    tree: dict[str, Any]
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    number: int = 0
    folder: Path | None = None
    sweep_folder: Path | None = None
    fault: str | None = None


def compose(
    arguments: Sequence[str],
    host: PluginHost,
    keys: type,
    config_name: str = "config",
    run_job: Callable[[ComposedJob], float | None] | None = None,
    positional: str | None = None,
) -> list[ComposedJob]:
    """The jobs that the arguments ask for; none if Hydra was only asked to show something.

    keys: the dataclass of the command's root keys beside the kinds, which config_name's defaults list takes as `keys`.
    run_job: called with each job by Hydra's launcher, which may pickle it and call it in another process; no jobs are
    returned then. Its return value is the job's result for Hydra's sweeper. positional: see `write_out`.
    Raises: ConfigError or PluginError with the near miss and what is available.
    """
    if any(len(one) > 2 and "--version".startswith(one) for one in arguments):
        print(f"{PROJECT} {importlib.metadata.version(PROJECT)}")
        return []
    full_keys = full_keys_of(keys)
    flags, pairs = flags_and_pairs(arguments, full_keys)
    arguments = [*flags, *write_out(pairs, positional, full_keys)]
    _refuse_name_overrides(arguments)
    store_options(host)
    store_keys(keys)
    raw = tuple(argument for argument in arguments if is_raw(argument))
    found: list[ComposedJob] = []
    readable = add_free_keys(quote_raw_values(arguments))
    with _argv(search_path_overrides(readable, host.config_packages)):
        try:
            _run_hydra(config_name, _Task(raw, _config_dir(), run_job or found.append))
        except SystemExit:
            asked = _flag_parser().parse_intermixed_args(arguments)
            if not asked.help and not asked.hydra_help:
                raise
            if asked.help:
                print("== Keys ==\nWhat a key is unless it is set, and what it means; None is written null.\n")
                print("\n".join(documented(keys)))
        except Exception as error:
            explained = explain(error, host)
            if explained is None:
                raise
            raise explained from error
    if run_job is None:
        for job in found:
            if job.fault is not None:
                raise ConfigError(job.fault)
            _refuse_unset_kinds(job)
    return found


@dataclass(frozen=True)
class _Task:
    """The function that Hydra calls with each composed configuration. raw: arguments that the job's own
    process quotes.
    """

    raw: tuple[str, ...]
    config_dir: tuple[str, ...]
    run_job: Callable[[ComposedJob], float | None]

    def __call__(self, config: Any) -> float | None:
        # No error may leave this method, because Hydra would print it before it raises it again.
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        settings = HydraConfig.get()
        # Not resolved, because an override's text may contain a ${...} that has no meaning here.
        composed: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        # Hydra's spelling of a raw value is quoted already; self.raw has it as typed, and the job's process quotes it.
        overrides = (*(as_typed(override) for override in composed if not is_raw(override)), *self.raw)
        tree, fault = _resolved(config)
        job = ComposedJob(tree, overrides, (*self.config_dir, *overrides), fault=fault)
        if settings.mode is RunMode.MULTIRUN:
            # Of the folder that the sweep was started in: a launcher may have brought us to another node's.
            sweep_folder = Path(settings.runtime.cwd, settings.sweep.dir)
            folder = sweep_folder / str(settings.sweep.subdir)
            job = replace(job, number=int(settings.job.num), folder=folder, sweep_folder=sweep_folder)
        return self.run_job(job)


def _resolved(config: Any) -> tuple[dict[str, Any], str | None]:
    """The composed configuration as plain values, and the error of an interpolation that cannot be resolved.

    The only place where interpolations of the command line and its files are resolved: from here on, `${` is text.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    fault = None
    try:
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        tree, fault = OmegaConf.to_container(config, resolve=False), describe(error)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}, fault


def _run_hydra(config_name: str, task: _Task) -> None:
    import hydra
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("called_as", called_as, replace=True)  # for the helps in conf/
    with _help_on_demand(), _headers_behind_a_mark(), _composed_once(), _groups_read_once():
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)()


def _flag_parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    with _help_on_demand():
        return get_args_parser()


class _HelpOnDemand(argparse.ArgumentParser):
    """Does not look at a flag's help when the flag is added."""

    def _check_help(self, action: argparse.Action) -> None:
        pass


@contextmanager
def _help_on_demand() -> Iterator[None]:
    """While active, Hydra 1.3 can make its parser in Python 3.14, which refuses a help that is not a text yet."""
    utils: Any = importlib.import_module("hydra._internal.utils")
    before = utils.argparse
    utils.argparse = SimpleNamespace(ArgumentParser=_HelpOnDemand)
    try:
        yield
    finally:
        utils.argparse = before


@contextmanager
def _headers_behind_a_mark() -> Iterator[None]:
    """While active, Hydra 1.3 reads a file's `# @package` behind a byte order mark, too; YAML itself passes over it."""
    from hydra.plugins.config_source import ConfigSource

    source: Any = ConfigSource
    before = source._get_header_dict
    with _replaced(source, "_get_header_dict", staticmethod(lambda text: before(text.removeprefix("\ufeff")))):
        yield


@contextmanager
def _composed_once() -> Iterator[None]:
    """While active, Hydra 1.3 composes a run once instead of twice: the composition by which it reads `hydra.mode`, or
    its error, is reused for the run, since only a sweep is composed in another way.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.types import RunMode

    loader: Any = ConfigLoaderImpl
    before, kept = loader.load_configuration, list[tuple[list[str], Any]]()

    def _load(self: Any, config_name: str | None, overrides: list[str], run_mode: RunMode, **how: Any) -> Any:
        told, config = kept.pop() if kept else (None, None)
        if run_mode is RunMode.RUN and told is not None and overrides in (told, [*told, "hydra.mode=RUN"]):
            if isinstance(config, Exception):
                raise config
            return config
        if run_mode is RunMode.MULTIRUN and how.get("validate_sweep_overrides") is False:  # to read hydra.mode
            try:
                config = before(self, config_name, overrides, RunMode.RUN, from_shell=how.get("from_shell", True))
                kept.append((list(overrides), config))
                return config
            except Exception as error:
                if not any({*one} & {*SWEPT} for one in overrides):  # no sweep, which is composed in another way
                    kept.append((list(overrides), error))
                    raise
        return before(self, config_name, overrides, run_mode, **how)

    with _replaced(loader, "load_configuration", _load):
        yield


@contextmanager
def _groups_read_once() -> Iterator[None]:
    """While active, Hydra 1.3 copies all schemas once for its help, and not for each list of options in it."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.object_type import ObjectType

    loader: Any = ConfigLoaderImpl
    before, repositories = loader.get_group_options, list[Any]()

    def _options(self: Any, group_name: str, results_filter: Any = ObjectType.CONFIG, **choice: Any) -> Any:
        if any(choice.values()):  # of a glob in a sweep, which depends on the other overrides
            return before(self, group_name, results_filter, **choice)
        if not repositories:
            repositories.append(self._parse_overrides_and_create_caching_repo(None, [])[1])
        return repositories[0].get_group_options(group_name, results_filter)

    with _replaced(loader, "get_group_options", _options):
        yield


@contextmanager
def _replaced(owner: type, name: str, method: Any) -> Iterator[None]:
    """While active, Hydra's class has another method of this name."""
    before = vars(owner)[name]
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _unset(kind: str) -> ConfigError:
    return ConfigError(f"{kind} needs an option; it can be neither null nor deleted: {called_as('info')} lists them")


def _refuse_unset_kinds(job: ComposedJob) -> None:
    for kind in KINDS:
        if job.tree.get(kind) is None:
            raise _unset(kind)


def _config_dir() -> tuple[str, ...]:
    folder = _flag_parser().parse_args().config_dir
    return ("--config-dir", folder) if folder else ()


def flags_and_pairs(arguments: Sequence[str], keys: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The arguments as flags, each with its value behind it, and the rest: Hydra's parser refuses them mixed.

    keys: full keys, for the error of a flag that is spelled like a key.
    Raises: ConfigError for a flag that does not exist.
    """

    def _refuse(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        raise ConfigError(_meant_key(arguments, unknown, keys) or f"{message}; see --help and --hydra-help")

    parser = _flag_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    pairs = list(parser.parse_intermixed_args(arguments).overrides)
    flags = list(arguments)
    for pair in pairs:
        flags.remove(pair)
    return flags, pairs


def full_keys_of(keys: type) -> list[str]:
    """The full keys of a command, including those of its groups."""
    values = plain_defaults(keys)
    inner = [f"{key}.{one}" for key, value in values.items() if isinstance(value, dict) for one in value]
    return [*values, *KINDS, *inner]


def _meant_key(arguments: Sequence[str], unknown: Sequence[str], keys: Sequence[str]) -> str | None:
    """The error for the unknown flags that are spelled like keys, as --port is like serve.port, or that another engine
    has for keys; None without any.
    """
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    known = {*keys, *KINDS}

    def _is_known(key: str) -> bool:
        return key in known or key.partition(".")[0] in KINDS

    by_name |= {flag.replace("-", "_"): key for flag, key in known_flags.KEYS.items() if _is_known(key)}
    meant = dict[str, str]()
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or argument not in unknown:
            continue
        setting = known_flags.SETTINGS.get(flag[2:])
        key = by_name.get(flag[2:].replace("-", "_"))
        if setting is not None and _is_known(setting.partition("=")[0]):
            meant[flag] = setting
        elif key is not None:
            follows = arguments[place + 1] if place + 1 < len(arguments) else ""
            value = value if equals else follows if follows and not follows.startswith("-") else "..."
            if key == CHECKPOINT and value != "..." and "/" not in value and not Path(value).is_dir():
                key = "model"  # the name of a model or a preset
            meant[flag] = shlex.quote(f"{key}={value}")
    if not meant:
        return None
    return f"there is no flag {' or '.join(meant)}; write {' '.join(meant.values())}"


def _refuse_name_overrides(arguments: Sequence[str]) -> None:
    for argument in arguments:
        key, equals, value = argument.partition("=")
        kind, _, name = key.lstrip("+~").partition(".")
        if kind in KINDS and not name and value in ("", "null") and equals:
            raise _unset(kind)
        if kind in CHOICES and not name and value.lstrip().startswith("["):
            raise ConfigError(f"{kind}={value} is a list, and {kind} takes one name; for a job of each: -m {kind}=a,b")
        if equals and name == "name" and kind in KINDS:
            raise ConfigError(f"'{argument}' would change a name and not the option; write {kind}={value}")
        if equals and kind in KINDS and not name and (chosen := named_in_mapping(argument)) is not None:
            fields = f"; fields go beside it, as {kind}.FIELD=VALUE"
            raise ConfigError(f"'{argument}' would change a name and not the option; write {kind}={chosen}{fields}")


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
