"""Tables of real files, committed over HTTP: Parquet files with field ids, and delete files of every kind.

`list_live_rows` is the oracle: it reads the files with pyarrow, and applies the written deletes in plain Python.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyroaring

from seamark.connector.index.files import DataFile as Indexed
from seamark.connector.index.files import IndexTask, index_data_files
from seamark.connector.parquet.columns import Projection
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import parse_definition
from tests.api.client import Api
from tests.api.indexes.indexed import INDEXES, begin_build, define_index, register_files
from tests.api.live import LiveSnapshot, LiveTable
from tests.planner.lakes.lake import DataFile, DeleteFile
from tests.planner.lakes.manifests import PartitionField

FIELDS = (("id", pa.int64()), ("name", pa.string()), ("price", pa.float64()), ("part", pa.int32()))
KINDS = {1: "long", 2: "string", 3: "double", 4: "int"}
SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        {"id": number, "name": name, "required": False, "type": KINDS[number]}
        for number, (name, _) in enumerate(FIELDS, 1)
    ],
}
PART = PartitionField(1000, "part", 4, "identity")
PATH_ID, POSITION_ID = 2147483546, 2147483545
Row = tuple[Any, ...]
"""(id, name, price, part)"""


class StoredTable(LiveTable):
    """The table `db.t`, with real data files and delete files.

    If it is partitioned, its partition field is the identity of `part`, and each file belongs to one partition.
    """

    @staticmethod
    async def create(api: Api, *, version: int = 2, partitioned: bool = False) -> StoredTable:
        return await StoredTable.make(api, "t", SCHEMA, (PART,) if partitioned else (), version)

    @property
    def partitioned(self) -> bool:
        return bool(self.parts)

    def _build_partition(self, part: int | None) -> tuple[Any, ...]:
        return (part,) if self.partitioned else ()

    def write_data_file(self, rows: Sequence[Row], *, group_rows: int = 1_000_000) -> DataFile:
        path = self.make_path(".parquet")
        columns = list(zip(*rows, strict=True)) or [()] * len(FIELDS)
        write_parquet(
            path,
            {number: (name, pa.array(columns[number - 1], kind)) for number, (name, kind) in number_fields()},
            group_rows,
        )
        part_values = {row[3] for row in rows}
        assert not self.partitioned or len(part_values) == 1
        partition = self._build_partition(rows[0][3] if rows else None)
        return DataFile(f"file://{path}", 0, "PARQUET", 0, partition, len(rows), path.stat().st_size, {})

    def write_position_deletes(
        self, positions: Iterable[tuple[str, int]], part: int | None = None, *, names_data_file: bool = False
    ) -> DeleteFile:
        """Write a position delete file, and return its manifest entry.

        Args:
            positions: (path, row position) of each deleted row.
            part: The partition of the delete file.
            names_data_file: Whether the entry names the data file. Then all positions must be in one data file.
        """
        listed_positions = sorted(positions)
        path = self.make_path("-deletes.parquet")
        arrays = {PATH_ID: ("file_path", pa.array([data_path for data_path, _ in listed_positions], pa.string()))}
        arrays |= {POSITION_ID: ("pos", pa.array([index for _, index in listed_positions], pa.int64()))}
        write_parquet(path, arrays)
        referenced_path = listed_positions[0][0] if names_data_file else None
        return DeleteFile(
            f"file://{path}",
            content=1,
            format="PARQUET",
            spec_id=0,
            partition=self._build_partition(part),
            record_count=len(listed_positions),
            size=path.stat().st_size,
            metrics={},
            referenced_path=referenced_path,
            positions=frozenset(listed_positions),
        )

    def write_vectors(self, positions: dict[str, set[int]], part: int | None = None) -> list[DeleteFile]:
        """Write a Puffin file with a deletion vector for each data file, and return a manifest entry for each vector.

        `positions` has the positions of the deleted rows by the path of the data file.
        """
        path = self.make_path("-dv.puffin")
        data, vectors = b"PFA1", []
        for path_of_data_file, deleted_rows in positions.items():
            blob = encode_vector(deleted_rows)
            vectors.append((path_of_data_file, deleted_rows, len(data), len(blob)))
            data += blob
        path.write_bytes(data + b"{}")
        return [
            DeleteFile(
                f"file://{path}",
                content=1,
                format="PUFFIN",
                spec_id=0,
                partition=self._build_partition(part),
                record_count=len(deleted_rows),
                size=len(data),
                metrics={},
                referenced_path=path_of_data_file,
                content_offset=offset,
                content_size=length,
                positions=frozenset((path_of_data_file, row) for row in deleted_rows),
            )
            for path_of_data_file, deleted_rows, offset, length in vectors
        ]

    def write_equality_deletes(self, ids: Sequence[int], keys: Sequence[Row], part: int | None = None) -> DeleteFile:
        """Write an equality delete file, and return its manifest entry.

        Args:
            ids: The field ids of the key columns.
            keys: The values of these columns in the deleted rows.
            part: The partition of the delete file.
        """
        path = self.make_path("-equality.parquet")
        columns = {
            number: (FIELDS[number - 1][0], pa.array([key[index] for key in keys], FIELDS[number - 1][1]))
            for index, number in enumerate(ids)
        }
        write_parquet(path, columns)
        return DeleteFile(
            f"file://{path}",
            content=2,
            format="PARQUET",
            spec_id=0,
            partition=self._build_partition(part),
            record_count=len(keys),
            size=path.stat().st_size,
            metrics={},
            equality_ids=list(ids),
            keys=tuple(keys),
        )

    async def index(
        self, name: str, kind: str, columns: Sequence[str], files: Sequence[DataFile], *, parts: int = 1
    ) -> None:
        """Define an index if it does not exist, and build it for these files in `parts` index files."""
        await define_index(self.api, name, kind=kind, columns=list(columns))
        build = await begin_build(self.api, name)
        loaded_table = await self.api("GET", "/v1/namespaces/db/tables/t")
        location = loaded_table.json["metadata-location"]
        schema = decode_table(Path(location.removeprefix("file://")).read_bytes(), location).current_schema
        definition = parse_definition(build["definition-id"], schema)
        task = IndexTask(build["table-uuid"], definition, Projection(schema), build["folder"])
        for number in range(parts):
            indexed_files = [
                Indexed(data_file.path, data_file.size, data_file.record_count) for data_file in files[number::parts]
            ]
            if not indexed_files:
                continue
            index_files = index_data_files(task, indexed_files)
            assert index_files.location is not None
            assert not index_files.skipped
            file = {"location": index_files.location, "size-in-bytes": index_files.size_bytes}
            assert (await register_files(self.api, build, file)).status == 200
        finish = f"{INDEXES}/{name}/builds/{build['build-id']}/finish"
        assert (await self.api("POST", finish, {"outcome": "completed"})).status == 200

    # The rows that readers see

    def list_live_rows(self, snapshot: LiveSnapshot) -> list[tuple[str, int, Row]]:
        """Return (path, position, row) of every row that is not deleted."""
        live_rows = []
        for file in snapshot.data:
            rows = read_rows(file)
            deleted_positions: set[int] = set()
            for delete in snapshot.deletes:
                if delete.content == 1:
                    if delete.sequence >= file.sequence and delete.partition == file.partition:
                        deleted_positions |= {position for path, position in delete.positions if path == file.path}
                elif delete.sequence > file.sequence and (not self.partitioned or delete.partition == file.partition):
                    keys = {tuple(map(repr, key)) for key in delete.keys}
                    columns = delete.equality_ids or []
                    deleted_positions |= {
                        position
                        for position, row in enumerate(rows)
                        if tuple(repr(row[field_id - 1]) for field_id in columns) in keys
                    }
            live_rows += [
                (file.path, position, row) for position, row in enumerate(rows) if position not in deleted_positions
            ]
        return live_rows


def number_fields() -> list[tuple[int, tuple[str, pa.DataType]]]:
    return list(enumerate(FIELDS, 1))


def read_rows(file: DataFile) -> list[Row]:
    table = pq.read_table(file.path.removeprefix("file://"))
    return list(zip(*(table.column(name).to_pylist() for name, _ in FIELDS), strict=True))


def write_parquet(path: Path, columns: dict[int, tuple[str, pa.Array]], group_rows: int = 1_000_000) -> None:
    fields = [
        pa.field(name, array.type, metadata={"PARQUET:field_id": str(number)})
        for number, (name, array) in columns.items()
    ]
    rows = pa.table([array for _, array in columns.values()], schema=pa.schema(fields))
    pq.write_table(rows, path, row_group_size=group_rows)


def encode_vector(rows: Iterable[int]) -> bytes:
    """Return a blob `deletion-vector-v1` of the Puffin specification."""
    magic_bytes = b"\xd1\xd3\x39\x64"
    body = magic_bytes + pyroaring.BitMap64(rows).serialize()
    return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def draw_row(rng: random.Random, part_value: int) -> Row:
    """Return a random row (id, name, price, part) with values from small ranges, so that keys have several rows."""
    price = rng.choice([None, 0.0, 1.5, -2.5, float("nan"), 1e300])
    return (rng.choice([None, *range(40)]), rng.choice([None, "", "a", "b", "ä\U0001f600"]), price, part_value)
