"""Complete distributions, built to wheels, installed into a fresh environment and used there as a stranger would.

Those of examples/, and one of each kind that `core.new` writes. Their own tests run there, too.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from core.new import kinds, write_skeleton
from tests.fresh_environment import ROOT, FreshEnvironment

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))
NAMES = {kind: f"new_{kind}" for kind in kinds()}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    folder = tmp_path_factory.mktemp("distributions")
    skeletons = [write_skeleton(kind, name, folder / f"hookline-new-{kind}") for kind, name in NAMES.items()]
    environment = FreshEnvironment(folder)
    environment.install([ROOT, *EXAMPLES, *skeletons])
    return environment


def test_hookline_and_every_distribution_come_from_their_wheels(environment: FreshEnvironment) -> None:
    done = environment.run("-m", "core.info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    installed = {plugin["distribution"] for plugin in facts["plugins"]}
    wanted = {path.name for path in EXAMPLES} | {f"hookline-new-{kind}" for kind in NAMES}
    assert (facts["problems"], wanted - installed) == ([], set())
    outside = [one for one in facts["plugins"] if not Path(one["file"]).is_relative_to(environment.site)]
    assert outside == []


def test_every_distribution_passes_its_own_tests_there(environment: FreshEnvironment) -> None:
    folders = [environment.folder / f"hookline-new-{kind}" for kind in NAMES]
    folders += [copied_tests(environment, example) for example in EXAMPLES]
    settings = [
        "-v",
        "--import-mode=importlib",
        "-c",
        str(folders[0] / "pyproject.toml"),
        f"--rootdir={folders[0].parent}",
    ]
    done = environment.run("-m", "pytest", *settings, *(str(folder / "tests") for folder in folders))
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in folders:
        assert re.search(rf"{folder.name}/tests/test_\w+\.py::\S+ PASSED", done.stdout), folder.name


def test_what_core_new_writes_runs_together(environment: FreshEnvironment) -> None:
    kinds = [f"{kind}={NAMES[kind]}" for kind in ("model", "scheduler", "sampler", "kernels")]
    fields = ["scheduler.max_prompts=2", "sampler.sharpness=2", "prompts=[[1,2,3],[4]]", "sampling.max_tokens=4"]
    done = environment.run("-m", "core.run", *kinds, *fields)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 tokens, length") == 2
    assert "new_observer: 2 requests ended by length, 4 steps, 10 tokens computed" in done.stderr


def test_sjf_is_swept_against_prefill_first_with_its_presets(environment: FreshEnvironment) -> None:
    arguments = ["-m", "scheduler=prefill_first,sjf_patient", "engine.max_num_seqs=2", "sampling.max_tokens=4"]
    done = environment.run("-m", "core.run", *arguments)
    assert done.returncode == 0, done.stderr
    results = sorted(environment.folder.glob("outputs/*/*/output.jsonl"))
    tokens = [[json.loads(line)["token_ids"] for line in path.read_text().splitlines()] for path in results]
    assert len(tokens) == 2 and tokens[0] == tokens[1], "a policy must not change a token"


def copied_tests(environment: FreshEnvironment, example: Path) -> Path:
    """A copy of an example's tests without its package: only what is installed can be imported."""
    folder = environment.folder / f"tests-of-{example.name}"
    shutil.copytree(example / "tests", folder / "tests")
    return folder
