"""Which delete files apply, against the specification's rules read one pair at a time, and against rows.

`Situation` draws a view: manifests of both contents, of several specs, versions and writers' schemas, as fastavro
writes them. The oracle is `in_scope` (spec, "Scan Planning"), `removes` (does any key or position of the delete meet a
row of the data file) and `java_drops` (the same pair by its statistics, as Java's DeleteFileIndex prunes).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from metaserver.errors import Corrupt
from metaserver.iceberg.manifest import ManifestFile, decode_manifest, decode_manifest_list
from metaserver.iceberg.partition import PartitionField as SpecField
from metaserver.iceberg.partition import PartitionSpec
from metaserver.iceberg.schema import Schema
from metaserver.iceberg.table_json import decode_table
from metaserver.index.block import Block, encode_block
from metaserver.planner import equality
from metaserver.planner.deletes import DeleteIndex
from metaserver.planner.view import TableView
from tests.planner.history import random_lake
from tests.planner.kinds import FLOATS, LONG_MIN, pool, to_bytes
from tests.planner.lake import DATA, EQUALITY_DELETES, PATH_ID, POSITION_DELETES, DataFile, DeleteFile
from tests.planner.manifests import ADDED, DELETED, EXISTING, Entry, PartitionField, Style, manifest_bytes
from tests.planner.metrics import ColumnMetrics, column_metrics

A, B, STRUCT, NESTED, LATE, F = 1, 2, 3, 4, 5, 6
SPECS = {
    0: (),
    1: (PartitionField(1000, "a", A, "identity"),),
    2: (PartitionField(1000, "a", A, "identity"), PartitionField(1001, "f", F, "identity")),
    3: (PartitionField(1002, "a", A, "void"),),
    4: (PartitionField(1003, "b", B, "identity"), PartitionField(1002, "a", A, "void")),
}
GLOBAL_SPECS = (0, 3)
PROMOTED = {"int": "long", "float": "double", "decimal(9, 2)": "decimal(20, 2)", "decimal(18, 0)": "decimal(18, 0)"}
PATHS = [f"s3://bucket/table/data/{name}.parquet" for name in ("a", "ab", "abc", "zz", "é", "\U0001f600", "b" * 40)]


def column(column_id: int, name: str, kind: Any, *, required: bool = False) -> dict[str, Any]:
    return {"id": column_id, "name": name, "required": required, "type": kind}


def schema_json(schema_id: int, kinds: dict[int, str], required: set[int], *, late: bool) -> dict[str, Any]:
    nested = {"type": "struct", "fields": [column(NESTED, "n", kinds[NESTED], required=True)]}
    fields = [
        column(A, "a", kinds[A], required=A in required),
        column(B, "b", kinds[B]),
        column(STRUCT, "s", nested),
        column(F, "f", kinds[F], required=F in required),
    ]
    fields += [column(LATE, "late", kinds[LATE])] if late else []
    return {"type": "struct", "schema-id": schema_id, "fields": fields}


@dataclass(eq=False)
class Listed:
    """A manifest with what a manifest list says of it."""

    content: int
    spec_id: int
    schema_id: int
    version: int
    sequence: int
    entries: list[Entry] = field(default_factory=list)


def block_of(location: str, data: bytes) -> Block:
    return Block(b"".join(encode_block(decode_manifest(data, location))))


def manifest_file(content: int, spec_id: int, sequence: int, path: str = "m.avro") -> ManifestFile:
    return ManifestFile(
        manifest_path=path,
        manifest_length=0,
        partition_spec_id=spec_id,
        content=content,
        sequence_number=sequence,
        min_sequence_number=0,
        added_snapshot_id=1,
        added_files_count=None,
        existing_files_count=None,
        deleted_files_count=None,
        added_rows_count=None,
        existing_rows_count=None,
        deleted_rows_count=None,
        partitions=None,
        key_metadata=None,
        first_row_id=None,
    )


def specs() -> list[PartitionSpec]:
    return [
        PartitionSpec(key, tuple(SpecField(part.name, part.transform, part.source, (), part.id) for part in fields))
        for key, fields in SPECS.items()
    ]


def same(kind: str, left: Any, right: Any) -> bool:
    """Whether some reader takes two values of a column for equal."""
    if kind in FLOATS and left is not None and right is not None and left != left:
        return bool(right != right)
    return bool(left == right)


class Situation:
    """Everything that one random view holds, in Python."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        draw = ["int", "long", "string", "uuid", "binary", "date", "decimal(9, 2)", "decimal(18, 0)", "boolean", "time"]
        old = {key: rng.choice(draw) for key in (A, B, NESTED, LATE)} | {F: rng.choice(["float", "double"])}
        new = {key: PROMOTED.get(kind, kind) for key, kind in old.items()}
        self.kinds = {0: old, 1: new}
        required = {key for key in (A, F) if rng.random() < 0.3}
        self.required = required
        self.schemas = {
            0: schema_json(0, old, required, late=False),
            1: schema_json(1, new, required, late=True),
        }
        self.pools = {key: pool(rng, kind, rng.choice([2, 4, 8])) for key, kind in old.items()}
        self.pools[F] += [math.nan, 0.0, -0.0]
        self.style = Style.draw(rng)
        self.data: list[tuple[Listed, Entry]] = []
        self.deletes: list[tuple[Listed, Entry]] = []
        self.made = 0
        self.manifests = [self._manifest(DATA) for _ in range(rng.randint(1, 6))]
        self.delete_manifests = [self._manifest(1) for _ in range(rng.randint(0, 5))]

    def _manifest(self, content: int) -> Listed:
        rng = self.rng
        version = rng.choice([1, 2, 3]) if content == DATA else rng.choice([2, 3])
        sequence = 0 if version == 1 else rng.randint(0, 6)
        made = Listed(content, rng.choice([0, 1, 1, 2, 3, 4]), rng.randint(0, 1), version, sequence)
        for _ in range(rng.randint(0, 8)):
            entry = self._entry(made)
            made.entries.append(entry)
            if entry.status != DELETED:
                (self.deletes if content else self.data).append((made, entry))
        return made

    def _entry(self, within: Listed) -> Entry:
        rng = self.rng
        status = rng.choice([ADDED, ADDED, EXISTING, EXISTING, DELETED])
        sequence = None if within.version == 1 else rng.randint(0, 6)
        if rng.random() < 0.4 and (status == ADDED or within.sequence == 0):
            sequence = None
        return Entry(status, 1, sequence, sequence, self._delete(within) if within.content else self._data(within))

    def row(self, schema_id: int, partition_of: dict[int, Any]) -> dict[int, Any]:
        rng = self.rng
        row: dict[int, Any] = {}
        for key in (A, B, NESTED, F, LATE):
            null = key not in self.required and rng.random() < 0.25
            row[key] = None if null or (key == LATE and schema_id == 0) else rng.choice(self.pools[key])
        return row | partition_of

    def _partition(self, spec_id: int) -> tuple[Any, ...]:
        rng = self.rng
        pools = {part.source: self.pools[part.source][-3:] for part in SPECS[spec_id]}
        return tuple(
            None if part.transform == "void" or rng.random() < 0.2 else rng.choice(pools[part.source])
            for part in SPECS[spec_id]
        )

    def _metrics(self, schema_id: int, values: dict[int, list[Any]]) -> dict[int, ColumnMetrics]:
        kinds = self.kinds[schema_id]
        made = {key: column_metrics(self.rng, kinds[key], of) for key, of in values.items()}
        return {key: of for key, of in made.items() if of != ColumnMetrics()}

    def _common(self, within: Listed, content: int) -> dict[str, Any]:
        self.made += 1
        path = self.rng.choice(PATHS) if content == DATA and self.made < 30 else "data/x"
        return {
            "path": f"{path}{self.made if self.rng.random() < 0.8 else ''}" if content == DATA else f"d{self.made}",
            "content": content,
            "format": self.rng.choice(["PARQUET", "avro"]),
            "spec_id": within.spec_id,
            "partition": self._partition(within.spec_id),
            "size": 100,
        }

    def _data(self, within: Listed) -> DataFile:
        # written under the manifest's schema, or before it: a rewritten manifest keeps the old bounds' bytes
        schema_id = self.rng.randint(0, within.schema_id)
        common = self._common(within, DATA)
        parts = zip(SPECS[within.spec_id], common["partition"], strict=True)
        fixed = {part.source: value for part, value in parts if part.transform == "identity"}
        rows = [self.row(schema_id, fixed) for _ in range(self.rng.randint(1, 4))]
        keys = [key for key in (A, B, NESTED, F, LATE) if key != LATE or schema_id == 1]
        metrics = self._metrics(schema_id, {key: [row[key] for row in rows] for key in keys})
        return DataFile(**common, record_count=len(rows), metrics=metrics, rows=rows)

    def _delete(self, within: Listed) -> DeleteFile:
        rng = self.rng
        shape = rng.choice(["equality", "equality", "positions", "file", "bounds", "vector"])
        if shape == "vector" and within.version < 3:
            shape = "file"
        common = self._common(within, EQUALITY_DELETES if shape == "equality" else POSITION_DELETES)
        paths = [entry.file.path for _, entry in self.data] or ["none"]
        if shape == "equality":
            return self._equality(within, common)
        if shape == "positions":
            some = {(path, 0) for path in rng.sample(paths, min(2, len(paths)))}
            known = sorted(path.encode() for path, _ in some)
            whole = {PATH_ID: ColumnMetrics(lower=known[0], upper=known[-1] + b"~")}
            return DeleteFile(**common, record_count=2, metrics=rng.choice([{}, whole]), positions=frozenset(some))
        path = rng.choice(paths)
        metrics, referenced = {}, path
        if shape == "bounds":
            metrics, referenced = {PATH_ID: ColumnMetrics(lower=path.encode(), upper=path.encode())}, None
        if shape == "vector":
            common |= {"format": rng.choice(["PUFFIN", "puffin"])}
        return DeleteFile(
            **common,
            record_count=1,
            metrics=metrics,
            referenced=referenced,
            positions=frozenset({(path, 0)}),
            content_offset=4 if shape == "vector" else None,
            content_size=40 if shape == "vector" else None,
        )

    def _equality(self, within: Listed, common: dict[str, Any]) -> DeleteFile:
        rng = self.rng
        schema_id = rng.randint(0, within.schema_id)
        usable = [A, B, NESTED, F] + [LATE] * schema_id
        ids = rng.sample(usable, rng.choice([1, 1, 2, 3]))
        rows = [self.row(schema_id, {}) for _ in range(rng.randint(1, 3))]
        metrics = self._metrics(schema_id, {key: [row[key] for row in rows] for key in ids})
        keys = tuple(tuple(row[key] for key in ids) for row in rows)
        return DeleteFile(**common, record_count=len(rows), metrics=metrics, equality_ids=ids, keys=keys)

    def view(self) -> TableView:
        def blocks(listed: list[Listed]) -> list[Block]:
            return [block_of(f"m{number}.avro", self.bytes_of(one)) for number, one in enumerate(listed)]

        def files(listed: list[Listed]) -> list[ManifestFile]:
            return [manifest_file(one.content, one.spec_id, one.sequence) for one in listed]

        return TableView(
            files(self.manifests), blocks(self.manifests), files(self.delete_manifests), blocks(self.delete_manifests)
        )

    def bytes_of(self, listed: Listed) -> bytes:
        return manifest_bytes(
            listed.entries,
            version=listed.version,
            content=listed.content,
            style=replace(self.style, sparse=self.style.sparse and listed.content == DATA),
            spec_id=listed.spec_id,
            fields=SPECS[listed.spec_id],
            kinds=self.kinds[listed.schema_id],
            schema=self.schemas[listed.schema_id],
        )

    def index(self, view: TableView) -> DeleteIndex:
        schemas = [msgspec.convert(schema, type=Schema) for schema in self.schemas.values()]
        return DeleteIndex(view, specs(), schemas)

    # The oracle

    def sequence(self, of: tuple[Listed, Entry]) -> int:
        listed, entry = of
        return listed.sequence if entry.sequence is None else entry.sequence

    def in_scope(self, delete: tuple[Listed, Entry], data: tuple[Listed, Entry]) -> bool:
        """The specification's rules; a position delete that names its file goes by the name alone, as in Java."""
        removal, file = delete[1].file, data[1].file
        alike = removal.partition_key == file.partition_key
        older, newest = self.sequence(data), self.sequence(delete)
        if removal.content == EQUALITY_DELETES:
            return older < newest and (removal.spec_id in GLOBAL_SPECS or alike)
        if older > newest:
            return False
        named = removal.referenced
        bounds = removal.metrics.get(PATH_ID)
        if named is None and bounds is not None and bounds.lower == bounds.upper:
            named = bounds.lower.decode()
        if not (alike if named is None else named == file.path):
            return False
        return removal.is_vector or not any(
            other[1].file.is_vector and self.in_scope(other, data) for other in self.deletes
        )

    def removes(self, delete: tuple[Listed, Entry], data: tuple[Listed, Entry]) -> bool:
        removal, file = delete[1].file, data[1].file
        if removal.content == POSITION_DELETES:
            return True
        kinds = [self.kinds[1][key] for key in removal.equality_ids]
        return any(
            all(same(kind, row[key], value) for kind, key, value in zip(kinds, removal.equality_ids, one, strict=True))
            for row in file.rows
            for one in removal.keys
        )

    def java_drops(self, delete: tuple[Listed, Entry], data: tuple[Listed, Entry]) -> bool:
        """By one column whose statistics Java trusts rightly: it is neither a float, a UUID, nor in a null struct."""
        removal, file = delete[1].file, data[1].file
        if removal.content == POSITION_DELETES:
            return False
        return any(
            self._column_drops(key, removal.metrics.get(key, ColumnMetrics()), file.metrics.get(key, ColumnMetrics()))
            for key in removal.equality_ids
            if self.kinds[1][key] not in (*FLOATS, "uuid") and key != NESTED
        )

    def _column_drops(self, key: int, gone: ColumnMetrics, held: ColumnMetrics) -> bool:
        required = key in self.required

        def may_hold_null(of: ColumnMetrics) -> bool:
            return not required and (of.nulls is None or of.nulls > 0)

        def only_null(of: ColumnMetrics) -> bool:
            return not required and of.nulls is not None and of.nulls == of.values

        if may_hold_null(held) and may_hold_null(gone):
            return False
        if (only_null(held) and not may_hold_null(gone)) or (only_null(gone) and not may_hold_null(held)):
            return True
        if None in (held.lower, held.upper, gone.lower, gone.upper):
            return False
        kind = self.kinds[1][key]
        return value_of(kind, held.lower) > value_of(kind, gone.upper) or value_of(kind, gone.lower) > value_of(
            kind, held.upper
        )


