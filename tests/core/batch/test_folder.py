"""A batch over folders: whoever dies when, each row has one answer in the end. By fakes, and once by an engine."""

import asyncio
import fcntl
import json
import os
import random
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")

from hookline.core.batch import command, part_answers
from hookline.core.batch.command import main
from hookline.core.batch.folder import Finisher, answer_folder
from hookline.core.batch.output_folder import OutputFolder
from hookline.core.batch.part_answers import PartAnswers
from hookline.core.batch.parts import Part, PartTables, lines_of_part, source_of
from hookline.core.batch.rows import InputLine, RowError, answer_line, parse
from hookline.core.batch.runner import Tally
from hookline.core.batch.settings import validate_batch
from hookline.core.data.generate import Generate
from hookline.core.data.tables import with_answers
from hookline.core.errors import ConfigError, EngineError
from hookline.core.plugin.host import PluginHost


class Killed(BaseException):
    """Stands for a process that ends at once."""


@pytest.fixture(scope="module")
def host():
    return PluginHost.load()


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/a.jsonl").write_text("".join(f"a{number}\n" for number in range(23)))
    (tmp_path / "in/sub/b.jsonl").write_text("".join(f"b{number}\n" for number in range(5)))
    (tmp_path / "in/empty.jsonl").write_text("")
    return tmp_path / "in", tmp_path / "out"


def run_of(folders, host, **batch):
    return validate_batch([str(one) for one in folders], {"batch": {"part_rows": 4, **batch}}, host)


def answering(monkeypatch, run, dies_at=None):
    """Let parts be answered by a fake that echoes their lines. dies_at: what it counts to and ends."""
    count = iter(range(10**6))

    class Echo:
        def __init__(self, run, host):
            self._output = OutputFolder(run.output)

        async def answer(self, part, progress):
            if next(count) == dies_at:
                raise Killed
            lines = list(lines_of_part(run.input, part))
            self._output.write(part, b"".join(b"answer " + line.text for line in lines))
            return Tally(num_answered=len(lines))

        async def aclose(self):
            pass

    monkeypatch.setattr(part_answers, "PartAnswers", Echo)


def answers(folder):
    return {path.name: path.read_text().split("\n")[:-1] for path in folder.rglob("*.jsonl")}


def test_a_folder_becomes_a_folder_with_the_same_files_in_the_same_order(folders, host, monkeypatch):
    run, said = run_of(folders, host), []
    answering(monkeypatch, run)
    assert answer_folder(run, host, said.append).num_answered == 28 and said == []
    assert answers(folders[1]) == {
        "a.jsonl": [f"answer a{number}" for number in range(23)],
        "b.jsonl": [f"answer b{number}" for number in range(5)],
        "empty.jsonl": [],
    }
    assert not any((folders[1] / ".hookline/parts").rglob("0*"))
    assert answer_folder(run, host, said.append).num_answered == 0
    assert said == [f"{folders[1].resolve()} has the answers of 28 rows already"]


@pytest.mark.parametrize("seed", range(4))
def test_however_often_it_is_killed_each_row_has_one_answer(seed, folders, host, monkeypatch):
    run, draw, sources = run_of(folders, host, max_rows=draw_rows(seed)), random.Random(seed), answers(folders[0])
    really = os.replace

    def replaced(old, new):
        if draw.random() < 0.15:
            raise Killed
        really(old, new)
        if draw.random() < 0.15:
            raise Killed

    for attempt in range(60):
        answering(monkeypatch, run, dies_at=draw.randrange(6))
        monkeypatch.setattr(os, "replace", replaced if attempt < 40 else really)
        try:
            answer_folder(run, host, lambda line: None)
        except BaseException as error:
            assert is_killed(error)
            continue
        break
    else:
        pytest.fail("it never ended")
    assert attempt >= 1
    assert answers(folders[1]) == {name: [f"answer {line}" for line in lines] for name, lines in sources.items()}


def draw_rows(seed):
    """Rows in flight: of one part or of several."""
    return 4 if seed % 2 else 16


