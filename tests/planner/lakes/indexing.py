"""Random indexes for lakes whose rows are known: definitions, index files of some data files, and a registry.

There are no data files to read. The module makes columns of the known rows, with the type of the file's writer or of a
later reader, and passes them to the functions that jobs use to build index files. So these tests check what follows:
which file an entry belongs to, what the registry lists, and how a plan uses it.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from seamark.connector.client.storage import Storage
from seamark.connector.index.files import DataFile as ListedFile
from seamark.connector.index.files import compute_term_keys, encode_index_file
from seamark.connector.index.merges import merge_index_files
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.definitions import PREFIX, IndexDefinition, read_definitions
from seamark.formats.index.keys.keys import Keys
from seamark.formats.index.keys.terms import Term, format_term, resolve_term_by_id
from seamark.formats.index.kinds import bitmap, bloom, record
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.metaserver.index.files.indexes import Indexes, open_indexes
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.plan.planner import Planner, open_planner
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, IndexFileState, RegisteredIndexFile
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace
from seamark.metaserver.store.port import PointerStore
from tests.planner.lakes import partitioning
from tests.planner.lakes.kinds import NANOSECOND_TYPES, parse_decimal, parse_fixed_length, strip_parameters
from tests.planner.lakes.lake import DataFile, Lake
from tests.planner.lakes.predicates import draw_filter, draw_predicate_on, expand_zeros_sometimes
from tests.planner.lakes.schemas import Schema as TableSchema
from tests.planner.lakes.tables import Table
from tests.store.samples import NS, TABLE, make_entry

CALENDAR = ("year", "month", "day", "hour")


def build_array(kind: str, values: Sequence[Any]) -> pa.Array:
    """Return a column of an Iceberg type as a Parquet reader returns it.

    Args:
        kind: The Iceberg type.
        values: Decimals are unscaled integers, dates are days, and times are micro- or nanoseconds. UUIDs are bytes.
    """
    name = strip_parameters(kind)
    if name == "decimal":
        precision, scale = parse_decimal(kind)
        numbers = [None if value is None else _build_decimal(value, scale) for value in values]
        return pa.array(numbers, pa.decimal128(precision, scale))
    if name in ("uuid", "fixed"):
        return pa.array(values, pa.binary(16 if name == "uuid" else parse_fixed_length(kind)))
    if name == "date":
        return pa.array(values, pa.int32()).cast(pa.date32())
    if name in NANOSECOND_TYPES or name in ("time", "timestamp", "timestamptz"):
        zone = "UTC" if "tz" in name else None
        arrow = pa.time64("us") if name == "time" else pa.timestamp("ns" if name in NANOSECOND_TYPES else "us", zone)
        return pa.array(values, pa.int64()).cast(arrow)
    plain_type = {"boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32()}
    plain_type |= {"double": pa.float64(), "string": pa.string(), "binary": pa.binary()}
    return pa.array(values, plain_type[name])


def _build_decimal(unscaled_value: int, scale: int) -> Decimal:
    digits = tuple(map(int, str(abs(unscaled_value))))
    return Decimal((int(unscaled_value < 0), digits, -scale))


def draw_terms(rng: random.Random, kind: str) -> list[str]:
    """Return terms that an index may have on a column of this type."""
    name = strip_parameters(kind)
    terms = ["identity"]
    if name not in ("boolean", "float", "double"):
        terms.append(f"bucket[{rng.choice([2, 5, 16])}]")
    if name in ("int", "long", "decimal", "string", "binary"):
        terms.append(f"truncate[{rng.choice([1, 3, 10, 100])}]")
    if name == "string":
        terms += ["lower", "lower"]
    if name in ("date", "timestamp", "timestamptz", *NANOSECOND_TYPES):
        terms += CALENDAR[: 3 if name == "date" else 4]
    return terms


def draw_definitions(rng: random.Random, lake: Lake) -> dict[str, str]:
    """Return properties that define indexes on columns of any schema of the table.

    The definitions have the forms that users write, and the forms that the catalog stores.
    """
    columns = [column for column in lake.all_columns.values() if column.kind != "struct"]
    properties: dict[str, str] = {}
    for number in range(rng.choice([1, 3, 5, 8])):
        kind = rng.choice([name for name, index_kind in KINDS.items() if not index_kind.aggregates])
        count = rng.choice([1, 1, 2, 3]) if kind == "record" else 1
        chosen_columns = rng.sample(columns, min(count, len(columns)))
        terms = [
            (rng.choice(draw_terms(rng, item.kind)) if rng.random() < 0.5 else "identity", item)
            for item in chosen_columns
        ]
        texts = [format_term(transform, column.name) for transform, column in terms]
        fpp = rng.choice([None, 0.001, 0.3]) if kind == "bloom" else None
        if rng.random() < 0.3 and all(item.id in lake.schema.list_columns() for item in chosen_columns):
            options = [] if fpp is None else [f"fpp={fpp}"]
            properties[f"{PREFIX}i{number}"] = f"{kind}({', '.join(texts + options)})"
        else:
            document: dict[str, Any] = {
                "kind": kind,
                "columns": texts,
                "field-ids": [item.id for item in chosen_columns],
            }
            properties[f"{PREFIX}i{number}"] = json.dumps(document if fpp is None else {**document, "fpp": fpp})
    return properties


def draw_indexed_filter(rng: random.Random, indexed_lake: IndexedLake, schema: TableSchema, depth: int = 0) -> Any:
    """Return a filter with the names of `schema`, mostly of equalities on indexed columns.

    `predicates.to_json` converts it to JSON.
    """
    draw = rng.random()
    if depth < 2 and draw < 0.5:
        left, right = (draw_indexed_filter(rng, indexed_lake, schema, depth + 1) for _ in range(2))
        return {"type": rng.choice(["and", "and", "or"]), "left": left, "right": right}
    if depth < 2 and draw < 0.55:
        return {"type": "not", "child": draw_indexed_filter(rng, indexed_lake, schema, depth + 1)}
    columns = schema.list_columns()
    usable_definitions = [
        definition
        for definition in indexed_lake.definitions
        if all(term.column_id in columns for term in definition.terms)
    ]
    if not usable_definitions:
        return draw_filter(rng, indexed_lake.lake, schema, depth)
    result = None
    for term in rng.choice(usable_definitions).terms:
        column = columns[term.column_id]
        values = indexed_lake.lake.pools[column.id]
        # Most predicates compare the column itself, because most indexes are on columns without a transform.
        transforms = ["identity"] * 6 + [partitioning.draw_transform(rng, column.kind, values)]
        # Filters use the transform of an index only if it is one of these.
        is_usable = term.transform.startswith("bucket") or term.transform in ("year", "month", "day")
        transform = rng.choice([*transforms, term.transform] if is_usable else transforms)
        ops = rng.choice([("eq", "in"), ("eq", "in"), None])
        index_predicate = expand_zeros_sometimes(rng, draw_predicate_on(rng, indexed_lake.lake, column, transform, ops))
        result = index_predicate if result is None else {"type": "and", "left": result, "right": index_predicate}
    return result


def define_indexes(lake: Lake, properties: dict[str, str]) -> TableMetadata:
    """Set properties that must all define indexes, change the file on disk, and return the changed table."""
    lake.metadata["properties"] = properties
    path = Path(lake.metadata_location.removeprefix("file://"))
    path.write_text(json.dumps(lake.metadata), encoding="utf-8")
    metadata = decode_table(path.read_bytes(), lake.metadata_location)
    assert not read_definitions(metadata).problems, f"seed {lake.seed}: {read_definitions(metadata).problems}"
    return metadata


def list_data_files(lake: Lake) -> list[DataFile]:
    """Return the data files of all snapshots, each once."""
    files_by_path = {file.path: file for snapshot in lake.snapshots.values() for file in snapshot.data_files}
    return list(files_by_path.values())


def build_keys(lake: Lake, file: DataFile, term: Term, *, as_written: bool) -> Keys | None:
    """Return the keys of a term in one file, or None if they are uncertain and the file is not indexed.

    Args:
        lake: The table.
        file: The data file.
        term: The indexed column, with a transform.
        as_written: Whether the values have the type with which the file was written, not the type of the definition.
    """
    column = lake.all_columns[term.column_id]
    if column.id not in file.written_columns:
        if column.default is not None:
            return None
        return compute_term_keys(term, pa.chunked_array([pa.nulls(file.record_count)]))
    kind = lake.schemas[file.schema_id].list_columns()[column.id].kind
    values = [row[column.id] for row in file.rows]
    try:
        return compute_term_keys(term, pa.chunked_array([build_array(kind if as_written else term.source, values)]))
    except ValueError:  # The transform has no result for this value.
        return None


def build_part(definition: IndexDefinition, columns: list[Keys]) -> Any:
    """Return the part of an index for one data file."""
    if definition.kind == "bloom":
        return bloom.build_filter(columns[0], definition.parameters["fpp"])
    return bitmap.build_bitmap(columns[0]) if definition.kind == "bitmap" else record.build_records(columns)


def build_definition_as_of(definition: IndexDefinition, metadata: TableMetadata, schema: Schema) -> IndexDefinition:
    """Return the definition as it was under this schema: its types may be narrower, and its id may differ."""
    old_schemas = [item for item in metadata.schemas if item.id <= schema.id]
    terms = tuple(resolve_term_by_id(term.transform, term.column_id, schema, old_schemas) for term in definition.terms)
    return IndexDefinition(definition.name, definition.kind, terms, definition.parameters, definition.state)


@dataclass
class IndexedLake:
    """A registered lake with index files.

    Attributes:
        indexed_paths: The paths of the data files with an index entry, by definition id.
    """

    lake: Lake
    metadata: TableMetadata
    name: str
    store: PointerStore
    registry: Registry
    indexed_paths: dict[str, set[str]] = field(default_factory=dict)
    written_count: int = 0

    @property
    def definitions(self) -> tuple[IndexDefinition, ...]:
        return read_definitions(self.metadata).enabled

    @property
    def folder(self) -> Path:
        return self.lake.folder / "_seamark" / "index"

    async def build_entry(self) -> Entry:
        entry = await self.store.load_entry(TABLE, NS, self.name)
        assert entry is not None
        return entry

    async def list_live_files(self) -> list[RegisteredIndexFile]:
        """Return the live index files in the order of their creation, because the names of merged files are random."""
        files = await self.store.index_files(self.metadata.table_uuid)
        return sorted((file for file in files if file.state is IndexFileState.LIVE), key=lambda file: file.created_ms)

    async def add(
        self, definition: IndexDefinition, files: Iterable[tuple[ListedFile, Any]], *, remove: Sequence[str] = ()
    ) -> str:
        """Write and register an index file with the entries of these data files, and return its location.

        It replaces the index files with the locations `remove`.
        """
        listed_files = list(files)
        self.written_count += 1
        path = self.folder / f"{self.written_count:04d}.puffin"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(
            encode_index_file(
                self.metadata.table_uuid,
                definition,
                [file for file, _ in listed_files],
                [part for _, part in listed_files],
            )
        )
        path.write_bytes(data)
        self.indexed_paths.setdefault(definition.id, set()).update(file.path for file, _ in listed_files)
        rows = sum(file.records for file, _ in listed_files)
        await self.register(definition, path.as_uri(), len(listed_files), rows, len(data), remove=remove)
        return path.as_uri()

    async def register(
        self,
        definition: IndexDefinition,
        location: str,
        files: int,
        rows: int,
        size_bytes: int,
        *,
        remove: Sequence[str] = (),
    ) -> None:
        registered_index_file = RegisteredIndexFile(
            uuid=self.metadata.table_uuid,
            location=location,
            definition=definition.id,
            kind=definition.kind,
            level=1 if remove else 0,  # A file that replaces others has a higher level.
            files=files,
            rows=rows,
            size_bytes=size_bytes,
            snapshot_id=None,
            created_ms=self.written_count,
        )
        await self.registry.replace(self.metadata.table_uuid, definition.id, add=[registered_index_file], remove=remove)

    async def merge(self, definition: IndexDefinition, locations: Sequence[str]) -> None:
        """Merge index files, and register the merged file in their place. The old files stay on the disk."""
        self.written_count += 1
        folder = self.folder.as_uri()
        merged_index_files = merge_index_files(locations, folder, Storage())
        assert merged_index_files.location is not None
        await self.register(
            definition,
            merged_index_files.location,
            merged_index_files.files,
            merged_index_files.rows,
            merged_index_files.size_bytes,
            remove=locations,
        )

    def build_entries(
        self, definition: IndexDefinition, files: Iterable[DataFile], *, as_written: bool = False
    ) -> Iterator[tuple[ListedFile, Any]]:
        """Yield the entries that can be built for these files.

        With `as_written`, the keys are made from values of the type with which a file was written.
        """
        for file in files:
            columns = [build_keys(self.lake, file, term, as_written=as_written) for term in definition.terms]
            known_columns = [column for column in columns if column is not None]
            if len(known_columns) == len(columns):
                yield ListedFile(file.path, file.size, file.record_count), build_part(definition, known_columns)


async def register_lake(lake: Lake, store: PointerStore, registry: Registry, properties: dict[str, str]) -> IndexedLake:
    """Register a random table in the catalog's store, with index definitions and no index file."""
    metadata = define_indexes(lake, properties)
    name = f"t{lake.seed}"
    entry = make_entry(name, uuid=metadata.table_uuid, metadata_location=lake.metadata_location)
    await store.transact([CreateEntry(entry)])
    return IndexedLake(lake, metadata, name, store, registry)


