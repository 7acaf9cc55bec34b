"""Checks the hydra.* keys of a sweep: values that its sweeper or launcher cannot use are refused by their keys' names.

Knows the keys of the study and of joblib, the sweep's folder, and how submitit and Ray start jobs. Values of a wrong
type are left to Hydra, which names the key itself.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path

from hookline.core.cli.command import is_sweep
from hookline.core.config.hydra_options import is_raw, parsed
from hookline.core.errors import ConfigError
from hookline.core.util.ray_cluster import cluster_address

FOLDER, STORAGE, DIRECTION = "hydra.sweep.dir", "hydra.sweeper.storage", "hydra.sweeper.direction"
DIRECTIONS = ("minimize", "maximize")
STUDIES = ("study", "optuna", "ax", "nevergrad")
"""Sweepers that choose jobs by the figures of earlier jobs, ours and Hydra's."""
MAX_CHECKED = 100
"""Combinations of options that are tried before a study begins."""
OUTPUTS = "outputs"
"""Where sweeps lie unless FOLDER says otherwise (conf/config.yaml)."""
_AT_LEAST_1: tuple[Callable[[float], bool], str] = (lambda value: value >= 1, "must be at least 1")
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "hydra.sweeper.n_trials": _AT_LEAST_1,
    "hydra.sweeper.n_jobs": _AT_LEAST_1,
    "hydra.sweeper.max_batch_size": _AT_LEAST_1,
    "hydra.sweeper.max_failure_rate": (lambda value: 0 <= value <= 1, "must be from 0 to 1"),
    "hydra.launcher.n_jobs": (lambda value: value != 0, "must be at least 1, or -1: as many as there are cores"),
}
_STDLIB = Path(os.__file__).parent
_RAY_LAUNCHER = "hydra/launcher=ray"
_RAY_ADDRESS = "hydra.launcher.ray.init.address"
_RAY_MEMORY = "hydra.launcher.ray.init.object_store_memory"
_SUBMITIT, _SETUP = "hydra/launcher=submitit_local", "hydra.launcher.setup"


def check_settings(arguments: Sequence[str]) -> None:
    """Refuse values that the sweeper or launcher would refuse without the key's name, or that give no job.

    Raises: ConfigError.
    """
    is_study = any(one in ("hydra/sweeper=study", "hydra/sweeper=optuna") for one in map(_plain, arguments))
    for argument in map(_plain, arguments):
        key, _, value = argument.partition("=")
        if key in _NUMBERS:
            is_right, rule = _NUMBERS[key]
            number = _number(value)
            if number is not None and not is_right(number):
                raise ConfigError(f"{argument} {rule}")
        elif key == DIRECTION and value.strip("'\"") not in DIRECTIONS and "$" not in value:
            raise ConfigError(f"{argument} must be {' or '.join(DIRECTIONS)}")
        elif re.search(r"\b(range|interval)\(", value) and not is_raw(argument):
            _refuse_empty(argument, is_study)
    _refuse_lost(arguments)


def _refuse_lost(arguments: Sequence[str]) -> None:
    """Refuse values that would be ignored, because a sweep uses only the last argument of a key."""
    given: list[tuple[str, frozenset[str], bool, str]] = []
    for argument in arguments:
        key = argument.lstrip("+~").partition("=")[0]
        if argument.startswith("-") or key.startswith("hydra") or is_raw(argument):
            continue
        keys, swept = _keys_set(argument), is_swept(argument)
        for other, others, is_other_swept, text in given:
            is_mapping = key == other and {key} not in (keys, others)
            both = keys & others if swept or is_other_swept else frozenset()
            if both or is_mapping or (key == other and (swept or is_other_swept)):
                what = min(both, default=key)
                raise ConfigError(
                    f"{text} and {argument} both set {what}, and each job of a sweep would have one of them; give a "
                    "key once (keys of a mapping one by one, e.g. engine.block_size=16,32)"
                )
        given.append((key, keys, swept, argument))


def _keys_set(argument: str) -> frozenset[str]:
    """The keys that an argument sets, with full names for the keys inside of mappings, over all of its values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = argument.lstrip("+~").partition("=")
    if "{" not in value:
        return frozenset((key,))
    try:
        override = OverridesParser.create().parse_override(argument)
        values = list(override.sweep_iterator()) if override.is_choice_sweep() else [override.value()]
    except HydraException:
        return frozenset((key,))
    return frozenset(name for one in values for name in _names(key, one))


def _names(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _names(f"{key}.{name}", inner)


def is_study(arguments: Sequence[str]) -> bool:
    """Whether the sweeper chooses jobs by the figures of earlier jobs."""
    return _given(arguments, "hydra/sweeper") in STUDIES


def fixed_arguments(arguments: Sequence[str], keys: Sequence[str]) -> list[str] | None:
    """The arguments that all jobs share, without those for Hydra itself.

    None if one of these root keys is swept, or if flags ask for more than a sweep.
    """
    fixed = []
    for argument in arguments:
        plain = _plain(argument)
        if is_sweep([argument]) or plain.startswith(("hydra.", "hydra/")):
            continue
        if argument.startswith("-"):
            return None
        if is_raw(argument) or not is_swept(argument):
            fixed.append(argument)
        elif re.split("[.=@]", plain)[0] in keys:
            return None
    return fixed


def each_choice(arguments: Sequence[str], groups: Sequence[str]) -> list[list[str]]:
    """The arguments of one run for each combination of options and presets that a sweep goes over, with the first value
    of each other key that it goes over. groups: keys that choose an option or a preset.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = []
    for argument in arguments:
        if is_sweep([argument]) or _plain(argument).startswith(("hydra.", "hydra/")):
            continue
        if is_raw(argument) or not is_swept(argument):
            values.append([argument])
            continue
        override = OverridesParser.create().parse_override(argument)
        if override.is_choice_sweep():
            found = [f"{override.get_key_element()}={one}" for one in override.sweep_string_iterator()]
            values.append(found if _plain(argument).partition("=")[0] in groups else found[:1])
    return [list(one) for one in islice(product(*values), MAX_CHECKED)]