def is_killed(error):
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_killed, error.exceptions))
    return isinstance(error, Killed)


def test_a_part_that_is_answered_twice_counts_once(folders, host):
    output, source = OutputFolder(folders[1]), source_of(folders[0], "a.jsonl", 20)
    with output.locked():
        for text in (b"first\n", b"again\n"):
            output.write(source.parts[0], text)
        output.write(source.parts[1], b"last\n")
        output.finish(source)
    assert answers(folders[1]) == {"a.jsonl": ["again", "last"]}


def test_files_whose_last_parts_end_at_once_are_made_one_by_one(folders, host):
    output = OutputFolder(folders[1])
    sources = [source_of(folders[0], file, 100) for file in ("a.jsonl", "sub/b.jsonl")]
    at_once = []

    class Slow(OutputFolder):
        def finish(self, source):
            at_once.append(source.file)
            assert len(at_once) == 1
            threading.Event().wait(0.05)
            super().finish(source)
            at_once.clear()

    with output.locked():
        for source in sources:
            output.write(source.parts[0], f"of {source.file}\n".encode())
        finisher = Finisher(Slow(folders[1]), sources, [source.parts[0] for source in sources])
        with ThreadPoolExecutor() as threads:
            list(threads.map(finisher.part, [source.parts[0] for source in sources]))
    assert answers(folders[1]) == {"a.jsonl": ["of a.jsonl"], "b.jsonl": ["of sub/b.jsonl"]}


def test_what_does_not_fit_an_earlier_run_is_refused(folders, host, monkeypatch):
    run = run_of(folders, host)
    answering(monkeypatch, run)
    answer_folder(run, host, lambda line: None)
    with pytest.raises(ConfigError, match=r"batch.part_rows=5, and .* was begun with 4; give that, or take another"):
        answer_folder(run_of(folders, host, part_rows=5), host, lambda line: None)
    with pytest.raises(ConfigError, match=r"batch.task='chat', and .* was begun with 'completion'; give that, or take"):
        OutputFolder(folders[1]).agree([], {"part_rows": 4, "task": "chat"})
    (folders[0] / "a.jsonl").write_text("other\n")
    with pytest.raises(ConfigError, match=r"a.jsonl was changed since .* was begun; take another output"):
        answer_folder(run, host, lambda line: None)


def test_a_file_that_no_batch_wrote_is_left_alone(folders, host):
    folders[1].mkdir()
    (folders[1] / "a.jsonl").write_text("dear diary")
    with pytest.raises(ConfigError, match="no batch wrote it"):
        answer_folder(run_of(folders, host), host, lambda line: None)
    assert (folders[1] / "a.jsonl").read_text() == "dear diary"


