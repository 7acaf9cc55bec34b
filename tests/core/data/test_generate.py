"""Rows answered by an engine, without Ray: by the bundled checkpoint where text counts, else by a fake."""

import asyncio
import json
import re
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")

import pyarrow as pa

from hookline.core.data import generate
from hookline.core.data.admission import Admission
from hookline.core.data.requests import RowReader
from hookline.core.data.row_answers import RowAnswers
from hookline.core.data.tables import rows_of, table_of, with_answers
from hookline.core.errors import ConfigError, EngineError, HooklineError, PluginError, QueueFullError, RequestError
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.data import Generate


class FakeLLM:
    """As much of an AsyncLLM as rows need: the text of a prompt is as many letters as it has tokens."""

    def __init__(self, faults=()):
        self.death = None
        self.faults = list(faults)
        self.llm = SimpleNamespace(codec=SimpleNamespace(encode=lambda prompt: [1] * len(prompt)))

    async def generate(self, token_ids, params):
        await asyncio.sleep(0)
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        return RequestOutput(0, None, token_ids, [2], FinishReason.LENGTH, "x" * len(token_ids))


def answers(llm, rows, task="completion"):
    return asyncio.run(RowAnswers(llm, RowReader(task), Admission(2, 100)).answers(rows))


def test_answers_come_in_the_order_of_their_rows_and_bad_rows_have_their_error():
    found = answers(FakeLLM(), [{"prompt": "aaa"}, {"prompt": None}, {"prompt": "a"}])
    assert [one.get("text") for one in found] == ["xxx", None, "x"]
    assert found[1]["error"].startswith("a row needs one of prompt") and found[0].get("error") is None


def test_a_refused_row_has_its_reason_and_a_full_queue_is_waited_for(monkeypatch):
    monkeypatch.setattr("hookline.core.data.row_answers.RETRY_S", 0)
    full = QueueFullError("engine.max_queued_requests", 1, 1, 1)
    first, second = answers(FakeLLM([RequestError("too long"), full]), [{"prompt": "a"}, {"prompt": "bb"}])
    assert first == {"error": "too long"} and second["text"] == "xx"


def test_a_long_prompt_is_tokenized_beside_the_event_loop():
    llm, threads = FakeLLM(), {}

    def encode(prompt):
        threads[len(prompt)] = threading.current_thread()
        return [1]

    llm.llm.codec.encode = encode
    answers(llm, [{"prompt": "short"}, {"prompt": "x" * 5000}])
    assert threads[5] is threading.current_thread() and threads[5000] is not threads[5]


def test_a_dead_engine_is_no_rows_fault():
    with pytest.raises(EngineError, match="the sampler raised"):
        answers(FakeLLM([None, PluginError("the sampler raised")]), [{"prompt": "a"}, {"prompt": "b"}])


def test_the_process_ends_with_its_engine(monkeypatch, capsys):
    class LeftError(Exception):
        pass

    def left(code):
        assert code == 1
        raise LeftError

    monkeypatch.setattr(generate.os, "_exit", left)
    monkeypatch.setattr(generate, "engine_for_rows", lambda *_: FakeLLM([EngineError("gone")]))
    monkeypatch.setattr(generate.Admission, "of", lambda *_: Admission(2, 100))
    with pytest.raises(LeftError):
        asyncio.run(Generate()(pa.table({"prompt": ["a"]})))
    assert capsys.readouterr().err == "hookline: error: the engine ended, and this process with it: gone\n"


def test_an_actor_of_another_version_names_its_node_before_its_engine_starts(monkeypatch):
    monkeypatch.setattr(generate, "node_here", lambda: "10.0.0.2")
    with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.2 has another environment than the driver: torch is "):
        Generate({"model": "no such model"}, driver={"torch": "1.0"})


def test_batches_of_every_format_are_tables():
    import numpy as np

    rows = [{"id": 1, "prompt": "a", "ids": [1, 2]}, {"id": 2, "prompt": None, "ids": [3]}]
    table = pa.Table.from_pylist(rows)
    arrays = {"id": np.array([1, 2]), "prompt": np.array(["a", None], object), "ids": [np.array([1, 2]), np.array([3])]}
    assert table_of(table) is table
    assert table_of(arrays).to_pylist() == rows