async def index_randomly(rng: random.Random, indexed_lake: IndexedLake) -> None:
    """Write index files of some data files for each definition, and merge some of them.

    An index file may have a definition for an older schema, in which a column has another type. Only files with the
    same definition are merged. In some cases, the files that were merged are then deleted from the disk.
    """
    for definition in indexed_lake.definitions:
        files = list_data_files(indexed_lake.lake)
        rng.shuffle(files)
        files = files[: max(1, int(len(files) * rng.choice([0.3, 0.7, 1.0, 1.0])))]
        parts = rng.choice([1, 1, 2, 4])
        locations_by_definition_id: dict[str, tuple[IndexDefinition, list[str]]] = {}
        for part in range(parts):
            part_files = files[part::parts] + rng.sample(files, int(rng.random() < 0.3))
            index_part = await _index_some_files(rng, indexed_lake, definition, part_files)
            if index_part is not None:
                old_definition, location = index_part
                _, locations = locations_by_definition_id.setdefault(old_definition.id, (old_definition, []))
                locations.append(location)
        for old_definition, locations in locations_by_definition_id.values():
            if len(locations) > 1 and rng.random() < 0.5:
                chosen_locations = locations[: rng.randint(2, len(locations))]
                await indexed_lake.merge(old_definition, chosen_locations)
                if rng.random() < 0.5:
                    for location in chosen_locations:
                        Path(location.removeprefix("file://")).unlink()