def test_two_batches_do_not_write_to_one_folder(folders, host):
    (folders[1] / ".hookline").mkdir(parents=True)
    with (folders[1] / ".hookline/lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ConfigError, match="is being written by another batch"):
            answer_folder(run_of(folders, host), host, lambda line: None)


def test_a_part_that_was_written_elsewhere_is_missed(folders):
    with pytest.raises(ConfigError, match="must lie on a file system that all nodes share"):
        OutputFolder(folders[1]).finish(source_of(folders[0], "a.jsonl", 20))


def test_a_part_whose_absence_a_network_file_system_still_remembers_is_found(folders, monkeypatch):
    output, source = OutputFolder(folders[1]), source_of(folders[0], "a.jsonl", 100)
    output.write(source.parts[0], b"answer\n")
    really, remembered = Path.exists, output.path_of(source.parts[0])
    monkeypatch.setattr(Path, "exists", lambda path: path != remembered and really(path))
    output.finish(source)
    assert answers(folders[1]) == {"a.jsonl": ["answer"]}


@pytest.mark.parametrize(
    ("names", "batch", "message"),
    [
        (["in", "in/out"], {}, "lies inside the other"),
        (["in", "no/such/out"], {}, "cannot be written: give a folder"),
        (["in/a.jsonl", "out"], {"executor": "ray"}, "batch.executor=ray is for files read from a folder"),
        (["in", "out"], {"executor": "cloud"}, "batch.executor='cloud' is not one of local, ray"),
        (["in", "out"], {"replicas": 2}, "batch.replicas=2 needs batch.executor=ray"),
        (["in", "out"], {"part_rows": 0}, "batch.part_rows=0 must be at least 1"),
        (["in", "out"], {"task": "poetry"}, "batch.task='poetry' is not one of completion, chat, structured"),
    ],
)
def test_a_mistake_is_one_line(names, batch, message, folders, host, monkeypatch):
    monkeypatch.chdir(folders[0].parent)
    with pytest.raises(Exception, match=re.escape(message)):
        validate_batch(names, {"batch": batch}, host)


@pytest.mark.parametrize(
    ("column", "batch", "message"),
    [
        ("prompt", {"task": "chat"}, "has no column messages, which batch.task=chat reads; its columns: prompt, text"),
        ("prompt", {}, "has a column 'text' already; set batch.prefix=answer_"),
    ],
)
def test_columns_that_do_not_fit_are_told_before_anything_starts(column, batch, message, folders, host):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: ["a"], "text": ["b"]}), folders[0] / "c.parquet")
    with pytest.raises(ConfigError, match=re.escape(message)):
        answer_folder(run_of(folders, host, **batch), host, lambda line: None)


def test_two_columns_of_one_name_are_refused_before_anything_starts(folders, host):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["prompt", "id", "id"]), folders[0] / "c.parquet")
    with pytest.raises(ConfigError, match=r"c\.parquet has several columns 'id'; give each a name of its own"):
        answer_folder(run_of(folders, host), host, lambda line: None)


@pytest.mark.parametrize("place", [0, 1])
def test_a_parquet_with_a_name_that_no_parquet_can_have_is_refused_before_anything_starts(place, folders, host):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"]}), folders[0] / "c.parquet")
    before = folders[place]
    folders[place].mkdir(exist_ok=True)
    odd = before.rename(before.with_name(os.fsdecode(b"odd\xff")))
    folders = (odd, folders[1]) if place == 0 else (folders[0], odd)
    with pytest.raises(ConfigError, match=r"c\.parquet has a name that is not UTF-8"):
        answer_folder(run_of(folders, host), host, lambda line: None)


