"""`hookline new KIND NAME`: write a distribution with a plugin of that kind, runnable and tested from the start.

Fills in the templates in two folders of core/new/templates: common/ and the folder of the kind. Imports no torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import keyword
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from string import Template

from hookline.core.cli.command import Arguments, guarded
from hookline.core.contracts.hooks import PROJECT
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import AUTO, CHOSEN_KINDS
from hookline.core.util.process import called_as
from hookline.core.util.text import near_miss

TEMPLATES = Path(__file__).resolve().parent / "templates"
"""A folder for each kind, and common/; every file is a string.Template, its name ends in .txt."""
COMMON, COMMANDS, SUFFIX = "common", "commands.txt", ".txt"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_WHAT = {
    "scheduler": "a scheduler policy",
    "kernels": "a set of kernels",
    "grammars": "a grammar back end",
    "observer": "an observer",
    "processor": "a logits processor",
    "extension": "a step extension",
    "reasoning_parser": "a reasoning parser",
    "tool_parser": "a tool parser",
    "api": "an API surface",
    "drafter": "a drafter",
    "executor": "an executor",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the distribution, print the next commands, and return the exit code."""
    parser = Arguments(
        usage=f"{called_as('new')} KIND NAME [--folder FOLDER], where KIND is one of {', '.join(kinds())}",
        description="Write a distribution with a plugin that runs and passes its tests.",
    )
    parser.add_argument("kind", help="what to write")
    parser.add_argument("name", help="the option's name, e.g. my_policy")
    parser.add_argument("--folder", type=Path, default=None, help="where to write it; hookline-NAME here if left out")
    options = parser.parse_args(arguments)
    return guarded(partial(_write, options), ())


def _write(options: argparse.Namespace, _: Sequence[str]) -> int:
    folder = write_skeleton(options.kind, options.name, options.folder)
    print(f'{folder} is {_what(options.kind)} that runs. Next:\n  cd {folder} && pip install -e ".[dev]"')
    commands = [line.replace(f"{PROJECT} ", called_as(""), 1) for line in _commands(options.kind, options.name)]
    print("\n".join(f"  {line}" for line in ("python -m pytest", *commands)))
    return 0


def kinds() -> list[str]:
    """The kinds that there are templates for, sorted."""
    return sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name != COMMON)


def write_skeleton(kind: str, name: str, folder: Path | None = None) -> Path:
    """Write the distribution into a folder that is new or empty, and return the folder.

    Raises: ConfigError for an unknown kind, a name that cannot be one or is a built-in's, or a folder that is in use.
    """
    if kind not in kinds():
        raise ConfigError(f"there is no skeleton of a '{kind}'.{near_miss(kind, kinds())} Kinds: {', '.join(kinds())}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"'{name}' cannot be a plugin's name: lower-case words joined by _, e.g. my_policy")
    _refuse_taken(kind, name)
    folder = Path(f"{PROJECT}-{name.replace('_', '-')}") if folder is None else folder
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; name another with --folder, or remove it")
    values = _values(kind, name)
    for source in (TEMPLATES / COMMON, TEMPLATES / kind):
        for path in sorted(source.rglob(f"*{SUFFIX}")):
            if path.name != COMMANDS:
                _fill_in(path, folder / _target(path.relative_to(source), values), values)
    return folder


def _refuse_taken(kind: str, name: str) -> None:
    host = PluginHost.load()
    entry = host.registry.find(kind, name)
    built_in = {preset.name for preset in host.presets if preset.kind == kind and preset.distribution == PROJECT}
    if (entry is not None and entry.origin.distribution == PROJECT) or name in built_in:
        raise ConfigError(f"{kind} '{name}' is built in; choose another name")
    if name == AUTO and kind in CHOSEN_KINDS:
        raise ConfigError(f"{kind}={AUTO} leaves the choice to {PROJECT}; choose another name")


def _values(kind: str, name: str) -> dict[str, str]:
    major, minor = importlib.metadata.version(PROJECT).split(".")[:2]
    return {
        "name": name,
        "package": f"{PROJECT}_{name}",
        "distribution": f"{PROJECT}-{name.replace('_', '-')}",
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "what": _what(kind),
        "compatible": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "commands": "\n".join(_commands(kind, name)),
    }


def _what(kind: str) -> str:
    return _WHAT.get(kind, f"a {kind}")


def _commands(kind: str, name: str) -> list[str]:
    """Commands that use the plugin once it is installed."""
    return Template((TEMPLATES / kind / COMMANDS).read_text(encoding="utf-8")).substitute(name=name).splitlines()


def _target(path: Path, values: dict[str, str]) -> Path:
    named = str(path).replace("PACKAGE", values["package"]).replace("NAME", values["name"])
    return Path(named.removesuffix(SUFFIX))


def _fill_in(template: Path, path: Path, values: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