def value_of(kind: str, data: bytes | None) -> Any:
    """A bound as something that sorts; the length of its bytes, not the column's type, tells how it was written."""
    assert data is not None
    if kind in ("string", "binary", "boolean"):
        return data
    number = int.from_bytes(data, "big" if kind.startswith("decimal") else "little", signed=True)
    return max(number, LONG_MIN + 1)  # the least long stands for an absent bound in blocks, so bounds stop above it


def rows_of(view: TableView) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Every row of the view, in order."""
    return np.concatenate([np.empty(0, dtype=np.int64), *map(view.rows_of, range(len(view.blocks)))])


def check(seed: int) -> int:
    """Judges one situation; how many pairs its statistics ruled out."""
    situation = Situation(seed)
    view = situation.view()
    index = situation.index(view)
    assert view.rows == len(situation.data), seed
    assert view.delete_rows == len(situation.deletes), seed
    names = rows_of(view)
    rows = list(range(view.rows)) * 2
    situation.rng.shuffle(rows)
    found = index.applying_to(names[rows])
    dropped = 0
    for row, applying in zip(rows, found, strict=True):
        data = situation.data[row]
        assert list(applying) == sorted(set(applying)), seed
        assert applying == index.applying(int(names[row])), seed
        for number, delete in enumerate(situation.deletes):
            where = f"seed {seed}: delete row {number}, data row {row}"
            scope = situation.in_scope(delete, data)
            if number in applying:
                assert scope, f"{where} is out of scope"
                assert not situation.java_drops(delete, data), f"{where} is ruled out by statistics"
            elif scope:
                dropped += 1
                assert not situation.removes(delete, data), f"{where} is missing"
    return dropped


def test_no_needed_delete_file_is_missing_and_none_is_there_without_need() -> None:
    assert sum(check(seed) for seed in range(150)) > 300


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_needed_delete_file_is_missing_and_none_is_there_without_need_in_thousands_of_views() -> None:
    for seed in range(1000, 6000):
        check(seed)


def test_data_files_are_split_among_several_descents_where_pairs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_PAIRS_MAX", 16)
    for seed in range(150, 200):
        check(seed)


def test_every_delete_file_that_removes_rows_of_a_random_history_is_named(tmp_path: Path) -> None:
    removing = 0
    for seed in range(30):
        lake = random_lake(seed, tmp_path / str(seed))
        location = lake.metadata_location
        metadata = decode_table(Path(location.removeprefix("file://")).read_bytes(), location)
        for snapshot in lake.snapshots.values():
            view = view_of(snapshot.json["manifest-list"])
            index = DeleteIndex(view, metadata.partition_specs, metadata.schemas)
            found = index.applying_to(rows_of(view))
            for file, applying in zip(snapshot.data_files, found, strict=True):
                named = {snapshot.delete_files[number].name for number in applying}
                allowed = {delete.name: delete for delete in lake.applicable(snapshot, file)}
                assert named <= allowed.keys(), f"seed {seed}, snapshot {snapshot.id}, {file.path}"
                needed = {name for name, delete in allowed.items() if lake.removed(delete, file)}
                assert needed <= named, f"seed {seed}, snapshot {snapshot.id}, {file.path}"
                removing += len(needed)
    assert removing > 100


def view_of(manifest_list: str) -> TableView:
    def read(location: str) -> bytes:
        return Path(location.removeprefix("file://")).read_bytes()

    listed = decode_manifest_list(read(manifest_list), manifest_list)
    data, deletes = ([one for one in listed if one.content == content] for content in (0, 1))
    blocks = {one.manifest_path: block_of(one.manifest_path, read(one.manifest_path)) for one in listed}
    return TableView(
        data, [blocks[one.manifest_path] for one in data], deletes, [blocks[one.manifest_path] for one in deletes]
    )


# One rule at a time

KINDS = {A: "long", B: "uuid", NESTED: "int", LATE: "string", F: "double"}
SCHEMA = schema_json(0, KINDS, set(), late=True)
PLAIN = Style(shuffled=False, sparse=False, codec="null", old_names=False, summaries=False, seed=0)


def entry(file: Any, sequence: int | None, status: int = EXISTING) -> Entry:
    return Entry(status, 1, sequence, sequence, file)


def common(path: str, content: int, spec_id: int, partition: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "path": path,
        "content": content,
        "format": "PARQUET",
        "spec_id": spec_id,
        "partition": partition,
        "record_count": 1,
        "size": 1,
        "metrics": {},
    }


def data_file(
    path: str = "d",
    *,
    spec_id: int = 0,
    partition: tuple[Any, ...] = (),
    metrics: dict[int, ColumnMetrics] | None = None,
) -> DataFile:
    return DataFile(**common(path, DATA, spec_id, partition) | {"metrics": metrics or {}})


def delete_file(content: int, *, spec_id: int = 0, partition: tuple[Any, ...] = (), **more: Any) -> DeleteFile:
    return DeleteFile(**common("x", content, spec_id, partition) | more)


def vector(referenced: str | None = "d", **more: Any) -> DeleteFile:
    return delete_file(
        POSITION_DELETES, referenced=referenced, format="PUFFIN", content_offset=4, content_size=9, **more
    )


def block(entries: list[Entry], *, schema: dict[str, Any] = SCHEMA, version: int = 3) -> Block:
    content, spec_id = int(entries[0].file.content != DATA), entries[0].file.spec_id
    data = manifest_bytes(
        entries,
        version=version,
        content=content,
        style=PLAIN,
        spec_id=spec_id,
        fields=SPECS[spec_id],
        kinds=KINDS,
        schema=schema,
    )
    return block_of("manifest.avro", data)


def applying(
    data: list[Entry], *deletes: list[Entry], sequence: int = 5, schema: dict[str, Any] = SCHEMA
) -> list[tuple[int, ...]]:
    """What applies to each data file, of manifests with the sequence number `sequence`."""

    def files(of: list[list[Entry]]) -> list[ManifestFile]:
        return [manifest_file(int(some[0].file.content != DATA), some[0].file.spec_id, sequence) for some in of]

    view = TableView(
        files([data]), [block(data)], files(list(deletes)), [block(some, schema=schema) for some in deletes]
    )
    index = DeleteIndex(view, specs(), [msgspec.convert(schema, type=Schema)])
    return index.applying_to(rows_of(view))


def test_position_deletes_apply_to_files_of_their_own_commit_and_equality_deletes_to_older_ones() -> None:
    data = [entry(data_file(f"d{sequence}"), sequence) for sequence in (3, 4, 5)]
    assert applying(data, [entry(delete_file(POSITION_DELETES), 4)]) == [(0,), (0,), ()]
    assert applying(data, [entry(delete_file(EQUALITY_DELETES, equality_ids=[A]), 4)]) == [(0,), (), ()]


def test_sequence_numbers_are_inherited_by_added_files_and_are_0_in_version_1() -> None:
    data = [entry(data_file("added"), None, ADDED), entry(data_file("kept"), 4)]
    deletes = [entry(delete_file(EQUALITY_DELETES, equality_ids=[A]), None, ADDED)]
    assert applying(data, deletes) == [(), (0,)]
    old = [entry(data_file("v1"), None)]
    view = TableView([manifest_file(0, 0, 0)], [block(old, version=1)], [manifest_file(1, 0, 1)], [block(deletes)])
    assert DeleteIndex(view, specs(), []).applying(0) == (0,)


def test_a_kept_file_without_a_sequence_number_is_corrupt() -> None:
    deletes = [entry(delete_file(POSITION_DELETES), 5)]
    with pytest.raises(Corrupt, match=r"manifest\.avro: the entry of lost was not added there"):
        applying([entry(data_file("lost"), None)], deletes)
    with pytest.raises(Corrupt, match=r"manifest\.avro: the entry of x was not added there"):
        applying([entry(data_file(), 1)], [entry(delete_file(POSITION_DELETES), None)])


def test_a_deletion_vector_takes_the_place_of_position_deletes_but_not_of_equality_deletes() -> None:
    others = [
        entry(delete_file(POSITION_DELETES), 5),
        entry(delete_file(POSITION_DELETES, referenced="d"), 5),
        entry(delete_file(EQUALITY_DELETES, equality_ids=[A]), 5),
    ]
    data = [entry(data_file("d"), 1), entry(data_file("e"), 1)]
    assert applying(data, others, [entry(vector(), 5)]) == [(2, 3), (0, 2)]


def test_a_deletion_vector_older_than_its_file_does_not_count() -> None:
    assert applying([entry(data_file(), 3)], [entry(vector(), 2), entry(delete_file(POSITION_DELETES), 4)]) == [(1,)]


def test_of_several_deletion_vectors_all_are_kept() -> None:
    assert applying([entry(data_file(), 3)], [entry(vector(), 4), entry(vector(), 5)]) == [(0, 1)]


def test_a_deletion_vector_without_its_data_file_is_corrupt() -> None:
    with pytest.raises(Corrupt, match=r"manifest\.avro: a deletion vector in x has no referenced_data_file"):
        applying([entry(data_file(), 3)], [entry(vector(None), 4)])


def test_a_data_file_among_delete_files_is_corrupt() -> None:
    odd = delete_file(POSITION_DELETES)
    odd.content = 7
    with pytest.raises(Corrupt, match=r"manifest\.avro lists x, which is not a delete file"):
        applying([entry(data_file(), 3)], [entry(odd, 4)])


def test_position_deletes_go_by_partition_unless_they_name_their_file() -> None:
    data = [
        entry(data_file("one", spec_id=1, partition=(1,)), 1),
        entry(data_file("two", spec_id=1, partition=(2,)), 1),
        entry(data_file("null", spec_id=1, partition=(None,)), 1),
    ]
    deletes = [
        entry(delete_file(POSITION_DELETES, spec_id=1, partition=(2,)), 1),
        entry(delete_file(POSITION_DELETES, spec_id=1, partition=(None,)), 1),
        entry(delete_file(POSITION_DELETES, spec_id=1, partition=(1,), referenced="one"), 1),
    ]
    unpartitioned = [entry(delete_file(POSITION_DELETES), 1)]
    assert applying(data, deletes, unpartitioned) == [(2,), (0,), (1,)]


def test_partitions_of_floats_are_equal_by_their_bits() -> None:
    values = (0.0, -0.0, math.nan, None)
    data = [entry(data_file(repr(value), spec_id=2, partition=(1, value)), 1) for value in values]
    deletes = [entry(delete_file(POSITION_DELETES, spec_id=2, partition=(1, value)), 1) for value in values]
    assert applying(data, deletes) == [(0,), (1,), (2,), (3,)]


def test_equality_deletes_of_a_spec_of_nothing_but_void_fields_are_global() -> None:
    data = [entry(data_file(spec_id=1, partition=(1,)), 1)]
    for spec_id, partition, found in ((3, (None,), (0,)), (0, (), (0,)), (4, (None, None), ())):
        delete = delete_file(EQUALITY_DELETES, spec_id=spec_id, partition=partition, equality_ids=[A])
        assert applying(data, [entry(delete, 2)]) == [found], spec_id


PATHS_TOLD = delete_file(POSITION_DELETES, metrics={PATH_ID: ColumnMetrics(lower=b"d", upper=b"d")})
PATHS_CUT = delete_file(POSITION_DELETES, metrics={PATH_ID: ColumnMetrics(lower=b"d", upper=b"e")})


def test_path_bounds_that_agree_name_the_data_file() -> None:
    data = [entry(data_file("d"), 1), entry(data_file("e"), 1)]
    deletes = [entry(PATHS_TOLD, 2), entry(PATHS_CUT, 2)]
    assert applying(data, deletes) == [(0, 1), (1,)]


def stats(lower: bytes | None, upper: bytes | None, nulls: int | None = 0, nans: int | None = None) -> ColumnMetrics:
    return ColumnMetrics(values=2, nulls=nulls, nans=nans, lower=lower, upper=upper)


@pytest.mark.parametrize(
    ("key", "kind", "gone", "held", "kept"),
    [
        pytest.param(A, "long", (1, 5, 0), (6, 9, 0), False, id="apart"),
        pytest.param(A, "long", (1, 6, 0), (6, 9, 0), True, id="touching"),
        pytest.param(A, "long", (1, 5, 1), (6, 9, 1), True, id="null in both"),
        pytest.param(A, "long", (1, 5, None), (6, 9, 1), True, id="null counts of one unknown"),
        pytest.param(A, "long", (1, 5, None), (6, 9, 0), False, id="null in one at most"),
        pytest.param(A, "long", (None, None, 2), (6, 9, 0), False, id="only nulls deleted and none there"),
        pytest.param(A, "long", (1, 5, 0), (None, None, 2), False, id="no nulls deleted and only nulls there"),
        pytest.param(A, "long", (1, 5, 0), (None, None, 0), True, id="bounds unknown"),
        pytest.param(A, "long", (None, 5, 0), (6, None, 0), False, id="half the bounds are enough"),
        pytest.param(F, "double", (1.0, 5.0, 0), (6.0, 9.0, 0), True, id="NaN perhaps in both"),
        pytest.param(NESTED, "int", (1, 5, None), (6, 9, None), True, id="required in a struct that may be null"),
        pytest.param(B, "uuid", (b"\x10", b"\x90"), (b"\xa0", b"\xb0"), False, id="UUIDs apart, as both orders say"),
        pytest.param(B, "uuid", (b"\xa0", b"\x10"), (b"\x20", b"\x30"), True, id="UUIDs in signed order"),
        pytest.param(LATE, "string", ("a", "b", 0), ("ba", "c", 0), False, id="strings apart"),
    ],
)
def test_an_equality_delete_is_dropped_only_where_statistics_rule_it_out(
    key: int, kind: str, gone: tuple[Any, ...], held: tuple[Any, ...], kept: bool
) -> None:
    def metrics(lower: Any, upper: Any, nulls: int | None = 0) -> dict[int, ColumnMetrics]:
        def written(value: Any) -> bytes | None:
            value = value.ljust(16, b"\0") if kind == "uuid" else value
            return None if value is None else to_bytes(kind, value)

        return {key: stats(written(lower), written(upper), nulls)}

    delete = delete_file(EQUALITY_DELETES, equality_ids=[key], metrics=metrics(*gone))
    data = data_file(metrics=metrics(*held))
    assert applying([entry(data, 1)], [entry(delete, 2)]) == [(0,) if kept else ()]


@pytest.mark.parametrize("pairs_max", [16, 1 << 21])
def test_of_many_equality_deletes_those_apply_that_do_one_by_one(
    pairs_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "_PAIRS_MAX", pairs_max)
    rng = random.Random(pairs_max)
    blank = {"kinds": {1: KINDS}, "required": set()}
    judge = Situation.__new__(Situation)
    judge.__dict__.update(blank)

    def metrics(ids: list[int]) -> dict[int, ColumnMetrics]:
        made = {}
        for key in ids:
            low = rng.randrange(200)
            pair = [
                to_bytes("long", value) if key == A else b"%03d" % value for value in (low, low + rng.choice([0, 3]))
            ]
            nulls = rng.choice([0, 0, 0, 0, 1, None, 2])
            bounds = (None, None) if nulls == 2 or rng.random() < 0.1 else pair
            made[key] = stats(*bounds, nulls)
        return made

    def partition() -> dict[str, Any]:
        return {"spec_id": 1, "partition": (rng.choice([1, 2, 2, 2, None]),)}

    data = [entry(data_file(f"d{at}", metrics=metrics([A, LATE]), **partition()), rng.randrange(9)) for at in range(80)]
    deletes = []
    for some, where in ((250, partition), (150, dict)):
        files = [(rng.choice([[A], [A], [LATE, A]]), where()) for _ in range(some)]
        made = [delete_file(EQUALITY_DELETES, equality_ids=ids, metrics=metrics(ids), **at) for ids, at in files]
        deletes.append([entry(file, rng.randrange(12)) for file in made])
    found = applying(data, *deletes)
    listed = Listed(0, 0, 0, 3, 5)
    flat = [(listed, one) for one in deletes[0] + deletes[1]]
    expected = [
        tuple(
            at
            for at, delete in enumerate(flat)
            if judge.in_scope(delete, (listed, one)) and not judge.java_drops(delete, (listed, one))
        )
        for one in data
    ]
    assert found == expected
    assert 1000 < sum(map(len, found)) < 20_000


def test_a_required_column_holds_no_null_whatever_counts_leave_unsaid() -> None:
    required = schema_json(0, KINDS, {A}, late=True)
    gone, held = ({A: ColumnMetrics(lower=to_bytes("long", low), upper=to_bytes("long", low + 1))} for low in (1, 5))
    delete = entry(delete_file(EQUALITY_DELETES, equality_ids=[A], metrics=gone), 2)
    data = [entry(data_file(metrics=held), 1)]
    assert applying(data, [delete]) == [(0,)]
    assert applying(data, [delete], schema=required) == [()]


def test_bounds_of_a_type_that_a_promotion_gave_another_unit_prove_nothing() -> None:
    day, micros = to_bytes("date", 20_000), to_bytes("timestamp", 20_000 * 86_400_000_000)
    data = data_file(metrics={A: stats(day, day)})
    delete = delete_file(EQUALITY_DELETES, equality_ids=[A], metrics={A: stats(micros, micros)})
    dates, timestamps = (schema_json(0, KINDS | {A: kind}, set(), late=True) for kind in ("date", "timestamp"))
    view = TableView(
        [manifest_file(0, 0, 5)],
        [block([entry(data, 1)], schema=dates)],
        [manifest_file(1, 0, 5)],
        [block([entry(delete, 2)], schema=timestamps)],
    )
    assert DeleteIndex(view, specs(), []).applying(0) == (0,)


def test_an_equality_delete_on_a_column_that_the_data_file_lacks_is_kept() -> None:
    delete = delete_file(EQUALITY_DELETES, equality_ids=[LATE], metrics={LATE: stats(b"a", b"b")})
    assert applying([entry(data_file(metrics={A: stats(None, None)}), 1)], [entry(delete, 2)]) == [(0,)]


def test_two_columns_rule_out_what_one_alone_would_not() -> None:
    one, nine = to_bytes("long", 1), to_bytes("long", 9)
    gone = {A: stats(one, nine), LATE: stats(b"a", b"b")}
    held = {A: stats(one, nine), LATE: stats(b"c", b"d")}
    delete = delete_file(EQUALITY_DELETES, equality_ids=[LATE, A], metrics=gone)
    assert applying([entry(data_file(metrics=held), 1)], [entry(delete, 2)]) == [()]


def test_files_with_the_same_deletes_share_one_tuple() -> None:
    data = [entry(data_file(str(number)), 1) for number in range(3)]
    deletes = [entry(delete_file(POSITION_DELETES), 2), entry(delete_file(EQUALITY_DELETES, equality_ids=[A]), 2)]
    found = applying(data, deletes)
    assert found == [(0, 1)] * 3
    assert found[0] is found[1] is found[2]


def test_without_delete_files_no_data_file_is_looked_at() -> None:
    view = TableView([manifest_file(0, 0, 5)], [block([entry(data_file(), None)])])  # no sequence number to be had
    assert DeleteIndex(view, specs(), []).applying_to(np.zeros(3, dtype=np.int64)) == [(), (), ()]
