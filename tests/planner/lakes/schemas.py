"""Random table schemas and their evolution, as trees of fields in the specification's JSON."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.planner.lakes.kinds import NANOSECOND_TYPES, Value, draw_kind, draw_pool, to_default_json, widen_kind

NAMES = ["id", "ts", "a", "b", "Amount", "naïve", "two words", "x-y", "größe", "1st", "null", "day", "k", "user", "v"]


@dataclass(frozen=True)
class Field:
    """A column, or a field of a struct.

    `kind` is the name of a primitive type, or the fields of a struct, or the JSON of a list or map.
    """

    id: int
    name: str
    required: bool
    kind: str | tuple[Field, ...] | dict[str, Any]
    default: Value | None = None

    def build_json(self) -> dict[str, Any]:
        kind: Any = self.kind
        if isinstance(kind, tuple):
            kind = {"type": "struct", "fields": [child.build_json() for child in kind]}
        field_json = {"id": self.id, "name": self.name, "required": self.required, "type": kind}
        if self.default is not None and isinstance(self.kind, str):
            written_default_json = to_default_json(self.kind, self.default)
            field_json |= {"initial-default": written_default_json, "write-default": written_default_json}
        return field_json


@dataclass(frozen=True)
class LakeColumn:
    """A field as predicates name it: by its full name, within the structs `parents`.

    The kind of a struct is "struct".
    """

    id: int
    name: str
    kind: str
    required: bool
    parents: tuple[int, ...]
    default: Value | None


@dataclass(frozen=True)
class Schema:
    id: int
    fields: tuple[Field, ...]

    def build_json(self) -> dict[str, Any]:
        return {"type": "struct", "schema-id": self.id, "fields": [field.build_json() for field in self.fields]}

    def list_columns(self) -> dict[int, LakeColumn]:
        """Return primitive columns and structs by id, without fields in lists and maps, which predicates cannot use."""
        return {column.id: column for column in _list_columns(self.fields, "", ())}

    def leaves(self) -> dict[int, LakeColumn]:
        return {column.id: column for column in self.list_columns().values() if column.kind != "struct"}


def _list_columns(fields: tuple[Field, ...], prefix: str, parents: tuple[int, ...]) -> Iterator[LakeColumn]:
    for field in fields:
        name = prefix + field.name
        if isinstance(field.kind, tuple):
            yield LakeColumn(field.id, name, "struct", field.required, parents, None)
            yield from _list_columns(field.kind, name + ".", (*parents, field.id))
        elif isinstance(field.kind, str):
            yield LakeColumn(field.id, name, field.kind, field.required, parents, field.default)


class SchemaMaker:
    """A source of random schemas of one table. It never reuses ids, but may reuse names of dropped columns."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.last_id = 0
        self._dropped_names: list[str] = []

    def draw_first_schema(self, version: int) -> Schema:
        fields = [self._draw_field(version, names=set(), depth=0) for _ in range(self._rng.randint(2, 6))]
        if all(not isinstance(field.kind, str) for field in fields):
            self.last_id += 1
            fields.append(Field(self.last_id, f"c{self.last_id}", False, "long"))
        return Schema(0, self._rename_uniquely(fields))

    def evolve(self, schema: Schema, schema_id: int, version: int, keep: set[int]) -> Schema:
        """Return the schema after one or two changes.

        Args:
            schema_id: The id of the returned schema.
            version: The format version of the table, which limits the types of new columns.
            keep: The ids of columns that must not be dropped, because partition fields use them.
        """
        fields = schema.fields
        for _ in range(self._rng.randint(1, 2)):
            change = self._rng.choice(
                [self._add, self._add, self._drop, self._rename, self._widen, self._make_optional]
            )
            fields = change(fields, version, keep)
        return Schema(schema_id, fields)

    def _draw_field(self, version: int, names: set[str], depth: int, *, added: bool = False) -> Field:
        rng = self._rng
        self.last_id += 1
        field_id = self.last_id
        free_names = [name for name in NAMES + self._dropped_names if name not in names]
        name = rng.choice(free_names) if free_names and rng.random() < 0.8 else f"c{field_id}"
        names.add(name)
        is_required = rng.random() < 0.3 and not added
        draw = rng.random()
        if draw < 0.2 and depth < 2:
            inner_names: set[str] = set()
            children = [
                self._draw_field(version, inner_names, depth + 1, added=added) for _ in range(rng.randint(1, 3))
            ]
            return Field(field_id, name, is_required, tuple(children))
        if draw < 0.25 and depth == 0:
            self.last_id += 1
            list_type = {"type": "list", "element-id": self.last_id, "element": "string", "element-required": False}
            return Field(field_id, name, False, list_type)
        kind = draw_kind(rng, version)
        if added and version >= 3 and kind not in NANOSECOND_TYPES and rng.random() < 0.5 and _has_simple_default(kind):
            return Field(field_id, name, rng.random() < 0.5, kind, rng.choice(draw_pool(rng, kind, 5)))
        return Field(field_id, name, is_required, kind)

    @staticmethod
    def _rename_uniquely(fields: list[Field]) -> tuple[Field, ...]:
        used_names: set[str] = set()
        renamed_fields = []
        for field in fields:
            name = field.name if field.name.lower() not in used_names else f"c{field.id}"
            used_names.add(name.lower())
            renamed_fields.append(replace(field, name=name))
        return tuple(renamed_fields)

    def _add(self, fields: tuple[Field, ...], version: int, _: set[int]) -> tuple[Field, ...]:
        structs = [field for field in fields if isinstance(field.kind, tuple)]
        if structs and self._rng.random() < 0.4:
            chosen_struct = self._rng.choice(structs)
            assert isinstance(chosen_struct.kind, tuple)
            grown_struct = self._grow_fields(chosen_struct.kind, version)
            return tuple(replace(field, kind=grown_struct) if field is chosen_struct else field for field in fields)
        return self._grow_fields(fields, version)

    def _grow_fields(self, fields: tuple[Field, ...], version: int) -> tuple[Field, ...]:
        new_field = self._draw_field(version, {field.name for field in fields}, depth=1, added=True)
        new_fields = list(fields)
        new_fields.insert(self._rng.randint(0, len(new_fields)), new_field)
        return self._rename_uniquely(new_fields)

    def _drop(self, fields: tuple[Field, ...], _: int, keep: set[int]) -> tuple[Field, ...]:
        """Drop a random field without columns of `keep`. At least one primitive field stays.

        The format version, which other changes need, has no effect.
        """
        free_fields = [
            field for field in fields if not keep & {column.id for column in _list_columns((field,), "", ())}
        ]
        primitive_fields = [field for field in fields if isinstance(field.kind, str)]
        if len(free_fields) == 0 or len(primitive_fields) < 2:
            return fields
        dropped_field = self._rng.choice(free_fields)
        self._dropped_names.append(dropped_field.name)
        return tuple(field for field in fields if field is not dropped_field)

    def _rename(self, fields: tuple[Field, ...], _: int, __: set[int]) -> tuple[Field, ...]:
        name = f"r{self._rng.randint(100, 999)}"
        return self._change_one(fields, lambda field: replace(field, name=name), lambda _: True)

    def _widen(self, fields: tuple[Field, ...], version: int, _: set[int]) -> tuple[Field, ...]:
        def widen_field(field: Field) -> Field:
            kind = widen_kind(self._rng, field.kind) if isinstance(field.kind, str) else None
            return field if kind is None or field.default is not None else replace(field, kind=kind)

        return self._change_one(fields, widen_field, lambda field: widen_field(field) != field)

    def _make_optional(self, fields: tuple[Field, ...], _: int, __: set[int]) -> tuple[Field, ...]:
        return self._change_one(fields, lambda field: replace(field, required=False), lambda field: field.required)

    def _change_one(
        self, fields: tuple[Field, ...], change: Callable[[Field], Field], fits: Callable[[Field], bool]
    ) -> tuple[Field, ...]:
        """Return `fields` after a change of one suitable field, at any depth."""
        ids = [field.id for field in _list_all_fields(fields) if fits(field)]
        if not ids:
            return fields
        chosen_id = self._rng.choice(ids)
        return self._rename_uniquely(list(_change_fields(fields, chosen_id, change)))


def _list_all_fields(fields: tuple[Field, ...]) -> Iterator[Field]:
    for field in fields:
        yield field
        if isinstance(field.kind, tuple):
            yield from _list_all_fields(field.kind)


def _change_fields(fields: tuple[Field, ...], field_id: int, change: Callable[[Field], Field]) -> tuple[Field, ...]:
    return tuple(
        change(field)
        if field.id == field_id
        else replace(field, kind=_change_fields(field.kind, field_id, change))
        if isinstance(field.kind, tuple)
        else field
        for field in fields
    )


def _has_simple_default(kind: str) -> bool:
    """Return whether the JSON form of a default is simple.

    It is not simple for floats, which can be infinite, and for times. Their defaults are tested elsewhere.
    """
    return kind in ("boolean", "int", "long", "string", "uuid", "binary") or kind.startswith(("fixed", "decimal"))
