"""Which rows of which data files have the keys of a batch: by the record index, or by reading the keys' columns.

The rule it keeps: no live row with one of the keys is missed. A record index tells the rows of the files it covers; the
files that it does not cover, and those of which it does not know whether a row is deleted, are read. Without one the
files are read that the server's plan leaves for the keys: by bucket and other partitions of every spec, by statistics,
bloom filters and bitmaps. What no index says anything about is read.

Keys are equal as to SQL's readers: -0.0 is 0.0; and NaN is NaN. No key has a null. They are compared by hashes of 128
bits (`seamark.metaserver.index.keys.hashing`). Record indexes keep the two zeros apart, so they are asked for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.casting import Unwritable, arrow_schema
from seamark.connector.arrow.filters import plain_values
from seamark.connector.arrow.partitions import transformed
from seamark.connector.client.client import At, SeamarkClient
from seamark.connector.client.errors import Refused, ServerFailed, Unavailable
from seamark.connector.read.scans import TaskReader, wanted_of
from seamark.connector.read.tables import OpenTable, ScanTask, plan
from seamark.metaserver.iceberg.expressions.expression import Bound, Expression, Op, all_of, any_of
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.types.schema import Field, Schema
from seamark.metaserver.iceberg.types.transforms import IDENTITY, canonical, name_of, width_of
from seamark.metaserver.iceberg.types.values import FLOATS, Value
from seamark.metaserver.index.files.definitions import IndexDefinition, read_definitions
from seamark.metaserver.index.keys.arrow_keys import keys_of
from seamark.metaserver.index.keys.delete_files import merge_zeros
from seamark.metaserver.index.keys.hashing import Hashes, hash_halves
from seamark.metaserver.index.kinds.kinds import KINDS

Longs = npt.NDArray[np.int64]

LOOKUP, SCAN = "lookup", "scan"
WAYS = (LOOKUP, SCAN)
VALUES_MAX = 10_000
"""Keys that plans of files to be read are asked for one by one: it takes the server about 15 ms a thousand, and bounds,
bitmaps, and bloom filters that are fine enough leave files out by them. Of more they are asked for ranges."""
FEW_VALUES_MAX = 500
"""Where no file is read for it, as an index says where rows are; and of what each row group is held against."""
_VALUES_BYTES_MAX = 4 << 20
RANGES_MAX = 32
_CODE_BYTES = 8
_LOOKUP_KEYS = 1_000_000


class BatchKeys:
    """The distinct keys of a batch, none of them null; key k is row k of each column."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[pa.Array]) -> None:
        self.fields = tuple(fields)
        self.columns = [_storage(column) for column in columns]
        self.count = len(self.columns[0])
        high, low = self._hashes(self.columns)
        self._order = np.lexsort((low, high))
        self._high, self._low = high[self._order], low[self._order]
        _, runs = np.unique(self._high, return_counts=True)
        self._run = int(runs.max(initial=1))

    def _hashes(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> tuple[Hashes, Hashes]:
        return hashes_of(self.fields, columns)

    def match(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> Longs:
        """int64[rows]: the number of the key that each row has, -1 for none; columns are those of `fields`."""
        high, low = self._hashes(columns)
        found = np.full(len(high), -1, dtype=np.int64)
        if self.count:
            start = np.searchsorted(self._high, high)
            for step in range(self._run):  # more than one only where halves of hashes are equal
                at = np.minimum(start + step, self.count - 1)
                same = (self._high[at] == high) & (self._low[at] == low)
                found[same] = self._order[at[same]]
        return found

    def holding(self, values_max: int, specs: Sequence[PartitionSpec] = (), ranges_max: int = RANGES_MAX) -> Expression:
        """A filter that every row with one of the keys matches, and maybe others: values one by one where all columns
        together have no more, else some ranges and, where one of the specs has them in buckets, which these are."""
        parts: list[Expression] = []
        most = values_max // len(self.fields)
        for field, extent in zip(self.fields, self._extents, strict=True):
            values, kind = extent.values, str(field.type)
            if values is not None and len(values) <= most:
                parts.append(_bound(field, Op.EQ if len(values) == 1 else Op.IN, values))
                continue
            if extent.ranges:
                lows, highs = zip(*extent.ranges, strict=True)
                parts.append(any_of(*(_within(field, *ends) for ends in _ranges(lows, highs, ranges_max))))
            parts.extend(_in_buckets(specs, field, kind, extent.distinct))
        return all_of(*parts)

    @cached_property
    def _extents(self) -> list[_Extent]:
        return [_Extent.of(str(field.type), column) for field, column in zip(self.fields, self.columns, strict=True)]


@dataclass(frozen=True)
class _Extent:
    """Where the values of a column lie, which is asked for several times."""

    distinct: pa.Array
    values: list[Any] | None
    """Ascending; None where they are many, or in no order, or there is none."""
    ranges: list[tuple[Any, Any]]
    """Both ends of each of some ranges that hold all of them; none where they are in no order."""

    @staticmethod
    def of(kind: str, column: pa.Array) -> _Extent:
        distinct = pc.unique(column)
        values = _ordered(kind, plain_values(distinct, kind))
        if values is None:
            return _Extent(distinct, None, [])
        ranges = _ranges(values, values, RANGES_MAX)
        return _Extent(distinct, values if len(values) <= VALUES_MAX else None, ranges)


def hashes_of(fields: Sequence[Field], columns: Sequence[pa.Array | pa.ChunkedArray]) -> tuple[Hashes, Hashes]:
    """(high, low) of each row's key, uint64[rows] each; both zeros are one."""
    keys = [keys_of(column, str(field.type)) for field, column in zip(fields, columns, strict=True)]
    return hash_halves(merge_zeros(keys) or keys)


def with_both_zeros(fields: Sequence[Field], columns: Sequence[pa.Array]) -> tuple[list[pa.Array], Longs]:
    """The columns of keys, with those that hold a zero by each sign that it may have, and int64[rows]: the number of
    the key that each row is."""
    found, numbers = list(columns), np.arange(len(columns[0]), dtype=np.int64)
    for place, field in enumerate(fields):
        if str(field.type) not in FLOATS:
            continue
        column = found[place]
        rows = np.flatnonzero(pc.equal(column, pa.scalar(0.0, column.type)).to_numpy(zero_copy_only=False))
        if not len(rows):
            continue
        more = [one.take(pa.array(rows)) for one in found]
        more[place] = pc.negate(more[place])
        found = [pa.concat_arrays([one, other]) for one, other in zip(found, more, strict=True)]
        numbers = np.concatenate([numbers, numbers[rows]])
    return found, numbers


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _bound(field: Field, op: Op, values: Iterable[Value]) -> Bound:
    kind = str(field.type)
    return Bound(op, field.id, field.name, kind, IDENTITY, kind, tuple(values))


def _within(field: Field, low: Value, high: Value) -> Expression:
    if low == high:
        return _bound(field, Op.EQ, (low,))
    return all_of(_bound(field, Op.GT_EQ, (low,)), _bound(field, Op.LT_EQ, (high,)))


def _ordered(kind: str, values: Iterable[Value | None]) -> list[Any] | None:
    """Distinct and ascending; None where there is none, or one of them is in no order, or no literal."""
    found: list[Any] = list(dict.fromkeys(one for one in values if one is not None))
    if not found or (kind in FLOATS and not all(map(math.isfinite, found))):
        return None
    return sorted(found)


def _ranges(lows: Sequence[Any], highs: Sequence[Any], most: int) -> list[tuple[Any, Any]]:
    """Ascending ranges, joined into a few that lie between the widest gaps. About the widest: numbers are rounded."""
    start = _common(lows[0], highs[-1])
    below = _numbers(lows, start)
    above = below if highs is lows else _numbers(highs, start)
    gaps = below[1:] - above[:-1]
    cuts = np.sort(np.argsort(-gaps, kind="stable")[: most - 1] + 1).tolist()
    return [(lows[first], highs[end - 1]) for first, end in pairwise([0, *cuts, len(lows)])]


def _common(low: Any, high: Any) -> int:
    """How many bytes text or bytes begin with alike."""
    if not isinstance(low, str | bytes):
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(_encoded(low), _encoded(high), strict=False)))


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _numbers(values: Sequence[Any], start: int) -> npt.NDArray[np.float64]:
    """How far apart values are: of text and bytes what comes first from `start` on."""
    if not isinstance(values[0], str | bytes):
        return np.asarray(values, dtype=np.float64)
    end = start + _CODE_BYTES
    codes = [one[start:end] for one in (map(str.encode, values) if isinstance(values[0], str) else values)]
    return np.array(codes, dtype=f"S{_CODE_BYTES}").view(f">u{_CODE_BYTES}").astype(np.float64)