async def _index_some_files(
    rng: random.Random, indexed_lake: IndexedLake, definition: IndexDefinition, files: Sequence[DataFile]
) -> tuple[IndexDefinition, str] | None:
    """Write an index file under a random schema.

    Returns:
        The definition under this schema and the location of the file, or None if no data file can be indexed.
    """
    metadata, newest_schema_id = indexed_lake.metadata, max((file.schema_id for file in files), default=0)
    ids = {term.column_id for term in definition.terms}
    known_ids: set[int] = set()
    choices: list[Schema] = []
    for schema in sorted(metadata.schemas, key=lambda schema_version: schema_version.id):
        known_ids |= ids & set(indexed_lake.lake.schemas[schema.id].list_columns())
        if known_ids == ids and schema.id >= newest_schema_id:
            choices.append(schema)
    # Most indexes are built by readers of the newest schema.
    schema = rng.choice([*choices, choices[-1], choices[-1]]) if choices else metadata.current_schema
    old_definition = build_definition_as_of(definition, metadata, schema)
    entries = list(indexed_lake.build_entries(old_definition, dict.fromkeys(files), as_written=rng.random() < 0.5))
    entries += _build_entries_of_replaced_files(rng, old_definition, entries)
    rng.shuffle(entries)
    return (old_definition, await indexed_lake.add(old_definition, entries)) if entries else None


