"""docs/cluster.md and cluster_failures.md: each command is run by a test named here, as it is or on a smaller load."""

import ast
import tomllib

import pytest

from tests.doc_pages import ROOT, blocks, commands

PAGES = ROOT / "docs/cluster.md", ROOT / "docs/cluster_failures.md"
FOLDER, ON_RAY = "hookline batch questions answers", "batch.executor=ray batch.replicas=2"
KILLED = "tests/test_ray_data.py::test_each_row_of_a_folder_has_one_answer_though_an_actor_is_killed"
RAY_SERVE = "tests/test_ray_serve.py::"
TESTED: dict[str, str] = {
    FOLDER: "tests/core/batch/test_folder.py::test_lines_and_tables_are_answered_by_one_engine",
    f"{FOLDER} {ON_RAY}": KILLED,
    "ray start --head --port=6379": KILLED,
    "ray start --address=first-machine:6379": KILLED,
    f"RAY_ADDRESS=auto {FOLDER} {ON_RAY}": KILLED,
    "hookline bench -m hydra/launcher=ray scheduler=prefill_first,chunked": "tests/test_launchers.py::"
    "test_jobs_run_where_a_launcher_puts_them_and_report_as_usual",
    "serve run hookline.serve.ray:app model=qwen3_0_6b engine.max_num_seqs=64 ray.max_replicas=4": RAY_SERVE
    + "test_a_stream_ends_in_a_replica_and_says_what_a_whole_answer_says",
    "serve deploy deploy/ray_serve.yaml": RAY_SERVE
    + "test_the_serve_config_builds_a_deployment_that_scales_and_drains",
    "kubectl apply -f deploy/ray_service.yaml": RAY_SERVE
    + "test_the_ray_service_asks_for_what_its_workers_have_and_gives_them_time_to_drain",
    "python tools/drill_ray_data.py rows=20000 tokens=16 kills=2 rounds=1": KILLED,
    'pip install "hookline[ray,serve]"': "tests/test_cluster_page.py::test_the_extra_ray_brings_ray",
    'pip install "hookline[ray]"': "tests/test_cluster_page.py::test_the_extra_ray_brings_ray",
    "hookline run pp=2 engine.executor=ray": (
        "tests/test_ray_ranks.py::test_two_stages_on_two_nodes_give_the_tokens_of_one"
    ),
    "hookline run tp=2 engine.executor=ray": (
        "tests/test_ray_ranks.py::test_two_ranks_on_two_nodes_give_the_tokens_of_one"
    ),
}
"""A command of the page -> the test that runs it or the like of it, `tests/file.py::name`."""
SNIPPETS: dict[str, str] = {
    "from hookline.data import Generate": "tests/test_ray_data.py::"
    "test_each_row_of_a_data_set_comes_once_though_an_actor_is_killed",
}
"""What names a snippet of Python or YAML -> the test that runs it, or the like of it."""


def test_every_command_of_the_pages_has_a_test():
    assert {line for page in PAGES for line in commands(page)} == set(TESTED)


def test_the_extra_ray_brings_ray():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(one.startswith("ray[") for one in extras["ray"])


def test_every_snippet_of_the_pages_has_a_test():
    bodies = [block.body for page in PAGES for block in blocks(page) if block.language in ("python", "yaml")]
    assert all(sum(name in body for body in bodies) == 1 for name in SNIPPETS)
    assert all(any(name in body for name in SNIPPETS) for body in bodies)


@pytest.mark.parametrize("test", sorted({*TESTED.values(), *SNIPPETS.values()}))
def test_a_test_that_is_named_exists(test):
    path, _, name = test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in names