def _in_buckets(specs: Iterable[PartitionSpec], field: Field, kind: str, column: pa.Array) -> Iterator[Expression]:
    """Of each way in which a spec has the column in buckets, where not all of them are needed."""
    ways = {canonical(one.transform) for spec in specs for one in spec.fields if one.sources == (field.id,)}
    for transform in sorted(way for way in ways if name_of(way) == "bucket"):
        buckets = sorted(transformed(transform, kind, column).values)
        if len(buckets) < width_of(transform):
            op = Op.EQ if len(buckets) == 1 else Op.IN
            yield Bound(op, field.id, field.name, kind, transform, "int", tuple(buckets))


def key_names(schema: Schema, given: Sequence[str] | None, rows: Sequence[str]) -> list[str]:
    """By which columns rows go that `rows` has the keys of: as given, else the table's identifier fields, else its only
    one. Unwritable where there is no telling, or one of them is not there."""
    if given is not None:
        names = list(given)
    elif schema.identifier_field_ids:
        ids = {one.id: one.name for one in schema.fields}
        names = [ids[one] for one in schema.identifier_field_ids if one in ids]
        if len(names) < len(schema.identifier_field_ids):
            raise Unwritable("identifier fields of the table lie in structs; say which columns are the key: key=[…]")
    elif len(rows) == 1:
        names = list(rows)
    else:
        raise Unwritable(
            f"the rows have the columns {', '.join(rows)[:500]}, and the table has no identifier fields; say which of "
            "them are the key: key=[…]"
        )
    for name in names:
        if (times := list(rows).count(name)) != 1:
            told = "no column" if not times else f"{times} columns"
            raise Unwritable(f"the rows have {told} {name}, which is of the key; they have {', '.join(rows)[:500]}")
    return names