def test_a_batch_of_pandas_is_a_table():
    pytest.importorskip("pandas", reason="batches in its format need it")
    rows = [{"id": 1, "prompt": "a", "ids": [1, 2]}, {"id": 2, "prompt": None, "ids": [3]}]
    assert table_of(pa.Table.from_pylist(rows).to_pandas()).to_pylist() == rows


def test_a_row_whose_text_is_not_utf_8_is_refused_alone():
    _, offsets, data = pa.array([b"a", b"\xff\xfe", b"bb", b"cc"]).buffers()
    texts = pa.StringArray.from_buffers(4, offsets, data)
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 4), texts], ["role", "content"])
    columns = {
        "prompt": texts,
        "dictionary": texts.dictionary_encode(),
        "messages": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), turns),
    }
    for name, column in columns.items():
        asked = "messages" if name == "messages" else "prompt"
        table = pa.table({asked: column, "note": texts, "id": [1, 2, 3, 4]})
        found = answers(FakeLLM(), rows_of(table.slice(1)), "chat" if asked == "messages" else "completion")
        assert found[0] == {
            "error": f"{asked} cannot be read: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: "
            "invalid start byte"
        }
        assert all(one["text"] for one in found[1:]) and len(found) == 3
    assert [*rows_of(pa.table({"note": texts}))] == [{}] * 4


def test_answers_have_the_same_columns_whatever_they_are():
    table = pa.table({"id": [1]})
    good, bad = ({"text": "a", "finish_reason": "stop", "num_prompt_tokens": 1}, {"error": "no"})
    assert with_answers(table, [good], "chat").schema == with_answers(table, [bad], "chat").schema
    assert with_answers(table, [bad], "embeddings", "my_").column_names[1:] == [
        "my_embedding",
        "my_num_prompt_tokens",
        "my_error",
    ]
    with pytest.raises(ConfigError, match="the rows have a column 'text' already; rename it, or give another prefix"):
        with_answers(pa.table({"text": ["a"]}), [good], "chat")