def test_rows_that_cannot_be_written_again_are_one_line_that_names_their_file(folders, host, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"]}), folders[0] / "c.parquet")
    (part,) = source_of(folders[0], "c.parquet", 4).parts
    answers = PartAnswers.__new__(PartAnswers)
    answers._run, answers._tables = run_of(folders, host), PartTables(folders[0])
    answers._output = OutputFolder(folders[1])

    async def rows(*_):
        return [{"error": "no"}]

    def refuse(*_):
        raise pa.ArrowNotImplementedError("no such type\nin parquet")

    answers._rows = SimpleNamespace(answers=rows)
    monkeypatch.setattr(pq, "write_table", refuse)
    with pytest.raises(
        ConfigError, match=r"the rows of .*c\.parquet cannot be written again: .*no such type in parquet"
    ):
        asyncio.run(answers.answer(part))


def test_deaths_of_a_file_with_the_longest_name_are_counted(folders, host):
    output, part = OutputFolder(folders[1]), Part("x" * 249 + ".jsonl", 3, 0, 0, 1)
    assert [output.count_death(part), output.count_death(part)] == [1, 2]


def test_a_parquet_without_rows_becomes_one_with_the_answers_columns(folders, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folders[0] / "c.parquet")
    source, output = source_of(folders[0], "c.parquet", 4), OutputFolder(folders[1])
    table = with_answers(PartTables(folders[0]).table_of(source.parts[0]), [], "completion")
    written = pa.BufferOutputStream()
    pq.write_table(table, written)
    output.write(source.parts[0], written.getvalue().to_pybytes())
    output.finish(source)
    assert pq.read_table(folders[1] / "c.parquet").column_names[:2] == ["prompt", "text"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"part_rows": 4}', '{"part_rows": 4, "files": []}', "[" * 100_000, "\xff"]
)
def test_a_note_of_an_earlier_run_that_is_damaged_is_named(text, folders, host):
    (folders[1] / ".hookline").mkdir(parents=True)
    (folders[1] / ".hookline/batch.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"batch\.json is damaged"):
        answer_folder(run_of(folders, host), host, lambda line: None)


@pytest.mark.parametrize(
    ("tree", "key"),
    [({"batch": {"task": "chat"}}, "batch.task"), ({"sampling": {"max_tokens": 3}}, "sampling")],
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_for_parquet_alone_is_refused_where_there_is_none(is_folder, tree, key, folders, host):
    names = [str(one) for one in folders] if is_folder else [str(folders[0] / "a.jsonl"), str(folders[1])]
    with pytest.raises(ConfigError, match=f"{key} is for rows in parquet, and the input has none") as caught:
        answer_folder(validate_batch(names, tree, host), host, lambda line: None)
    row = json.loads(str(caught.value).rpartition("in their body, as ")[2])  # one that can be copied
    assert parse(InputLine(1, json.dumps(row).encode(), 0)).path == "/v1/completions"


def test_a_node_without_the_folders_of_the_command_is_named_before_its_engine_starts(folders, host, monkeypatch):
    from hookline.core.batch import ray_parts

    monkeypatch.setattr(ray_parts, "PartAnswers", lambda run, host: "started")
    monkeypatch.setattr(ray_parts, "node_here", lambda: "10.0.0.2")
    run, (input, output) = run_of(folders, host), folders

    def refused(folder):
        return (
            f"node 10.0.0.2 does not see {folder}: input and output must lie on a file system that all nodes share, "
            "under the same path"
        )

    with pytest.raises(ConfigError) as found:
        ray_parts.check_shared(run, "10.0.0.2")
    assert str(found.value) == refused(output), "no batch was begun there"
    with OutputFolder(output).locked():
        ray_parts.check_shared(run, "10.0.0.2")
        shutil.rmtree(input)
        with pytest.raises(ConfigError) as found:
            ray_parts.PartWorker(run, {})
        assert str(found.value) == refused(input)
        with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.2 has another environment than the driver: torch is "):
            ray_parts.PartWorker(run, {"torch": "1.0"})


def test_an_actor_does_not_answer_again_what_is_written(folders, host, monkeypatch):
    import asyncio
    from dataclasses import asdict

    from hookline.core.batch import ray_parts

    class Dead:
        def __init__(self, run, host):
            pass

        async def answer(self, part):
            raise EngineError("gone")

    monkeypatch.setattr(ray_parts, "PartAnswers", Dead)
    monkeypatch.setattr(ray_parts, "leave", lambda error: pytest.fail(str(error)))
    worker, part = ray_parts.PartWorker(run_of(folders, host)), Part("a.jsonl", 0, 0, 0, 3)
    body = {"usage": {"completion_tokens": 7}}
    refused = {"status_code": 400, "request_id": "b", "body": {"error": {"message": "too long"}}}
    lines = [
        answer_line(InputLine(1, b"x", 1), "a", {"status_code": 200, "request_id": "a", "body": body}),
        answer_line(InputLine(2, b"x", 1), "b", refused),
        answer_line(InputLine(4, b"x", 1), None, None, RowError("invalid_line", "no object")),
    ]
    OutputFolder(folders[1]).write(part, b"".join(lines))
    [done] = asyncio.run(worker({"part": [json.dumps(asdict(part))]}))["done"]
    told = ["line 2: too long", "line 4: no object"]
    assert Tally(**json.loads(done)["tally"]) == Tally(num_answered=1, num_failed=2, num_tokens=7, told=told)


@pytest.mark.parametrize("task", ["completion", "embeddings"])
def test_a_table_that_is_written_is_counted_as_when_it_was_answered(task, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    from hookline.core.batch.ray_parts import tally_of
    from hookline.core.data.tables import with_answers

    answered = [{"num_completion_tokens": 5}, {"error": "too long"}, {"num_completion_tokens": 2}]
    pq.write_table(with_answers(pa.table({"id": [1, 2, 3]}), answered, task, "my_"), tmp_path / "0")
    tally = tally_of(tmp_path / "0", Part("c.parquet", 1, 0, 10, 3, 0), "my_")
    assert (tally.num_answered, tally.num_failed, tally.told) == (2, 1, ["row 12: too long"])
    assert tally.num_tokens == (7 if task == "completion" else 0)


def test_a_part_over_which_engines_die_is_not_tried_for_good(folders, host, monkeypatch):
    import asyncio
    from dataclasses import asdict

    from hookline.core.batch import ray_parts

    class Dead:
        def __init__(self, run, host):
            pass

        async def answer(self, part):
            raise EngineError("the device is lost")

    class LeftError(Exception):
        pass

    def leave(error):
        raise LeftError

    monkeypatch.setattr(ray_parts, "PartAnswers", Dead)
    monkeypatch.setattr(ray_parts, "leave", leave)
    worker, part = ray_parts.PartWorker(run_of(folders, host)), Part("a.jsonl", 1, 99, 4, 4)
    batch = {"part": [json.dumps(asdict(part))]}
    for _ in range(ray_parts.MAX_DEATHS - 1):
        with pytest.raises(LeftError):
            asyncio.run(worker(batch))
    with pytest.raises(EngineError) as raised:
        asyncio.run(worker(batch))
    assert str(raised.value) == "4 engines ended while they answered rows 5 to 8 of a.jsonl: the device is lost"
    OutputFolder(folders[1]).forget_deaths()
    with pytest.raises(LeftError):
        asyncio.run(worker(batch))


def test_all_parts_that_an_engine_died_over_are_named_and_not_only_who_heard_of_it_first(folders, host, monkeypatch):
    import asyncio
    from dataclasses import asdict

    from hookline.core.batch import ray_parts

    parts = [Part("a.jsonl", number, 0, 4 * number, 4) for number in range(2)]

    class Dead:
        def __init__(self, run, host):
            self.num_at, self.is_dead = 0, asyncio.Event()

        async def answer(self, part):
            self.num_at += 1
            if self.num_at == len(parts):
                self.is_dead.set()
            await self.is_dead.wait()
            raise EngineError("the device is lost")

    def leave(error):
        raise SystemExit  # which no other coroutine outlives, as with os._exit

    async def work():
        worker = ray_parts.PartWorker(run)
        await asyncio.gather(*(worker({"part": [json.dumps(asdict(part))]}) for part in parts))

    monkeypatch.setattr(ray_parts, "PartAnswers", Dead)
    monkeypatch.setattr(ray_parts, "leave", leave)
    run = run_of(folders, host)
    for _ in range(ray_parts.MAX_DEATHS - 1):
        with pytest.raises(SystemExit):
            asyncio.run(work())
    with pytest.raises(EngineError) as raised:
        asyncio.run(work())
    rows = "rows 1 to 4 of a.jsonl and rows 5 to 8 of a.jsonl"
    assert str(raised.value) == f"4 engines ended while they answered {rows}: the device is lost"


def test_a_batch_on_ray_without_ray_is_one_line(folders, host, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"batch\.executor=ray needs the package ray: pip install \"hookline\[ray\]\""
    ):
        answer_folder(run_of(folders, host, executor="ray"), host, lambda line: None)


def test_what_ray_tells_is_cut_to_its_cause():
    from hookline.core.batch.ray_parts import cause_of

    told = "the actor died\n  File x\n    raise\nhookline.core.errors.ConfigError: device=cuda: no CUDA device\n\n"
    assert cause_of(told) == "device=cuda: no CUDA device"
    assert cause_of("ValueError: no") == "ValueError: no" and cause_of("") == "it does not say why"


@pytest.mark.slow
def test_lines_and_tables_are_answered_by_one_engine(folders, capsys):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    body = {"prompt": "import", "max_tokens": 3, "ignore_eos": True}
    row = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **row}) for number in range(7)]
    (folders[0] / "a.jsonl").write_text("\n".join([*lines, "nonsense"]))
    (folders[0] / "sub/b.jsonl").unlink()
    _, offsets, data = pa.array([*[b"def"] * 8, b"\xff"]).buffers()
    prompts = pa.StringArray.from_buffers(9, offsets, data)
    pq.write_table(pa.table({"id": list(range(9)), "prompt": prompts}), folders[0] / "c.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folders[0] / "empty.parquet")
    sizes = ["batch.part_rows=4", "engine.max_num_seqs=4", "sampling.max_tokens=2", "sampling.temperature=0"]
    assert main([*map(str, folders), *sizes]) == 2
    told = capsys.readouterr().err
    assert "15 rows answered with " in told and "c.parquet, row 9: prompt cannot be read: UnicodeDecodeError: " in told
    found = [json.loads(line) for line in (folders[1] / "a.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [*map(str, range(7)), None]
    assert found[-1]["error"]["message"].startswith("line 8: not JSON")
    assert main([*map(str, folders), *sizes]) == 2
    assert "has the answers of 17 rows already, 2 of them failures; to try" in capsys.readouterr().err
    table = pq.read_table(folders[1] / "c.parquet").drop_columns(["prompt"]).to_pylist()
    assert [one["id"] for one in table] == list(range(9))
    assert len({one["text"] for one in table[:8]}) == 1 and table[0]["num_completion_tokens"] == 2
    assert table[8]["error"].startswith("prompt cannot be read: UnicodeDecodeError: ") and table[8]["text"] is None
    empty = pq.read_table(folders[1] / "empty.parquet")
    assert (empty.num_rows, empty.column_names[:2]) == (0, ["prompt", "text"])


def test_a_full_disk_is_one_line_and_the_parts_that_are_written_stay(folders, host, monkeypatch):
    run = run_of(folders, host)
    answering(monkeypatch, run)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    for module, name in (("shutil", "copyfileobj"), ("os", "replace")):
        with monkeypatch.context() as patched:
            patched.setattr(f"{module}.{name}", full)
            with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
                answer_folder(run, host, print)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            OutputFolder(run.output).write(Part("c.jsonl", 0, 0, 0, 1), b"")
    assert answer_folder(run, host, lambda said: None).num_failed == 0
    assert sum(map(len, answers(folders[1]).values())) == 28


class MadeError(Exception):
    """An engine would be made now. The argument: its configuration."""


@pytest.mark.parametrize(
    ("task", "sampling", "asked", "is_made"),
    [
        ("completion", {}, None, False),
        ("chat", {}, True, True),
        ("structured", {}, None, True),
        ("structured", {}, False, False),
        ("completion", {"structured_outputs": {"regex": "a"}}, None, True),
        ("embeddings", {}, None, False),
    ],
)
def test_a_grammar_back_end_is_made_at_the_start_only_where_all_rows_need_it(
    task, sampling, asked, is_made, monkeypatch, tmp_path
):
    def make(config, host):
        raise MadeError(config)

    monkeypatch.setattr("hookline.core.frontend.async_llm.AsyncLLM.from_config", make)
    (tmp_path / "in").mkdir()
    tree = {"engine": {"prepare_grammars": asked}, "sampling": sampling, "batch": {"task": task}}
    host = PluginHost.load()
    run = validate_batch([str(tmp_path / "in"), str(tmp_path / "out")], tree, host)
    starts = [lambda: Generate(run.config, task=task, sampling=sampling), lambda: PartAnswers(run, host)]
    if task == "completion" and not sampling:
        starts.append(lambda: command._answer(run, host, iter([]), 0, 0))
    for start in starts:
        with pytest.raises(MadeError) as caught:
            start()
        assert caught.value.args[0].engine.prepare_grammars is is_made