def key_fields(schema: Schema, names: Sequence[str]) -> list[Field]:
    """Unwritable for columns that make no key."""
    by_name = {one.name: one for one in schema.fields}
    if not names or len(set(names)) < len(names):
        raise Unwritable("a key has at least one column, and each once")
    for name in names:
        if name not in by_name:
            raise Unwritable(f"the table has no column {name}, which is to be of the key; it has {', '.join(by_name)}")
        if not isinstance(by_name[name].type, str):
            raise Unwritable(f"column {name} is of no primitive type; it makes no key")
    fields = [by_name[name] for name in names]
    arrow_schema(Schema(tuple(fields), schema.id))
    return fields


@dataclass(frozen=True)
class FoundRows:
    """Live rows of one data file: int64[rows] each, `positions` ascending. `keys` are the numbers of theirs."""

    task: ScanTask
    positions: Longs
    keys: Longs

    @property
    def is_whole(self) -> bool:
        """Whether they are all rows of the file."""
        return len(self.positions) == self.task.records

    def of(self, chosen: npt.NDArray[np.bool_]) -> FoundRows:
        """Those of its rows whose keys are chosen, bool[keys]."""
        kept = chosen[self.keys]
        return FoundRows(self.task, self.positions[kept], self.keys[kept])


@dataclass(frozen=True)
class LocatedKeys:
    """Files with at least one row of a key; and the paths of those that had to be read."""

    files: tuple[FoundRows, ...]
    read: frozenset[str]


def locate(client: SeamarkClient, table: OpenTable, keys: BatchKeys, way: str | None = None) -> LocatedKeys:
    """Every live row of the table's snapshot that has one of the keys.

    `way` is by default `lookup` where there is a record index on the keys, else `scan`. Unreadable names a file.
    """
    if table.snapshot_id is None or not keys.count:
        return LocatedKeys((), frozenset())
    index = record_index(table.metadata, keys.fields)
    if way == LOOKUP and index is None:
        named = ", ".join(one.name for one in keys.fields)
        raise Unwritable(f"no record index is on the key {named}; create one, or locate rows by {SCAN}")
    few = (index is not None and way != SCAN) or sum(one.nbytes for one in keys.columns) > _VALUES_BYTES_MAX
    most = FEW_VALUES_MAX if few else VALUES_MAX
    tasks = {one.path: one for one in plan(client, table, keys.holding(most, table.metadata.partition_specs))}
    known = None if index is None or way == SCAN else _looked_up(client, table, keys, index)
    found = []
    if known is not None:
        if lost := known.rows.keys() - tasks.keys() - known.unsure:
            raise ServerFailed(
                f"{min(lost)} has rows of the keys by the index {known.index}, and is in no plan for them"
            )
        found = [FoundRows(tasks[path], *rows) for path, rows in known.rows.items() if path not in known.unsure]
    to_read = [task for path, task in tasks.items() if known is None or path in known.unsure]
    for task, positions, numbers in _scanned(table, keys, to_read):
        found.append(FoundRows(task, positions, numbers))
    return LocatedKeys(tuple(found), frozenset(task.path for task in to_read))


