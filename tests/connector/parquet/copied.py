"""Functions that merge files by copying their row groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.assembly import FileAssembler, Pick
from seamark.connector.parquet.copy.leaves import match_leaves
from seamark.connector.parquet.copy.sinks import open_sink
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.footers import FileEncryption, FileKeys


def add_field_ids(schema: pa.Schema) -> pa.Schema:
    """Return the schema with a field id on every node, as in files of Iceberg tables.

    The ids depend on the positions of the fields. Columns differ by 100, because nested fields have the ids between.
    """
    return pa.schema([_add_field_id(field, 1 + number * 100) for number, field in enumerate(schema)])


def _add_field_id(field: pa.Field, number: int) -> pa.Field:
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_add_field_id(child, number + 1 + position * 10) for position, child in enumerate(kind)])
    elif pa.types.is_map(kind):
        kind = pa.map_(_add_field_id(kind.key_field, number + 1), _add_field_id(kind.item_field, number + 2))
    elif pa.types.is_list(kind):
        kind = pa.list_(_add_field_id(kind.value_field, number + 1))
    return pa.field(field.name, kind, field.nullable, {"PARQUET:field_id": str(number)})


def write_file_without_rows(path: Path, schema: pa.Schema) -> SourceFile:
    """Write a Parquet file with the schema and without rows, and return it as an open source file."""
    with pq.ParquetWriter(path, schema, store_schema=False, store_decimal_as_integer=True):
        pass
    return SourceFile(str(path), Storage())


def merge_files(
    paths: Sequence[Path],
    out: Path,
    schema: pa.Schema,
    storage: Storage | None = None,
    *,
    keys: FileKeys | None = None,
    encryption: FileEncryption | None = None,
) -> None:
    """Copy all row groups of the files into a new file with the columns of `schema`.

    If an error is raised, `out` does not exist.

    Raises:
        Unreadable: A file is damaged, or cannot be decrypted.
        ValueError: A file lacks a column of `schema`, or has it with a type that cannot be copied.
    """
    with ExitStack() as stack:
        target = stack.enter_context(write_file_without_rows(out.with_suffix(".skeleton"), schema))
        assembler = FileAssembler(open_sink(str(out), storage or Storage()), target.footer, encryption)
        try:
            for path in paths:
                source = stack.enter_context(SourceFile(str(path), storage or Storage(), keys=keys))
                leaves = match_leaves(target.leaves, source.leaves)
                if leaves.reason or min(leaves.columns) < 0:
                    raise ValueError(leaves.reason or "a column is missing")
                for number, group in enumerate(source.footer.groups):
                    if group.rows:
                        assembler.add([Pick(source, number, leaves.columns, range(len(target.leaves)))])
            assembler.close()
        except BaseException:
            assembler.abort()
            raise


def concatenate(paths: Sequence[Path], out: Path) -> None:
    """Copy all row groups of files with the same schema into a new file.

    The files need no field ids. If an error is raised, `out` does not exist.

    Raises:
        Unreadable: The chunks of a file cannot be copied.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(SourceFile(str(path), Storage())) for path in paths]
        columns = range(len(sources[0].leaves))
        assembler = FileAssembler(open_sink(str(out), Storage()), sources[0].footer)
        try:
            for source in sources:
                assert [leaf.shape for leaf in source.leaves] == [leaf.shape for leaf in sources[0].leaves]
                for number, group in enumerate(source.footer.groups):
                    if group.rows:
                        assembler.add([Pick(source, number, columns, columns)])
            assembler.close()
        except BaseException:
            assembler.abort()
            raise
