"""The command line of `hookline quantize`: which checkpoint, which quantization, and where to. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.cli.command import guarded
from hookline.core.errors import ConfigError
from hookline.core.util.process import called_as
from hookline.core.util.text import near_miss

if TYPE_CHECKING:
    from hookline.core.plugin.host import PluginHost
    from hookline.core.quantize.job import Job

USAGE = """\
{quantize} SOURCE TARGET quantization=NAME [quantization.KEY=VALUE ...] [model=NAME]

SOURCE        a checkpoint of safetensors that is not quantised: a folder, or a hub id
TARGET        the folder to write, which must be empty or not be there
quantization  what quantises it, for example fp8, fp8_block, int8 or int4, with its options
model         what reads the checkpoint, if not the model that its config.json names
texts         a file of texts (.jsonl: {{"text": "..."}} in each row; -: standard input); says the perplexity before and
              after, on its end
rounding      nearest, or calibrated: for the inputs that the other texts give each linear
device        where the texts are computed: auto, cpu, cuda, cuda:N"""
KINDS = ("quantization", "model")
NEAREST, CALIBRATED = "nearest", "calibrated"
PLAIN = {"texts": "", "rounding": NEAREST, "device": "auto"}
"""The keys without fields, and their defaults."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint and return the exit code: 0, or 2 after an error of one line."""
    return guarded(_run, arguments, name="quantize")


def _run(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(USAGE.format(quantize=called_as("quantize")))
        return 0
    from hookline.core.plugin.host import PluginHost

    host = PluginHost.load()
    host.log_problems()
    job = parse(arguments, host)
    from hookline.core.quantize.write import write_quantised

    print(write_quantised(job, host))
    return 0


def parse(arguments: Sequence[str], host: PluginHost) -> Job:
    """The job that a command line names: the checkpoint, its quantization, and the folder to write.

    Raises: ConfigError for an unknown key, an invalid value, or folders that are missing or too many.
    """
    from omegaconf import OmegaConf

    from hookline.core.checkpoint.locate import refuse_absent
    from hookline.core.config.settings import validate
    from hookline.core.quantize.job import Job

    folders, pairs, plain = [], [], dict(PLAIN)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        kind = key.partition(".")[0]
        if not equals or not re.fullmatch(r"[\w.]+", key):
            folders.append(argument)
        elif kind in KINDS:
            pairs.append(f"{key}.name={value}" if key == kind else argument)
        elif key in plain:
            plain[key] = value
        else:
            known = (*KINDS, *PLAIN)
            raise ConfigError(f"unknown key '{key}'.{near_miss(kind, known)} Available: {', '.join(known)}")
    if len(folders) != 2:
        raise ConfigError(
            f"a source and a target are needed, and {len(folders)} are given: {called_as('quantize')} SOURCE TARGET "
            "quantization=int4"
        )
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist(pairs))
    if "name" not in tree.get("quantization", {}):
        raise ConfigError("it is not said how to quantise; give quantization=fp8, fp8_block, int8 or int4")
    tree["model"] = {"name": "auto", **tree.get("model", {}), "checkpoint": folders[0]}
    refuse_absent(folders[0], is_claimed=tree["model"]["name"] != "auto")
    target = Path(folders[1])
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already; give a folder that is empty or not there")
    if plain["rounding"] not in (NEAREST, CALIBRATED):
        raise ConfigError(f"rounding={plain['rounding']} is not one of {NEAREST}, {CALIBRATED}")
    is_calibrated = plain["rounding"] == CALIBRATED
    if is_calibrated and not plain["texts"]:
        raise ConfigError("rounding=calibrated rounds for the inputs that texts give; give texts=FILE, some 300 kB")
    texts = Path(plain["texts"]) if plain["texts"] else None
    validate({**tree, "device": plain["device"]}, host)  # a device that is not there costs no reading
    return Job(validate({**tree, "device": "cpu"}, host), target, texts, is_calibrated, plain["device"])
