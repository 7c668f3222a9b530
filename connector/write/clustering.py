"""Where rows belong in a clustering: by attributes of their own, and by those that their keys lead to.

A value's place is its rank among the rows, by a sample of them: half as many rows below as rows not above. So a
skewed attribute is cut where its rows are, text goes by its order, and equal values have equal places. The tuple of
places is a point, and its key on a space-filling curve (`curves.py`) is what rows are ordered by.

    attributes = Attributes(by=["ordered", "customer.city"], joins={"customer": Reached(customers, {"customer": "id"})})
    clustering = Clustering.of(attributes, sample, curve="hilbert")
    keys = clustering.keys(rows)

All of it is Arrow and numpy, a batch at a time, and picklable: tasks have the dimensions' ranks, not their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.client.errors import BadRequest
from seamark.connector.write.curves import Points, curve_keys

BITS = 16
"""Of each attribute's place: more ranges than tables have files."""

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reached:
    """Rows of another table, and by which columns ours lead to them: column of ours → column of it. A column of ours
    may be one of a table reached before, as `customer.nation_key`; then all of them are. Where several rows
    have a key, the first is reached."""

    rows: pa.Table
    on: Mapping[str, str]


class KeyLookup:
    """Finds rows by their keys. Picklable."""

    def __init__(self, keys: Sequence[pa.Array]) -> None:
        self._kinds = [_key_type(one.type) for one in keys]
        self._sets = [pc.unique(one.cast(kind)) for one, kind in zip(keys, self._kinds, strict=True)]
        self._keys = pa.array(self._combined(keys))

    def rows(self, columns: Sequence[pa.Array]) -> Longs:
        """int64[rows]: the first row that has the key; -1 where none has it, or it has a null."""
        combined = self._combined(columns)
        found = pc.fill_null(pc.index_in(pa.array(combined), value_set=self._keys), -1).to_numpy(zero_copy_only=False)
        return np.where(combined < 0, -1, found).astype(np.int64)

    def _combined(self, columns: Sequence[pa.Array]) -> Longs:
        """A number for each tuple that may be known."""
        total = np.zeros(len(columns[0]), dtype=np.int64)
        for column, kind, values in zip(columns, self._kinds, self._sets, strict=True):
            at = pc.fill_null(pc.index_in(column.cast(kind), value_set=values, skip_nulls=True), -1)
            codes = at.to_numpy(zero_copy_only=False).astype(np.int64)
            total = np.where((total < 0) | (codes < 0), -1, total * len(values) + codes)
        return total


def _key_type(kind: pa.DataType) -> pa.DataType:
    """What keys are compared as: whole numbers of any width are equal."""
    return pa.int64() if pa.types.is_integer(kind) else kind


class Attributes:
    """What rows are clustered by: names of columns, or `name.column` of what is reached by a name of `joins`.

    BadRequest for what there is not, and for keys of types that cannot be equal.
    """

    def __init__(self, by: Sequence[str], joins: Mapping[str, Reached], schema: pa.Schema) -> None:
        """`schema` is of the rows that are clustered."""
        if not by:
            raise BadRequest("Say by which attributes rows are to be clustered")
        self._tables = {name: one.rows.combine_chunks() for name, one in joins.items()}
        self._ways: dict[str, tuple[tuple[str, ...], KeyLookup]] = {}
        """How rows of ours lead to one of a table: the columns, and the lookup."""
        self._homes: dict[str, str] = {}
        """The table that a table's columns were brought into, where not ours lead to it."""
        for name, one in joins.items():
            self._reach(name, one, schema)
        self.by = tuple(self._found(one, schema) for one in by)

    @property
    def columns(self) -> list[str]:
        """Of the rows that are clustered, those that it takes."""
        own = [column for name, column in self.by if name == ""]
        used = {name for name, _ in self.by}
        return list(dict.fromkeys([*own, *(one for name in used - {""} for one in self._ways[name][0])]))

    def rows(self, name: str, batch: pa.RecordBatch | pa.Table) -> Longs:
        """Which row of the table of this name each row of the batch leads to; -1 for none."""
        columns, lookup = self._ways[name]
        return lookup.rows([_whole(batch[one]) for one in columns])

    def table_values(self, name: str, column: str) -> pa.Array:
        return _whole(self._tables[name][column])

    def _reach(self, name: str, one: Reached, schema: pa.Schema) -> None:
        table = self._tables[name]
        if not one.on:
            raise BadRequest(f"Say by which columns {name!r} is reached")
        for column in one.on.values():
            _check_column(column, table.schema, f"{name}.{column}")
        lookup = KeyLookup([_whole(table[column]) for column in one.on.values()])
        places = [self._place(each, schema) for each in one.on]
        homes = {home for home, _ in places}
        if len(homes) > 1:
            raise BadRequest(f"{name!r} is reached from one table, not from several: {', '.join(one.on)}")
        home, columns = homes.pop(), tuple(column for _, column in places)
        kinds = schema if not home else self._tables[home].schema
        for column, other in zip(columns, one.on.values(), strict=True):
            ours, theirs = _key_type(kinds.field(column).type), _key_type(table.schema.field(other).type)
            if ours != theirs:
                raise BadRequest(f"{column} is {ours} and {name}.{other} is {theirs}, which are never equal")
        if not home:
            self._ways[name] = columns, lookup
            return
        self._homes[name] = home
        at = lookup.rows([_whole(self._tables[home][column]) for column in columns])
        taken = table.take(pa.array(at, mask=at < 0))
        for column in table.column_names:
            self._tables[home] = self._tables[home].append_column(f"{name}.{column}", taken[column])

    def _found(self, text: str, schema: pa.Schema) -> tuple[str, str]:
        name, column = self._place(text, schema)
        kind = (schema if not name else self._tables[name].schema).field(column).type
        if pa.types.is_nested(kind):
            raise BadRequest(f"Rows cannot be clustered by {text!r}, which is {kind}")
        return name, column

    def _place(self, text: str, schema: pa.Schema) -> tuple[str, str]:
        """The name of a table that ours leads to, empty for ours, and the column of it."""
        name, dot, column = text.partition(".")
        if text in schema.names or not dot or name not in self._tables:
            _check_column(text, schema, text)
            return "", text
        _check_column(column, self._tables[name].schema, text)
        while name in self._homes:
            name, column = self._homes[name], f"{name}.{column}"
        return name, column


