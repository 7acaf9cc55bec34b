"""Batches as Arrow tables: rows as plain values, and answers as new columns beside the input's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.core.data.requests import EMBEDDINGS, PARAMETERS
from hookline.core.errors import ConfigError, RequestError, clipped, one_short_line, shown

if TYPE_CHECKING:
    import pyarrow

_INPUTS = ("messages", "prompt", "prompt_token_ids", *PARAMETERS)
GENERATED = {
    "text": "string",
    "finish_reason": "string",
    "num_prompt_tokens": "int64",
    "num_completion_tokens": "int64",
    "error": "string",
}
"""Columns of a completion's answer, and their types."""
EMBEDDED = {"embedding": "list<float>", "num_prompt_tokens": "int64", "error": "string"}
"""Columns of a vector's answer, and their types."""
Answer = Mapping[str, Any]
"""The values of a row's new columns by name; missing ones are null."""


def table_of(batch: Any) -> pyarrow.Table:
    """Convert a batch of Ray Data in any of its formats: an Arrow table, arrays by column, or a pandas.DataFrame.

    Raises: ConfigError for any other type, for values for which Arrow has no type, or for several columns of one name.
    """
    import pyarrow as pa

    try:
        table = _converted(batch)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"the rows cannot be made an Arrow table: {one_short_line(error)}") from error
    if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise ConfigError(f"the rows have several columns '{clipped(twice[0])}'; give each a name of its own")
    return table


def _converted(batch: Any) -> pyarrow.Table:
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if isinstance(batch, Mapping):
        return pa.table({name: pa.array(_plain(values)) for name, values in batch.items()})
    if not hasattr(batch, "columns"):
        raise TypeError(f"{shown(batch)} is neither a table nor columns by name")
    return pa.Table.from_pandas(batch, preserve_index=False)


def _plain(values: Any) -> Any:
    return [one.tolist() if hasattr(one, "tolist") else one for one in values]


def rows_of(table: pyarrow.Table) -> Iterator[dict[str, Any] | RequestError]:
    """The columns that requests need, row by row. A row with a value that Python cannot represent is its error."""
    table = table.select([name for name in table.column_names if name in _INPUTS])
    if not table.column_names:
        return iter({} for _ in range(table.num_rows))
    try:
        return iter(table.to_pylist())
    except (ValueError, OverflowError):  # a text that is not UTF-8, or a time outside of the calendar
        return (_row_of(table.slice(row, 1)) for row in range(table.num_rows))


def _row_of(row: pyarrow.Table) -> dict[str, Any] | RequestError:
    found = {}
    for name, column in zip(row.column_names, row.columns, strict=True):
        try:
            (found[name],) = column.to_pylist()
        except (ValueError, OverflowError) as error:
            return RequestError(f"{name} cannot be read: {one_short_line(error)}")
    return found


def columns_of(task: str) -> Mapping[str, str]:
    """The names and types of a task's new columns."""
    return EMBEDDED if task == EMBEDDINGS else GENERATED


def with_answers(table: pyarrow.Table, answers: Sequence[Answer], task: str, prefix: str = "") -> pyarrow.Table:
    """Add the answers' columns to a table; their types do not depend on the answers.

    Raises: ConfigError if the table has a column of such a name.
    """
    import pyarrow as pa

    types = {"string": pa.string(), "int64": pa.int64(), "list<float>": pa.list_(pa.float32())}
    for name, kind in columns_of(task).items():
        if prefix + name in table.column_names:
            raise ConfigError(f"the rows have a column '{prefix}{name}' already; rename it, or give another prefix")
        table = table.append_column(prefix + name, pa.array([one.get(name) for one in answers], types[kind]))
    return table
