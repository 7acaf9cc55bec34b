"""Files cut into parts: each row is in one of them, and a part is read again as it was cut."""

from itertools import chain

import pytest

from hookline.core.batch import parts
from hookline.core.batch.parts import PartTables, lines_of_part, source_of
from hookline.core.data.tables import with_answers
from hookline.core.errors import ConfigError


def test_the_lines_of_all_parts_are_those_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text("a\n\nb\nc\n   \nd\ne")
    source = source_of(tmp_path, "a.jsonl", 2)
    lines = [[(line.number, line.text.strip()) for line in lines_of_part(tmp_path, part)] for part in source.parts]
    assert lines == [[(1, b"a"), (3, b"b")], [(4, b"c"), (6, b"d")], [(7, b"e")]]
    assert source.num_rows == 5 and [part.number for part in source.parts] == [0, 1, 2]


def test_an_empty_file_has_no_part(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert source_of(tmp_path, "a.jsonl", 2).parts == ()


def test_another_text_is_another_fingerprint(tmp_path):
    found = set()
    for text in ("a\nb\n", "a\nc\n", "a\nb\n\n"):
        (tmp_path / "a.jsonl").write_text(text)
        found.add(source_of(tmp_path, "a.jsonl", 2).fingerprint)
    assert len(found) == 3


def test_the_rows_of_all_parts_are_those_of_the_table(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(23))}), tmp_path / "a.parquet", row_group_size=10)
    source, tables = source_of(tmp_path, "a.parquet", 4), PartTables(tmp_path)
    assert [part.num_rows for part in source.parts] == [4, 4, 2, 4, 4, 2, 3]
    rows = [tables.table_of(part).column("id").to_pylist() for part in source.parts]
    assert [*chain(*rows)] == list(range(23)) and [part.first for part in source.parts] == [one[0] for one in rows]


