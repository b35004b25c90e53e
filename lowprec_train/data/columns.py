"""A column of a .parquet file, a few rows at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Any

from lowprec_train.data.records import Damaged

_ROWS = 64  # per read


class Column:
    """The column `field` of a .parquet file.

    Raises:
        Damaged: the file is not .parquet, or has no such column.
        ValueError: pyarrow is not installed.
    """

    def __init__(self, path: str, field: str) -> None:
        self._path, self._field, self._arrow = path, field, pyarrow_for(path)
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(path)
        except (self._arrow.ArrowException, OSError) as error:
            raise Damaged(f"{path}: not a .parquet file: {error}") from error
        if field not in self._file.schema_arrow.names:
            raise Damaged(f"{path}: no column {field!r}; the file holds {self._file.schema_arrow.names}")
        groups = range(self._file.num_row_groups)
        self._counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self.rows = sum(self._counts)

    def values(self, skipped: int, size: int) -> Iterator[list[Any]]:
        """Yield values from row `skipped` on, in lists of about `size` bytes. Earlier row groups are not read.

        Raises Damaged if a row cannot be read, after the rows before it.
        """
        row, gathered = skipped, []
        try:
            for values in self._batches(skipped):
                gathered += values
                row += len(values)
                if sum(len(text) for text in gathered if isinstance(text, str)) >= size:
                    yield gathered
                    gathered = []
        except (self._arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            if gathered:
                yield gathered
            raise Damaged(f"{self._path}: cannot be read past row {row}: {error}") from error
        if gathered:
            yield gathered

    def _batches(self, skipped: int) -> Iterator[list[Any]]:
        """Read group by group, so that the batches do not depend on where reading starts."""
        ends = [*itertools.accumulate(self._counts)]
        first = bisect.bisect_right(ends, skipped)
        skipped -= sum(self._counts[:first])
        for group in range(first, len(self._counts)):
            for batch in self._file.iter_batches(_ROWS, row_groups=[group], columns=[self._field]):
                values = batch.column(0).to_pylist()
                yield values[skipped:]
                skipped = max(0, skipped - len(values))


def pyarrow_for(path: str) -> Any:
    """Return pyarrow, which reads .parquet and .zst. Raises ValueError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"reading {path} needs the package 'pyarrow': pip install 'lowprec_train[data]'") from error
    return pyarrow