def keys_of_each_job(arguments: Sequence[str], groups: Sequence[str]) -> list[str]:
    """The arguments of a sweep in which keys below a swept choice are written as a sweep over one value.

    Hydra first composes what all jobs share. At that point only the default option is chosen, which may not have the
    key; a swept key is set in each job.
    """
    told = list(arguments)
    swept = [one for one in told if is_swept(one) and one.lstrip("+").partition("=")[0].split("@")[0] in groups]
    if not swept and not any(one.lstrip("+").startswith("hydra.sweeper.params") for one in told):
        return told
    return [_as_choice(one) if one.lstrip("+").partition(".")[0] in groups else one for one in told]


def _as_choice(argument: str) -> str:
    key, _, value = argument.partition("=")
    is_left = not value or key.startswith("~") or is_raw(argument) or is_swept(argument)
    return argument if is_left else f"{key}=choice({value})"


def is_swept(argument: str) -> bool:
    """Whether an argument gives a key several values. False for what Hydra cannot read, which Hydra reports itself."""
    return "=" in argument and (override := parsed(argument)) is not None and override.is_sweep_override()


def let_join_ray(arguments: Sequence[str]) -> list[str]:
    """The arguments with two more for Hydra's Ray launcher.

    The first is for when it must start a cluster because the last one on this machine is gone. The second removes its
    request for memory when it joins a cluster, because Ray refuses such a request for a running cluster.
    Raises: ConfigError if the cluster of RAY_ADDRESS does not answer.
    """
    told = list(arguments)
    if _RAY_LAUNCHER not in told:
        return told
    if not any(one.startswith(f"{_RAY_ADDRESS}=") for one in told) and (address := cluster_address(_RAY_LAUNCHER)):
        told.append(f"{_RAY_ADDRESS}={address}")
    if any(_RAY_MEMORY in one or one == f"{_RAY_ADDRESS}=local" for one in told):
        return told
    return [*told, f"+{_RAY_MEMORY}=null"]


def explain(error: Exception, arguments: Sequence[str]) -> ConfigError | None:
    """The error by the key that caused it; None if it is neither of the sweep's folder nor of the study's storage."""
    storage = _given(arguments, STORAGE)
    frames = traceback.walk_tb(error.__traceback__)
    if storage and any("/optuna/storages/" in Path(frame.f_code.co_filename).as_posix() for frame, _ in frames):
        shown = re.sub(r"//[^/]*@", "//...@", storage)  # without a password
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        return ConfigError(f"{STORAGE}={shown} cannot be used: {cause}")
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    if not _is_hydras(error) or not _is_of_folder(error.filename, arguments):
        return None
    return ConfigError(f"{FOLDER}: {error.filename} cannot be written: {error.strerror or error}")


def quiet_controllers(arguments: Sequence[str]) -> list[str]:
    """The arguments, with a further one for submitit's local launcher. A terminal's Ctrl-C also reaches the process
    beside each job, which then ends with a traceback; the argument hides it. Jobs have logs of their own.
    """
    has_setup = any(_plain(one).startswith(f"{_SETUP}=") for one in arguments)
    if has_setup or _SUBMITIT not in map(_plain, arguments):
        return list(arguments)
    return [*arguments, f"+{_SETUP}=['exec 2>/dev/null']"]


def _plain(argument: str) -> str:
    return argument.lstrip("+")


def _given(arguments: Sequence[str], key: str) -> str | None:
    values = [one.partition("=")[2].strip("'\"") for one in map(_plain, arguments) if one.startswith(f"{key}=")]
    return values[-1] if values else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _refuse_empty(argument: str, is_study: bool) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return  # Hydra reports it
    if isinstance(value, IntervalSweep) and value.start is not None and value.end is not None:
        if value.start > value.end:
            raise ConfigError(f"{argument} holds no value: {value.start} is above {value.end}")
    elif isinstance(value, RangeSweep) and value.start is not None and value.stop is not None:
        start, stop, step = value.start, value.stop, value.step
        has_end = is_study and start == stop  # Optuna's ranges include their ends
        if (stop - start) * step <= 0 and not has_end:
            raise ConfigError(f"{argument} holds no value: no step of {step} leads from {start} to {stop}")
        if is_study and step < 0:
            raise ConfigError(f"{argument} goes down, which a study cannot; write range({stop},{start},{-step})")


def _is_hydras(error: BaseException) -> bool:
    """Whether an error comes from Hydra or one of its plugins, and not from a job."""
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [file for file in files if file.parent != _STDLIB]
    return bool(own) and not {"hydra", "hydra_plugins", "omegaconf"}.isdisjoint(own[-1].parts)


def _is_of_folder(path: str, arguments: Sequence[str]) -> bool:
    """Whether a path is the sweep's folder, is inside of it or contains it; of a folder's name, the part before a
    ${...} counts.
    """
    plain, dollar, _ = (_given(arguments, FOLDER) or OUTPUTS).partition("${")
    start = os.path.basename(plain) if dollar else ""
    folder = Path(os.path.abspath(os.path.dirname(plain) if dollar else plain))
    other = Path(os.path.abspath(path))
    if folder.is_relative_to(other):
        return True
    return other.is_relative_to(folder) and other.relative_to(folder).parts[0].startswith(start)
