"""Ray Data on a small cluster of two nodes, with processes killed in the middle: each row has one answer.

Processes are killed by SIGKILL, from within, at a moment when some of their rows are answered and others are not.
tools/drill_ray_data.py is the same on 20,000 rows, with the rates.
"""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("ray.data", reason="needs the extra: pip install hookline[ray]")
pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")

from hookline.core.batch import ray_parts
from hookline.core.batch.folder import answer_folder
from hookline.core.batch.settings import validate_batch
from hookline.core.plugin.host import PluginHost
from hookline.data import Generate
from tests.ray_folder import cluster_of, ray_folder

ROOT = Path(__file__).parents[1]
ENGINE = {"max_num_seqs": 4, "max_model_len": 64, "cpu_cache_gib": 0.02}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core each, made up on this machine."""
    import ray

    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    with ray_folder():
        cluster = cluster_of({**node, "include_dashboard": False}, node)
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ray.init(address=cluster.address, runtime_env={"env_vars": environ}, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray
        ray.shutdown()
        cluster.shutdown()


def killed_once(flag):
    """Have the process killed by SIGKILL, a moment from now; only the first that asks."""
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGKILL)


def test_each_row_of_a_data_set_comes_once_though_an_actor_is_killed(cluster, tmp_path):
    import pyarrow as pa

    flag = tmp_path / "killed"

    class Mortal(Generate):
        async def __call__(self, batch):
            killed_once(flag)
            return await super().__call__(batch)

    blocks = [pa.table({"id": [*range(at, at + 8)], "prompt": ["import os"] * 8}) for at in range(0, 80, 8)]
    blocks.append(pa.table({"id": [80], "prompt": pa.array([None], pa.string())}))
    sampling = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    options = Generate.options({"engine": ENGINE}, sampling=sampling, batch_size=8, num_cpus=1)
    rows = cluster.data.from_arrow(blocks).map_batches(Mortal, **options).take_all()
    assert flag.exists()
    assert sorted(row["id"] for row in rows) == [*range(81)]
    texts = {row["text"] for row in rows if row["id"] < 80}
    assert len(texts) == 1 and all(row["num_completion_tokens"] == 24 for row in rows if row["id"] < 80)
    [bad] = [row for row in rows if row["error"] is not None]
    assert bad["id"] == 80 and "a row needs one of prompt" in bad["error"]


@pytest.mark.nightly
def test_each_row_of_a_folder_has_one_answer_though_an_actor_is_killed(cluster, tmp_path, monkeypatch):
    flag, input, output = tmp_path / "killed", tmp_path / "questions", tmp_path / "answers"

    class Mortal(ray_parts.PartWorker):
        async def __call__(self, batch):
            killed_once(flag)
            return await super().__call__(batch)

    monkeypatch.setattr(ray_parts, "PartWorker", Mortal)
    input.mkdir()
    body = {"prompt": "import os", "max_tokens": 24, "ignore_eos": True}
    row = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **row}) for number in range(60)]
    (input / "a.jsonl").write_text("\n".join([*lines, "nonsense"]))
    batch = {"executor": "ray", "replicas": 2, "part_rows": 6, "num_cpus": 1}
    host = PluginHost.load()
    run = validate_batch([str(input), str(output)], {"engine": ENGINE, "batch": batch}, host)
    tally = answer_folder(run, host, print)
    assert flag.exists()
    found = [json.loads(line) for line in (output / "a.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [*map(str, range(60)), None]
    assert all(one["response"]["status_code"] == 200 for one in found[:-1])
    assert (tally.num_answered, tally.num_failed) == (60, 1)
    (told,) = tally.told
    assert told.startswith("a.jsonl, line 61: not JSON: Expecting value: line 1 column 1 (char 0); a line is a request")