def _check_column(column: str, schema: pa.Schema, told: str) -> None:
    if schema.names.count(column) != 1:
        raise BadRequest(f"There is no column {told!r}: there are {', '.join(schema.names)[:500]}")


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


@dataclass(frozen=True)
class Ranks:
    """Of one attribute's values, by a sample of rows: `values` ascending, and before each, and at the end, how many
    rows come; nulls before all."""

    values: npt.NDArray[np.generic] | npt.NDArray[np.object_]
    before: Longs

    @staticmethod
    def of(sample: pa.Array) -> Ranks:
        there = sample.drop_null()
        values, counts = np.unique(_comparable(there), return_counts=True)
        return Ranks(values, np.concatenate([[0], np.cumsum(counts)]) + sample.null_count)

    def places(self, column: pa.Array) -> npt.NDArray[np.uint64]:
        """uint64[rows], below 2**BITS."""
        encoded = column.dictionary_encode()
        distinct = _comparable(encoded.dictionary)
        low = np.searchsorted(self.values, distinct, "left")
        high = np.searchsorted(self.values, distinct, "right")
        nulls = int(self.before[0])
        middles = np.append(self.before[low] + self.before[high], nulls)
        ranks = (middles << BITS) // max(1, 2 * int(self.before[-1]))
        codes = pc.fill_null(encoded.indices, len(distinct)).to_numpy(zero_copy_only=False)
        found: npt.NDArray[np.uint64] = np.minimum(ranks, (1 << BITS) - 1)[codes].astype(np.uint64)
        return found


def _comparable(values: pa.Array) -> npt.NDArray[np.generic]:
    """Without nulls, as numpy orders what it is an array of; NaN is above all."""
    kind = values.type
    if pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif pa.types.is_fixed_size_binary(kind) or isinstance(kind, pa.BaseExtensionType):
        return np.array([str(one) if not isinstance(one, bytes) else one for one in values.to_pylist()], dtype=object)
    if pa.types.is_integer(values.type) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        found: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False)
        return found
    made = np.empty(len(values), dtype=object)
    made[:] = values.to_pylist()
    return made


@dataclass(frozen=True)
class Clustering:
    """Keys of rows. Picklable."""

    curve: str
    attributes: Attributes
    own: Mapping[int, Ranks] = field(default_factory=dict)
    """By the attribute's number; of the others the places of a table's rows, and of none, stand here."""
    reached: Mapping[int, npt.NDArray[np.uint64]] = field(default_factory=dict)

    @staticmethod
    def of(attributes: Attributes, sample: pa.Table, curve: str) -> Clustering:
        """By a sample of the rows that are clustered, of which it takes `attributes.columns`."""
        own: dict[int, Ranks] = {}
        reached: dict[int, npt.NDArray[np.uint64]] = {}
        for number, (name, column) in enumerate(attributes.by):
            if not name:
                own[number] = Ranks.of(_whole(sample[column]))
                continue
            values = attributes.table_values(name, column)
            at = attributes.rows(name, sample)
            ranks = Ranks.of(values.take(pa.array(at, mask=at < 0)))
            nothing = pa.nulls(1, values.type)
            reached[number] = ranks.places(pa.concat_arrays([values, nothing]))  # where -1 leads, too
        return Clustering(curve, attributes, own, reached)

    def keys(self, rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.uint8]:
        """uint8[rows, bytes]."""
        at: dict[str, Longs] = {}
        points: Points = np.empty((rows.num_rows, len(self.attributes.by)), dtype=np.uint64)
        for number, (name, column) in enumerate(self.attributes.by):
            if not name:
                points[:, number] = self.own[number].places(_whole(rows[column]))
                continue
            if name not in at:
                at[name] = self.attributes.rows(name, rows)
            points[:, number] = self.reached[number][at[name]]
        return curve_keys(points, BITS, self.curve)


def ordered(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bytes_]:
    """bytes[rows], as numpy sorts and searches them."""
    found: npt.NDArray[np.bytes_] = np.ascontiguousarray(keys).view(f"S{keys.shape[1]}").reshape(len(keys))
    return found


def cuts(keys: npt.NDArray[np.bytes_], parts: int) -> npt.NDArray[np.bytes_]:
    """bytes[parts - 1]: where keys are cut into as many parts of about equal numbers. A key may be several times."""
    held = np.sort(keys)
    at = [len(held) * number // parts for number in range(1, parts)]
    return held[at] if len(held) else held
