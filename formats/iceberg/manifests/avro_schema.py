"""Compile a writer's Avro schema to a program that reads the requested fields and skips the others.

Iceberg identifies fields by id (spec: Appendix A, "Avro"): the fields of a record have a `field-id`, and any name.
Without ids, the standard name is used. The request is a tree of the classes below. A field that the writer's schema
does not have, or whose Avro type is null, gets no column. A field of an invalid type is Corrupt, because guessing could
give a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from seamark.formats.iceberg.manifests._manifest import OPS, Program
from seamark.formats.runtime.errors import Corrupt
from seamark.formats.runtime.repetitions import find_repeated

_SHOWN_MAX = 100
"""The maximum number of characters of a part of the schema in a message."""
_FIXED_BYTES_MAX = (1 << 31) - 1
_DEPTH_MAX = 64
_NODES_MAX = 20_000

_MINIMUM_SIZES = {"boolean": 1, "int": 1, "long": 1, "float": 4, "double": 8, "bytes": 1, "string": 1, "enum": 1}
"""The minimum number of bytes of a value, by Avro type."""
_FIXED_SIZE_TYPES = ("boolean", "float", "double", "fixed")


@dataclass(frozen=True, slots=True)
class Long:
    """A number or boolean that is read into a column of int64."""

    name: str
    in_group: bool = False
    """Whether the field is part of an element of a list or map, not of the row."""


@dataclass(frozen=True, slots=True)
class RequestedValue:
    """A number or boolean that is read into a column of int64, in which each integer is a possible value.

    Null therefore needs a second column, which has the length of each value: 1, or -1 for null.
    """

    name: str
    in_group: bool = False
    """Whether the field is part of an element of a list or map, not of the row."""


@dataclass(frozen=True, slots=True)
class Double:
    """A float or double, whose bits as float64 are read into a column.

    A second column has the length of each value: 1, or -1 for null.
    """

    name: str
    in_group: bool = False
    """Whether the field is part of an element of a list or map, not of the row."""


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes or a string that are read into a column of spans, which are positions and lengths in the file's bytes."""

    name: str
    in_group: bool = False
    """Whether the field is part of an element of a list or map, not of the row."""


Leaf: TypeAlias = Long | RequestedValue | Double | Text


@dataclass(frozen=True, slots=True)
class ByColumn:
    """A map by column id, which Iceberg encodes as an array of records with a key and a value."""

    name: str
    key_id: int
    value_id: int
    value: Leaf


@dataclass(frozen=True, slots=True)
class Elements:
    """A list of numbers or of records. For numbers, there is one field, whose id is not used."""

    name: str
    fields: tuple[tuple[int, str, Leaf], ...]
    of_records: bool


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """A record that each manifest defines. All of its fields are read, with their types."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordReader:
    """A record of which some fields are read."""

    fields: Mapping[int, tuple[str, Wanted]]
    """The standard name and the reader of each field, by field id."""
    required: tuple[int, ...] = ()
    """The ids of the fields that the writer's schema must have."""
    status: str | None = None
    """The name of the status field. Rows with status DELETED are dropped."""


Wanted: TypeAlias = Leaf | ByColumn | Elements | PartitionRecord | RecordReader


@dataclass(frozen=True, slots=True)
class PartitionFieldColumn:
    """A field of the partition record, with its type and the column into which its values are read.

    Attributes:
        logical: The Avro logicalType, such as date, or None.
    """

    name: str
    field_id: int | None
    type: str
    """The Avro type: boolean, int, long, float, double, bytes, string or fixed; or null if the field never has a value.
    """
    logical: str | None
    column: int | None
    """The index of the column in `Program`, the compiled schema, or None for type null."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled schema: the program that reads rows with this schema, and the columns into which it reads them."""

    program: Program
    columns: dict[str, int]
    """The columns by name, for fields of the writer's schema: numbers, texts, and the element counts of lists."""
    groups: dict[str, int]
    """The groups by name, which are lists and maps."""
    partition: tuple[PartitionFieldColumn, ...]