@pytest.mark.slow  # importing Ray is
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": {"model": "qwen33"}}, "no model named 'qwen33'"),
        ({"engine": {"sampling": {}}}, "unknown key 'sampling'"),
        ({"tasks": "chat"}, "unknown argument tasks='chat'. Available: task, sampling, pooling, max_rows, prefix"),
        ({"max_rows": 0}, "max_rows=0 must be at least 1"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens=0 must be at least 1"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(arguments, message):
    pytest.importorskip("ray.data", reason="needs the extra: pip install hookline[ray]")
    with pytest.raises(Exception, match="^" + message.replace("[", r"\[").replace(".", r"\.")):
        Generate.options(num_gpus=0, **arguments)


@pytest.mark.slow  # importing Ray is
def test_the_options_fit_the_engine():
    pytest.importorskip("ray.data", reason="needs the extra: pip install hookline[ray]")
    options = Generate.options(
        {"checkpoint": "x", "engine": {"max_num_seqs": 100}, "device": "cpu"}, concurrency=(1, 3)
    )
    assert options["batch_size"] == 50 and options["num_gpus"] == 0
    assert (options["compute"].min_size, options["compute"].max_size) == (1, 3)
    assert options["fn_constructor_kwargs"]["engine"].model.config.checkpoint == "x"
    assert options["fn_constructor_kwargs"]["driver"] == generate.environment()


@pytest.fixture(scope="module")
def engine():
    return {"engine": {"max_num_seqs": 8, "max_model_len": 128, "cpu_cache_gib": 0.05}}


@pytest.mark.slow
def test_the_bundled_checkpoint_answers_chats_completions_and_forms(engine):
    async def work():
        answering = Generate(engine, task="structured", sampling={"max_tokens": 24, "temperature": 0})
        rows = [
            {"prompt": "import", "messages": None, "structured_outputs": {"choice": ["one", "two"]}},
            {
                "prompt": None,
                "messages": [{"role": "user", "content": "hi"}],
                "structured_outputs": {"choice": ["yes"]},
            },
            {"prompt": "x" * 10_000, "messages": None, "structured_outputs": {"choice": ["yes"]}},
        ]
        try:
            return (await answering(pa.Table.from_pylist(rows))).to_pylist()
        finally:
            await answering.aclose()

    pytest.importorskip("llguidance", reason="needs the extra: pip install hookline[grammar]")
    choice, chat, long = asyncio.run(work())
    assert choice["text"] in ("one", "two") and choice["finish_reason"] == "stop"
    assert chat["text"] == "yes" and chat["num_completion_tokens"] >= 1
    assert long["text"] is None and "the prompt has 10000 characters" in long["error"]
    json.dumps([choice, chat, long])


@pytest.mark.slow
def test_the_bundled_checkpoint_makes_vectors(engine):
    async def work():
        answering = Generate(engine, task="embeddings", pooling={"dimensions": 4})
        try:
            return await answering({"id": [1, 2], "prompt": ["import", None]})
        finally:
            await answering.aclose()

    first, second = asyncio.run(work()).to_pylist()
    assert len(first["embedding"]) == 4 and second["embedding"] is None and "it has none" in second["error"]


def not_utf8(texts):
    """A column of texts that are none."""
    _, offsets, data = pa.array(texts).buffers()
    return pa.StringArray.from_buffers(len(texts), offsets, data)


@pytest.mark.parametrize(
    ("task", "columns", "error"),
    [
        ("completion", {"prompt": not_utf8([b"ok", b"\xff\x1b"])}, "prompt cannot be read: UnicodeDecodeError: "),
        (
            "completion",
            {"prompt": ["ok", "ok"], "sampling": not_utf8([b"{}", b"\xff"])},
            "sampling cannot be read: UnicodeDecodeError: ",
        ),
        (
            "completion",
            {"prompt": ["ok", None], "prompt_token_ids": pa.array([None, 2**62], pa.timestamp("s"))},
            "prompt_token_ids cannot be read: OverflowError: ",
        ),
    ],
)
def test_a_value_that_python_cannot_hold_refuses_its_row_alone(task, columns, error):
    first, second = answers(FakeLLM(), rows_of(pa.table(columns)), task)
    assert first["text"] == "xx"
    assert re.match(error, second["error"]) and second["error"].isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": 5}, "engine=5 must be a mapping of what LLM takes as keyword arguments"),
        ({"sampling": 5}, "sampling=5 must be a mapping of parameters, or None"),
        ({"pooling": {"x": 1}}, "unknown key 'pooling.x'"),
        ({"pooling": 5}, "pooling=5 must be a mapping of parameters, or None"),
        ({"prefix": 5}, "prefix=5 must be a text"),
    ],
)
def test_arguments_of_a_wrong_kind_are_one_line_before_an_engine_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(generate, "imported_ray", lambda asker: pytest.fail("Ray is not asked"))
    for made in (Generate, Generate.options):
        with pytest.raises(HooklineError, match=re.escape(message)):
            made(**arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1], r"cannot be made an Arrow table: TypeError: [1] is neither a table nor columns by name"),
        ({"prompt": ["a", 5]}, "cannot be made an Arrow table: ArrowTypeError: Expected bytes, got a 'int' object"),
        ({"prompt": ["\ud800"]}, "cannot be made an Arrow table: UnicodeEncodeError"),
        ({"prompt": ["a"], "x": [2**70]}, "cannot be made an Arrow table: OverflowError"),
        (pa.table([["a"], ["b"]], names=["prompt", "prompt"]), "the rows have several columns 'prompt'"),
    ],
)
def test_rows_that_are_no_table_are_one_line(batch, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        table_of(batch)


def test_a_record_batch_is_a_table():
    assert table_of(pa.record_batch({"prompt": ["a"]})).equals(pa.table({"prompt": ["a"]}))