def record_index(metadata: TableMetadata, fields: Sequence[Field]) -> IndexDefinition | None:
    """The enabled one on exactly these columns, in any order."""
    wanted = sorted((one.id, IDENTITY) for one in fields)
    for one in read_definitions(metadata).enabled:
        if KINDS[one.kind].answers_keys and sorted((term.column_id, term.transform) for term in one.terms) == wanted:
            return one
    return None


@dataclass(frozen=True)
class _Known:
    """What an index says: rows by file, (positions, keys) each; and the files of which it does not say all."""

    index: str
    rows: dict[str, tuple[Longs, Longs]]
    unsure: frozenset[str]


def _looked_up(client: SeamarkClient, table: OpenTable, keys: BatchKeys, index: IndexDefinition) -> _Known | None:
    """None where the index tells too little, or the server cannot ask it: every planned file is to be read then."""
    parts: list[pa.Table] = []
    unsure: set[str] = set()
    by_id = {one.id: number for number, one in enumerate(keys.fields)}
    asked, numbered = with_both_zeros(keys.fields, keys.columns)
    for start in range(0, len(numbered), _LOOKUP_KEYS):
        columns = {term.text: asked[by_id[term.column_id]].slice(start, _LOOKUP_KEYS) for term in index.terms}
        try:
            answer = client.lookup(
                table.name, pa.table(columns), index=index.name, at=At(snapshot_id=table.snapshot_id)
            )
        except (Refused, ServerFailed, Unavailable):
            return None
        if answer.uncovered_files > len(answer.uncovered):
            return None
        unsure.update(answer.uncovered)
        rows = answer.rows
        if answer.undecided:
            unsure.update(rows.filter(rows["undecided"])["file_path"].to_pylist())
        parts.append(rows.select(["key", "file_path", "position"]).set_column(0, "key", pc.add(rows["key"], start)))
    # Each path is there once in a dictionary: written out they may be more than an array of strings holds.
    rows = pa.concat_tables(parts).unify_dictionaries()
    coded = rows["file_path"].combine_chunks()
    positions, numbers = rows["position"].to_numpy(), numbered[rows["key"].to_numpy()]
    return _Known(index.name, dict(_by_file(coded, positions, numbers)), frozenset(unsure))


def _by_file(files: pa.DictionaryArray, positions: Longs, numbers: Longs) -> Iterator[tuple[str, tuple[Longs, Longs]]]:
    codes = files.indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((positions, codes))
    ends = np.searchsorted(codes[order], np.arange(len(files.dictionary) + 1))
    for code, path in enumerate(files.dictionary.to_pylist()):
        mine = order[ends[code] : ends[code + 1]]
        if len(mine):
            yield path, (positions[mine], numbers[mine])


def _scanned(table: OpenTable, keys: BatchKeys, tasks: Iterable[ScanTask]) -> Iterator[tuple[ScanTask, Longs, Longs]]:
    """The rows of files that have one of the keys, by reading the keys' columns."""
    names = [one.name for one in keys.fields]
    # Rows are matched by hash; the filter is for row groups that statistics rule out, and each row is held against it.
    where = keys.holding(FEW_VALUES_MAX, ranges_max=1)
    reader = TaskReader(wanted_of(table, names, where, positions=True), table.storage)
    for task in tasks:
        positions, numbers = [], []
        for batch in reader.read(task):
            number = keys.match([batch.column(place) for place in range(len(names))])
            hit = np.flatnonzero(number >= 0)
            if len(hit):
                numbers.append(number[hit])
                positions.append(batch.column(len(names)).to_numpy()[hit])
        if positions:
            yield task, np.concatenate(positions), np.concatenate(numbers)