def compile_schema(schema: str, reader: RecordReader) -> Compiled:
    """Return the program that reads some fields from rows with the writer's schema.

    Args:
        schema: The writer's schema, as JSON.
        reader: The requested fields.

    Raises:
        Corrupt: The schema is invalid, or its rows do not have the requested fields. The caller adds the file's
            location.
    """
    try:
        schema_json = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"the Avro schema is not JSON: {error}") from error
    compiler = _Compiler()
    root = compiler.add_value(schema_json, reader, _SchemaPosition("", "the row", 0))
    if compiler.nodes[root][0] != "record" or not compiler.minimum_sizes[root]:
        raise Corrupt("the Avro schema: rows are not records with fields")
    if reader.status is not None and reader.status not in compiler.columns:
        raise Corrupt(f"the Avro schema: {reader.status} is always null")
    program = Program(
        compiler.nodes,
        compiler.names,
        compiler.column_kinds,
        compiler.group_rows,
        compiler.columns[reader.status] if reader.status is not None else -1,
        compiler.minimum_sizes[root],
    )
    return Compiled(program, compiler.columns, compiler.groups, tuple(compiler.partition))


@dataclass(frozen=True, slots=True)
class _SchemaPosition:
    """A position in the writer's schema.

    Attributes:
        namespace: The namespace in which names of types are looked up.
        field: The name of the field, for errors.
        depth: The number of types that contain the position.
    """

    namespace: str
    field: str
    depth: int
    enclosing_types: tuple[str, ...] = ()
    """The named types that contain the position, to reject a type that contains itself."""

    def descend(self, field: str | None = None) -> _SchemaPosition:
        return _SchemaPosition(self.namespace, field or self.field, self.depth + 1, self.enclosing_types)