@pytest.mark.parametrize("num_groups", [0, 1])
def test_a_table_without_rows_is_a_part_without_rows_and_keeps_its_columns(num_groups, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    import pyarrow.parquet as pq

    table = pa.table({"prompt": pa.array([], pa.string())})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for _ in range(num_groups):
            writer.write_table(table)
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == num_groups
    source = source_of(tmp_path, "a.parquet", 4)
    assert [part.num_rows for part in source.parts] == [0]
    assert PartTables(tmp_path).table_of(source.parts[0]).equals(table)


def test_a_file_that_is_no_parquet_is_one_line(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    (tmp_path / "a.parquet").write_text("nonsense")
    with pytest.raises(ConfigError, match="is no parquet file"):
        source_of(tmp_path, "a.parquet", 2)


def written(folder, table, **options):
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra: pip install hookline[parquet]")
    pq.write_table(table, folder / "a.parquet", **options)
    return source_of(folder, "a.parquet", 4)


def test_a_text_that_is_not_utf_8_is_no_fault_of_its_part_and_is_written_as_it_came(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    _, offsets, data = pa.array([b"\xff\xfe", b"ok"]).buffers()
    table = pa.table({"prompt": pa.StringArray.from_buffers(2, offsets, data)})
    (part,) = written(tmp_path, table).parts
    assert PartTables(tmp_path).table_of(part).equals(table)
    (part,) = written(tmp_path, with_answers(table, [{}, {}], "completion")).parts
    assert PartTables(tmp_path).table_of(part).column("prompt").equals(table.column("prompt"))


def test_a_damaged_page_of_a_parquet_is_one_line(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    (part,) = written(tmp_path, pa.table({"prompt": ["x", "y"]})).parts
    path = tmp_path / "a.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 20 + whole[24:])
    with pytest.raises(ConfigError, match="row group 0 of"):
        PartTables(tmp_path).table_of(part)


def test_a_file_that_lost_rows_while_it_was_read_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    (tmp_path / "a.jsonl").write_text("a\nb\nc\n")
    (lines,) = source_of(tmp_path, "a.jsonl", 4).parts
    (rows,) = written(tmp_path, pa.table({"prompt": ["x", "y", "z"]})).parts
    (tmp_path / "a.jsonl").write_text("a\n")
    written(tmp_path, pa.table({"prompt": ["x"]}))
    for read in (lambda: list(lines_of_part(tmp_path, lines)), lambda: PartTables(tmp_path).table_of(rows)):
        with pytest.raises(ConfigError, match="was changed while it was read: part 0 had 3 rows and has 1"):
            read()


def test_a_small_file_that_stands_for_very_much_is_refused_before_it_takes_the_memory(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), ["x" * 300_000])})
    (first, *_) = written(tmp_path, table.cast(pa.schema({"prompt": pa.string()}))).parts
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    monkeypatch.setattr(parts, "MAX_PART_BYTES", 2**20)
    sizes, file_class = [], pytest.importorskip("pyarrow.parquet").ParquetFile
    iter_batches = file_class.iter_batches

    def counted(file, **options):
        for batch in iter_batches(file, **options):
            sizes.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(file_class, "iter_batches", counted)
    told = r"rows 1 to 4 of a row group of .*a\.parquet take more than 1048576 bytes of memory; give a smaller batch"
    with pytest.raises(ConfigError, match=told):
        PartTables(tmp_path).table_of(first)
    assert sum(sizes) < 3 * 2**20


def test_a_file_that_says_it_has_more_rows_than_can_be_is_refused_before_it_is_cut(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    monkeypatch.setattr(parts, "MAX_ROWS", 2)
    assert len(written(tmp_path, pa.table({"prompt": ["x", "y"]})).parts) == 1
    with pytest.raises(
        ConfigError, match=r"a\.parquet says that it has 3 rows; it must be the sum of its groups, at most 2"
    ):
        written(tmp_path, pa.table({"prompt": ["x", "y", "z"]}))


def test_parts_in_any_order_are_the_rows_of_their_place_and_no_more_of_a_group_is_held(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    monkeypatch.setattr(parts, "ROWS_AT_ONCE", 3)
    rows = [{"id": number, "x": [number] * (number % 3)} for number in range(40)]
    source = written(tmp_path, pa.Table.from_pylist(rows), row_group_size=25)
    opened, file_class = [], pytest.importorskip("pyarrow.parquet").ParquetFile
    iter_batches = file_class.iter_batches
    decoded = []

    def counted(file, **options):
        opened.append(options["row_groups"])
        for batch in iter_batches(file, **options):
            decoded.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(file_class, "iter_batches", counted)
    tables = PartTables(tmp_path)
    for part in source.parts:
        decoded.clear()
        assert tables.table_of(part).to_pylist() == rows[part.first :][: part.num_rows]
        assert sum(decoded) <= part.num_rows + 3
    assert opened == [[0], [1]]
    order = [5, 6, 2, 9, 9, 0, 3, 10, 1]
    for number in order:
        part = source.parts[number]
        assert tables.table_of(part).to_pylist() == rows[part.first :][: part.num_rows]


def test_what_is_held_of_a_row_group_is_a_part_and_not_the_group(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs the extra: pip install hookline[parquet]")
    monkeypatch.setattr(parts, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(parts, "READ_BYTES", 2**16)
    texts = [f"{number}" + "x" * 2**15 for number in range(240)]
    pages = {"compression": "none", "use_dictionary": False, "data_page_size": 2**16, "write_batch_size": 2}
    source = written(tmp_path, pa.table({"prompt": texts}), **pages)
    tables, before = PartTables(tmp_path), pa.total_allocated_bytes()
    for part in source.parts[:3]:
        assert tables.table_of(part)["prompt"].to_pylist() == texts[part.start :][:4]
    assert pa.total_allocated_bytes() - before < 2**21 < sum(map(len, texts)) / 3