def _build_entries_of_replaced_files(
    rng: random.Random, definition: IndexDefinition, entries: Sequence[tuple[ListedFile, Any]]
) -> list[tuple[ListedFile, Any]]:
    """Return entries for earlier files of some of the paths, with a different size or row count and no common row.

    About a tenth of the paths have such an entry.
    """
    replaced_entries = []
    for index_entry, _ in entries:
        if rng.random() < 0.1:
            size, records = (
                (index_entry.size_bytes + 1, index_entry.records) if rng.random() < 0.5 else (index_entry.size_bytes, 0)
            )
            empty_keys = [compute_term_keys(term, pa.chunked_array([pa.nulls(records)])) for term in definition.terms]
            replaced_entries.append((ListedFile(index_entry.path, size, records), build_part(definition, empty_keys)))
    return replaced_entries


def damage_file(rng: random.Random, location: str) -> str:
    """Damage a file, and return a description of the damage. Half of the damages are flipped bits."""
    path = Path(location.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    damage_kind = rng.choice(["flipped", "flipped", "flipped", "truncated", "missing", "of other bytes"])
    if damage_kind == "missing":
        path.unlink()
    elif damage_kind == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif damage_kind == "of other bytes":
        path.write_bytes(rng.randbytes(len(data)))
    else:
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    return damage_kind


@dataclass(frozen=True)
class Planning:
    planner: Planner
    indexes: Indexes
    usage: Usage


@asynccontextmanager
async def open_planning(
    folder: Path,
    registry: Registry,
    clock: Clock | None = None,
    wrap: Callable[[ObjectStore], ObjectStore] = lambda inner: inner,
    **options: Any,
) -> AsyncIterator[Planning]:
    """Open a planner with indexes, which waits for index files for up to a minute by default.

    Args:
        folder: The folder of the server's home and warehouse.
        registry: The registry of index files.
        clock: The clock of the planner. The default is the clock of the system.
        wrap: Returns the storage that the indexes use.
        options: Settings of the server.
    """
    settings = Settings(
        **{
            "home": folder / "home",
            "warehouse": folder.as_uri(),
            "plan_disk_bytes": 0,
            "index_disk_bytes": 0,
            "index_wait_s": 60.0,
            **options,
        }
    )
    clock, usage = clock or SystemClock(), Usage()
    async with (
        open_objects(settings, clock) as objects,
        open_indexes(settings, wrap(objects), registry, clock) as indexes,
        open_planner(settings, objects, clock, indexes=indexes, usage=usage) as planner,
    ):
        yield Planning(planner, indexes, usage)


async def create_namespace(store: PointerStore) -> None:
    await store.transact([CreateNamespace(NS, {})])


class IndexedTable:
    """A `tables.Table` with indexes on `id`.

    File n contains the even numbers from 10 n to 10 n + 8, each in two rows. An index can therefore exclude the file
    for an odd number, but statistics cannot.
    """

    def __init__(self, table: Table, store: PointerStore, registry: Registry, properties: dict[str, str]) -> None:
        self.table = table
        self.store = store
        self.registry = registry
        self._properties = {PREFIX + name: text for name, text in properties.items()}
        self.written_count = 0

    @property
    def metadata(self) -> TableMetadata:
        return msgspec.structs.replace(self.table.metadata, properties=self._properties)

    @property
    def definitions(self) -> dict[str, IndexDefinition]:
        return dict(read_definitions(self.metadata).by_name)

    async def build_entry(self) -> Entry:
        entry = await self.store.load_entry(TABLE, NS, "t")
        assert entry is not None
        return entry

    async def list_files(self) -> list[RegisteredIndexFile]:
        return await self.store.index_files(self.metadata.table_uuid)

    async def register(self) -> None:
        entry = make_entry("t", uuid=self.metadata.table_uuid, metadata_location=self.metadata.location)
        await self.store.transact([CreateEntry(entry)])

    def read_columns(self, number: int) -> dict[int, pa.Array]:
        """Return the columns of a data file by column id. In file n, `id` has 10 n, 10 n, 10 n + 2, …, 10 n + 8."""
        return {1: pa.array([10 * number + 2 * (row // 2) for row in range(10)], pa.int64())}

    async def index(self, index: str | IndexDefinition, numbers: Iterable[int], *, remove: Sequence[str] = ()) -> Path:
        """Write and register an index file for the data files with these numbers, and return its path.

        `index` is a definition or its name. The new file replaces the index files with the locations `remove`.
        """
        definition = self.definitions[index] if isinstance(index, str) else index
        entries = []
        for number in numbers:
            columns = self.read_columns(number)
            keys = [compute_term_keys(term, pa.chunked_array([columns[term.column_id]])) for term in definition.terms]
            file = self.table.make_file(number, 0)
            entries.append((ListedFile(file.path, file.size, file.record_count), build_part(definition, keys)))
        self.written_count += 1
        path = self.table.folder / "_seamark" / "index" / f"{self.written_count:04d}.puffin"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(
            encode_index_file(
                self.metadata.table_uuid,
                definition,
                [file for file, _ in entries],
                [part for _, part in entries],
            )
        )
        path.write_bytes(data)
        registered_index_file = RegisteredIndexFile(
            uuid=self.metadata.table_uuid,
            location=path.as_uri(),
            definition=definition.id,
            kind=definition.kind,
            level=0,
            files=len(entries),
            rows=10 * len(entries),  # Each data file has 10 rows.
            size_bytes=len(data),
            snapshot_id=None,
            created_ms=self.written_count,
        )
        await self.registry.replace(self.metadata.table_uuid, definition.id, add=[registered_index_file], remove=remove)
        return path