@dataclass(slots=True)
class _Compiler:
    """The compiler of a schema, which collects the nodes and columns of the program.

    Its methods raise Corrupt if the writer's schema is invalid or does not have the requested fields.
    """

    nodes: list[tuple[str, int, int, list[int]]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    minimum_sizes: list[int] = field(default_factory=list)
    """The minimum size in bytes of the value of each node. It is 0 only for values that never take bytes."""
    column_kinds: list[str] = field(default_factory=list)
    columns: dict[str, int] = field(default_factory=dict)
    group_rows: list[tuple[bool, int, int, int]] = field(default_factory=list)
    """The groups, as `Program` describes them."""
    groups: dict[str, int] = field(default_factory=dict)
    partition: list[PartitionFieldColumn] = field(default_factory=list)
    _named_types: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    def make_error(self, position: _SchemaPosition, problem: str) -> Corrupt:
        return Corrupt(f"the Avro schema, {position.field}: {problem}")

    def add_node(
        self,
        op: str,
        position: _SchemaPosition,
        minimum_size: int,
        *,
        slot: int = -1,
        size: int = 0,
        children: Any = (),
    ) -> int:
        """Add a node to the program, and return its index.

        Args:
            op: The operation, such as the name of an Avro type.
            position: The position in the writer's schema.
            minimum_size: The minimum number of bytes of a value.
            slot: The column or group to which the value is written, or -1 to skip the value.
            size: The size of a fixed type, or the minimum size of the items of a list or map.
            children: The indexes of the nodes of the parts of the value.
        """
        if len(self.nodes) >= _NODES_MAX:
            raise self.make_error(position, f"more than {_NODES_MAX} types")
        self.nodes.append((op, slot, size, list(children)))
        self.names.append(position.field)
        self.minimum_sizes.append(minimum_size)
        return len(self.nodes) - 1

    def add_column(self, name: str, kind: str, position: _SchemaPosition) -> int:
        """Return the column with a name. On first use, create it.

        The branches of a union share a column, so they must have the same kind of column.
        """
        column = self.columns.setdefault(name, len(self.column_kinds))
        if column == len(self.column_kinds):
            self.column_kinds.append(kind)
        elif self.column_kinds[column] != kind:
            raise self.make_error(position, "a union mixes incompatible types")
        return column

    def resolve(self, schema: Any, position: _SchemaPosition) -> tuple[str, Any, _SchemaPosition]:
        """Return the type of a schema, its JSON object and its position.

        A name is replaced by the type that it names. An object that only wraps another type is replaced by that type.
        An error record is read like a record.
        """
        while True:
            if position.depth > _DEPTH_MAX:
                raise self.make_error(position, f"nested deeper than {_DEPTH_MAX}")
            if isinstance(schema, list):
                return "union", schema, position
            if isinstance(schema, dict):
                kind = schema.get("type")
                if not isinstance(kind, str):
                    schema, position = kind, position.descend()
                    continue
                if kind in ("record", "enum", "fixed", "error"):
                    name, namespace = self._resolve_full_name(schema, position)
                    self._named_types[name] = (schema, namespace)
                    enclosing_types = (
                        (*position.enclosing_types, name) if kind in ("record", "error") else position.enclosing_types
                    )
                    if enclosing_types.count(name) > 1:
                        raise self.make_error(position, f"the type {name} contains itself")
                    kind = "record" if kind == "error" else kind
                    return kind, schema, _SchemaPosition(namespace, position.field, position.depth, enclosing_types)
                if kind in OPS and kind not in ("union", "counts", "bounds"):
                    return kind, schema, position
                schema = kind
            if not isinstance(schema, str):
                raise self.make_error(position, f"not a type: {str(schema)[:_SHOWN_MAX]}")
            if schema == "null" or (schema in _MINIMUM_SIZES and schema != "enum"):
                return schema, {}, position
            full_name = schema if "." in schema or not position.namespace else f"{position.namespace}.{schema}"
            named_type = self._named_types.get(full_name) or self._named_types.get(schema)
            if named_type is None:
                raise self.make_error(position, f"unknown type {schema[:_SHOWN_MAX]!r}")
            schema, namespace = named_type
            position = _SchemaPosition(namespace, position.field, position.depth + 1, position.enclosing_types)

    def _resolve_full_name(self, schema: dict[str, Any], position: _SchemaPosition) -> tuple[str, str]:
        name, namespace = schema.get("name"), schema.get("namespace", position.namespace)
        if not isinstance(name, str) or not isinstance(namespace, str):
            raise self.make_error(position, "a record, enum or fixed type needs a name")
        if "." in name:
            return name, name.rpartition(".")[0]
        return (f"{namespace}.{name}" if namespace else name), namespace

    def add_value(self, schema: Any, reader: Wanted | None, position: _SchemaPosition) -> int:
        """Add the nodes of a value and of its children, and return the index of the value's node.

        Args:
            schema: The writer's schema of the value.
            reader: The requested form of the value, or None if the program skips the value.
            position: The position in the writer's schema.
        """
        kind, schema, position = self.resolve(schema, position)
        if kind == "union":
            return self.add_union(schema, reader, position)
        if kind == "null":
            return self.add_node("null", position, minimum_size=0)
        if isinstance(reader, Leaf):
            return self.add_leaf(kind, schema, reader, position)
        if isinstance(reader, ByColumn | Elements):
            if kind != "array":
                raise self.make_error(position, f"a list is expected, not {kind}")
            return self.add_group(schema, reader, position)
        if isinstance(reader, RecordReader | PartitionRecord) and kind != "record":
            raise self.make_error(position, f"a record is expected, not {kind}")
        if kind == "record":
            return self.add_record(schema, reader, position)
        if kind in ("array", "map"):
            item = self.add_value(schema.get("items" if kind == "array" else "values"), None, position.descend())
            if kind == "map":  # The length of the key precedes the value.
                return self.add_node(kind, position, minimum_size=1, size=1 + self.minimum_sizes[item], children=[item])
            return self.add_node(
                kind,
                position,
                minimum_size=1,
                size=self.minimum_sizes[item],
                children=[item] if self.minimum_sizes[item] else [],  # Items without bytes need not be skipped.
            )
        size = self.find_size(kind, schema, position)
        return self.add_node(kind, position, minimum_size=size if kind in _FIXED_SIZE_TYPES else 1, size=size)

    def find_size(self, kind: str, schema: Any, position: _SchemaPosition) -> int:
        """Return the number of bytes of a fixed-width type, or of symbols of an enum, or 0 for other types."""
        if kind == "fixed":
            size = schema.get("size")
            if not isinstance(size, int) or not 0 <= size <= _FIXED_BYTES_MAX:
                raise self.make_error(position, f"{str(size)[:_SHOWN_MAX]} is not a valid size of a fixed type")
            return size
        if kind == "enum":
            symbols = schema.get("symbols")
            if not isinstance(symbols, list):
                raise self.make_error(position, "an enum has no symbols")
            return len(symbols)
        return _MINIMUM_SIZES[kind] if kind in _FIXED_SIZE_TYPES else 0

    def add_leaf(self, kind: str, schema: Any, leaf: Leaf, position: _SchemaPosition) -> int:
        """Add the node of a value that is written to a column, and return the index of the node.

        Args:
            kind: The Avro type of the value.
            schema: The JSON object of the type.
            leaf: The requested column. Its class determines the accepted Avro types.
            position: The position in the writer's schema.
        """
        accepted_kinds = _ACCEPTED_TYPES[type(leaf)]
        if kind not in accepted_kinds:
            raise self.make_error(position, f"{' or '.join(accepted_kinds)} is expected, not {kind}")
        size = self.find_size(kind, schema, position)
        if kind == "fixed" and size == 0:
            raise self.make_error(position, "a fixed type has size 0")
        column = self.add_column(leaf.name, _find_column_kind(leaf), position)
        return self.add_node(kind, position, size if kind in _FIXED_SIZE_TYPES else 1, slot=column, size=size)

    def add_union(self, branches: list[Any], reader: Wanted | None, position: _SchemaPosition) -> int:
        """Add the nodes of a union and its branches, and return the index of the union's node.

        All branches write to the same columns. The branch null is added last, because it also writes to the columns
        that the other branches create.
        """
        kinds = [self.resolve(branch, position.descend())[0] for branch in branches]
        nulls = kinds.count("null")
        if not kinds or "union" in kinds or nulls > 1:
            raise self.make_error(
                position, "a union needs branches; at most one branch is null, and no branch is a union"
            )
        if len(kinds) - nulls > 1 and isinstance(reader, ByColumn | Elements | PartitionRecord | RecordReader):
            raise self.make_error(position, "a union has several lists or records")
        children = [
            -1 if kind == "null" else self.add_value(branch, reader, position.descend())
            for branch, kind in zip(branches, kinds, strict=True)
        ]
        if nulls:  # The other branch has created the columns. Null writes its value to them.
            children[kinds.index("null")] = self.add_node(
                "null", position, minimum_size=0, children=self.list_columns(reader)
            )
        return self.add_node("union", position, minimum_size=1, children=children)

    def list_columns(self, reader: Wanted | None) -> list[int]:
        """Return the columns that exist so far and that the requested field `reader` fills."""
        if isinstance(reader, RecordReader):
            return [column for _, inner in reader.fields.values() for column in self.list_columns(inner)]
        if isinstance(reader, PartitionRecord):
            return [column.column for column in self.partition if column.column is not None]
        if reader is None or reader.name not in self.columns:
            return []
        return [self.columns[reader.name]]

    def add_record(self, schema: Any, reader: RecordReader | PartitionRecord | None, position: _SchemaPosition) -> int:
        """Add the nodes of a record and its fields, and return the index of the record's node.

        A field whose values take no bytes is left out of the children of this node: there is nothing to read or skip.
        """
        fields = schema.get("fields")
        if not isinstance(fields, list) or not all(
            isinstance(record_field, dict) and isinstance(record_field.get("name"), str) and "type" in record_field
            for record_field in fields
        ):
            raise self.make_error(position, "a record needs fields, each with a name and a type")
        readers_by_index = self.match_fields(fields, reader, position) if isinstance(reader, RecordReader) else {}
        children = []
        for index, record_field in enumerate(fields):
            inner = position.descend(record_field["name"][:_SHOWN_MAX])
            if isinstance(reader, PartitionRecord):
                child = self.add_partition_field(record_field, inner)
            else:
                child = self.add_value(record_field["type"], readers_by_index.get(index), inner)
            if self.minimum_sizes[child]:
                children.append(child)
        return self.add_node(
            "record", position, sum(self.minimum_sizes[child] for child in children), children=children
        )

    def match_fields(
        self, fields: list[dict[str, Any]], reader: RecordReader, position: _SchemaPosition
    ) -> dict[int, Wanted]:
        """Return the readers of a record's fields, by the field's index in the record.

        A field is matched by its id, or by its name if it has no id.
        """
        ids_by_name = {name: field_id for field_id, (name, _) in reader.fields.items()}
        ids = [field["field-id"] if "field-id" in field else ids_by_name.get(field["name"]) for field in fields]
        readers_by_index: dict[int, Wanted] = {}
        matched_ids = (field_id for field_id in ids if isinstance(field_id, int) and field_id in reader.fields)
        if (repeated_id := find_repeated(matched_ids)) is not None:
            raise self.make_error(position, f"field {repeated_id} is present twice")
        for index, field_id in enumerate(ids):
            if not isinstance(field_id, int) or field_id not in reader.fields:
                continue
            _, readers_by_index[index] = reader.fields[field_id]
        for field_id in reader.required:
            if field_id not in ids:
                raise self.make_error(position, f"has no field {reader.fields[field_id][0]} ({field_id})")
        return readers_by_index

    def add_partition_field(self, field: dict[str, Any], position: _SchemaPosition) -> int:
        """Add the nodes of a partition field, and return the index of its node.

        The field is usually a union of null and a type. A field whose type is null in all rows gets no column.
        """
        kind, schema, schema_position = self.resolve(field["type"], position)
        branches = schema if kind == "union" else [field["type"]]
        branch_types = [self.resolve(branch, schema_position.descend())[:2] for branch in branches]
        non_null_types = [(kind, schema) for kind, schema in branch_types if kind != "null"]
        field_id = field.get("field-id")
        field_id = field_id if isinstance(field_id, int) else None
        if not non_null_types:
            self.partition.append(PartitionFieldColumn(field["name"], field_id, "null", None, None))
            return self.add_value(field["type"], None, position)
        kind, schema = non_null_types[0]
        leaf_class = next((leaf for leaf, kinds in _ACCEPTED_TYPES.items() if kind in kinds), None)
        if leaf_class is None:
            raise self.make_error(position, f"partition values cannot have type {kind}")
        leaf = leaf_class(f"partition {len(self.partition)}")
        node = self.add_value(field["type"], leaf, position)
        logical = schema.get("logicalType")
        self.partition.append(
            PartitionFieldColumn(
                field["name"],
                field_id,
                kind,
                logical if isinstance(logical, str) else None,
                self.columns[leaf.name],
            )
        )
        return node

    def add_group(self, schema: Any, reader: ByColumn | Elements, position: _SchemaPosition) -> int:
        """Add the operations that read a list, or a map by column id, and return the index of the first operation.

        The compiled program is a tree of operations (nodes). The elements are read into a group of columns, one for
        each field of an element. A list also has a column with the number of elements of each row. The values of a map
        are collected by column id, so it has no such column. A map with the usual layout needs only one operation.

        Args:
            schema: The writer's schema of the list or map.
            reader: The requested list or map.
            position: The position in the writer's schema.
        """
        by_column = isinstance(reader, ByColumn)
        if isinstance(reader, ByColumn):
            fields: tuple[tuple[int, str, Leaf], ...] = (
                (reader.key_id, "key", Long(f"{reader.name}.key", in_group=True)),
                (reader.value_id, "value", reader.value),
            )
        else:
            fields = reader.fields
        first_column = len(self.column_kinds)
        for _, _, leaf in fields:
            self.add_column(leaf.name, _find_column_kind(leaf), position)
        counts_column = -1 if by_column else self.add_column(reader.name, "count", position)
        slot = self.groups[reader.name] = len(self.group_rows)
        self.group_rows.append((by_column, first_column, len(fields), counts_column))
        items = schema.get("items")
        if isinstance(reader, ByColumn) and (op := self.match_plain_map(items, reader, position)) is not None:
            return self.add_node(op, position, 1, slot=slot)
        if isinstance(reader, Elements) and not reader.of_records:
            element: Wanted = fields[0][2]
        else:
            required = tuple(field_id for field_id, _, _ in fields) if by_column else ()
            element = RecordReader({field_id: (name, leaf) for field_id, name, leaf in fields}, required)
        item = self.add_value(items, element, position.descend())
        if not self.minimum_sizes[item]:
            raise self.make_error(position, "the values of a list are always null")
        return self.add_node("array", position, 1, slot=slot, size=self.minimum_sizes[item], children=[item])

    def match_plain_map(self, items: Any, reader: ByColumn, position: _SchemaPosition) -> str | None:
        """Return the operation that reads a map with the usual layout in one step, or None for other layouts.

        In the usual layout, each record has an int and then a long or bytes, without nulls or other fields.
        """
        kind, schema, inner = self.resolve(items, position.descend())
        fields = schema.get("fields") if kind == "record" else None
        if not isinstance(fields, list) or len(fields) != 2 or not all(isinstance(field, dict) for field in fields):
            return None
        if [field.get("field-id") for field in fields] != [reader.key_id, reader.value_id]:
            return None
        key_type, value_type = (self.resolve(field.get("type"), inner.descend())[0] for field in fields)
        return {("int", "long"): "counts", ("int", "bytes"): "bounds"}.get((key_type, value_type))


_ACCEPTED_TYPES: dict[type[Leaf], tuple[str, ...]] = {
    RequestedValue: ("boolean", "int", "long"),
    Long: ("boolean", "int", "long"),
    Double: ("float", "double"),
    Text: ("bytes", "string", "fixed"),
}


def _find_column_kind(leaf: Leaf) -> str:
    kind = "long" if isinstance(leaf, Long) else "text"
    return f"scratch {kind}" if leaf.in_group else kind
