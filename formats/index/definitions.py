"""Index definitions: the indexes of a table, which are stored only in its properties.

The property `seamark.index.<name>` contains JSON, as the catalog writes it:

    {"kind": "bloom", "columns": ["user_id"], "field-ids": [3], "fpp": 0.001, "state": "paused"}

or a short form that users set through any engine: `bloom(user_id, fpp=0.001)`, `bitmap(lower(name))`, `record(a,
bucket[16](b))`, `cube(day(ts); sum(amount), count(*))`. Columns are identified by their field ids, or by their names if
there are no field ids. Definitions are checked before they are written. Any engine may set the property, so an invalid
value is reported as a problem and defines no index; no plan fails because of it.

The id of a definition consists of its content (kind, terms by field id, parameters) without its name. Index files
contain the id. So if an index is dropped and created again, it uses the index files that were built for it. The id also
contains the names by which the table's name mapping finds the columns in files without field ids. So a mapping with
other names makes another index. The functions have no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.name_mapping import (
    NameMapping,
    parse_name_mapping,
    read_name_mapping,
    select_columns,
)
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY, get_transform_name
from seamark.formats.index.keys.functions import INDEXED_FUNCTIONS
from seamark.formats.index.keys.keys import get_family
from seamark.formats.index.keys.lookups import HAS_PARTNER, list_tables, parse_lookup
from seamark.formats.index.keys.measures import (
    MEASURES_MAX,
    Measure,
    list_columns,
    list_measured_types,
    parse_measure,
)
from seamark.formats.index.keys.terms import (
    TEXT_MAX,
    Term,
    parse_term,
    resolve_term,
    resolve_term_by_id,
    split_arguments,
)
from seamark.formats.index.kinds.kind import IndexKind, IndexParameter
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.record import COLUMNS_MAX
from seamark.formats.runtime.errors import BadRequest

PREFIX = "seamark.index."
ENABLED, PAUSED = "enabled", "paused"
STATES = (ENABLED, PAUSED)
BUCKET = "bucket"
"""The kind of a `bucket` partition field in answers. It has no files and no entry in `KINDS`."""
BUCKET_PREFIX = "bucket:"
"""The prefix of the names of indexes that a partition spec defines. Other index names do not contain a colon."""
_MAPPING_FIELD = "name-mapping"
_MEASURES, _MEASURED_TYPES = "measures", "measured-types"
_SHOWN_MAX, _SHOWN_COLUMN_MAX = 100, 200
"""The maximum number of characters of a value, and of a column, in a message."""
_TERM_FIELDS = 3
_MAPPING_CHARACTERS_MAX = 4096
"""The maximum number of characters of a name mapping in a definition.

If a mapping is longer, files without field ids are not indexed.
"""
DEFINITIONS_MAX = 256
"""The maximum number of index definitions of a table. Further properties are not read."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_SHORT_FORM = re.compile(r"\s*([A-Za-z]+)\s*\((.*)\)\s*", re.DOTALL)
_OPTION = re.compile(r"\s*([A-Za-z][A-Za-z-]*)\s*=\s*([^\s`()]+)\s*")


@dataclass(frozen=True)
class IndexDefinition:
    """The definition of an index.

    Attributes:
        name: The name of the index.
        kind: The name of the index kind.
        terms: The terms that the index is on.
        parameters: The parameters of the kind, by name.
        state: One of `STATES`.
        mapping: The part of the table's name mapping for the columns of the index.
        measures: The measures of a cube.
    """

    name: str
    kind: str
    terms: tuple[Term, ...]
    parameters: Mapping[str, float] = field(default_factory=dict, hash=False)
    state: str = ENABLED
    mapping: NameMapping | None = None
    measures: tuple[Measure, ...] = ()

    @cached_property
    def column_ids(self) -> tuple[int, ...]:
        """The field ids of the columns that the index reads: first those of the terms, then those of the measures."""
        ids = [term.column_id for term in self.terms]
        measured_ids = (column.column_id for measure in self.measures for column in list_columns(measure.operand))
        return (*ids, *(column_id for column_id in dict.fromkeys(measured_ids) if column_id not in ids))

    @property
    def dimension_tables(self) -> frozenset[tuple[str, ...]]:
        """The tables whose attributes a cube has, each as the levels of the namespace and the name."""
        lookups = map(parse_lookup, (term.transform for term in self.terms))
        return frozenset(lookup.source.table for lookup in lookups if lookup is not None)

    @cached_property
    def id(self) -> str:
        """The id of the definition: canonical JSON with field ids, so that renamed columns keep their index.

        Each index file contains the id of its definition. Two definitions with the same id share their index files.
        """
        terms = [
            {
                "field-id": term.column_id,
                "transform": term.transform,
                "keys": term.source if self.measures else _get_key_form(term),
            }
            for term in self.terms
        ]
        content: dict[str, Any] = {"kind": self.kind, "terms": terms, **dict(sorted(self.parameters.items()))}
        if self.measures:
            # The types of entries depend on the types of columns, so a promoted column needs another index.
            content[_MEASURES] = [measure.id_text for measure in self.measures]
            content[_MEASURED_TYPES] = list_measured_types(self.measures)
        if self.mapping is not None:
            content[_MAPPING_FIELD] = self.mapping
        return msgspec.json.encode(content).decode()

    @property
    def enabled(self) -> bool:
        return self.state == ENABLED

    @property
    def text(self) -> str:
        """The short form of the definition."""
        options = [f"{name}={value:g}" for name, value in sorted(self.parameters.items())]
        terms = [term.text for term in self.terms]
        if self.measures:
            measures = [measure.text for measure in self.measures]
            return f"{self.kind}({', '.join(terms)}; {', '.join([*measures, *options])})"
        return f"{self.kind}({', '.join([*terms, *options])})"

    @property
    def property_text(self) -> str:
        """The value of the table's property `seamark.index.<name>`."""
        content: dict[str, Any] = {
            "kind": self.kind,
            "columns": [term.text for term in self.terms],
            "field-ids": [term.column_id for term in self.terms],
            **self.parameters,
        }
        if self.measures:
            content[_MEASURES] = [measure.id_text for measure in self.measures]
        if not self.enabled:
            content["state"] = self.state
        return msgspec.json.encode(content).decode()


@dataclass(frozen=True)
class Definitions:
    """The indexes that a table's properties define.

    Attributes:
        by_name: The definitions of the valid properties, by name.
        problems: The reasons why the other properties are invalid, by name.
    """

    by_name: Mapping[str, IndexDefinition]
    problems: Mapping[str, str]

    @property
    def enabled(self) -> tuple[IndexDefinition, ...]:
        """The indexes that are built and that plans use. Of several with the same id, only the first is included."""
        definitions_by_id: dict[str, IndexDefinition] = {}
        for definition in self.by_name.values():
            if definition.enabled:
                definitions_by_id.setdefault(definition.id, definition)
        return tuple(definitions_by_id.values())


_NONE = Definitions({}, {})


def _get_key_form(term: Term) -> str:
    """Return the name of the form in which an index stores the values of a term (a column, transform or function).

    The name is a part of the definition's id. If a column is promoted to another type, and this changes the name, its
    older index files are no longer used. For a function, the name is the form of the function's keys. For a column, it
    is the family of all types with equal keys. For a transform, it is the exact type, because a promotion can change
    the result: for example, the bucket of a date differs from the bucket of the timestamp.
    """
    if function := INDEXED_FUNCTIONS.get(term.transform):
        return function.key_form
    return get_family(term.kind) if term.transform == IDENTITY else term.source


_READ_DEFINITIONS = "index definitions"
"""The key under which table metadata store their index definitions."""


def find_dimension_tables(text: str) -> frozenset[tuple[str, ...]]:
    """Return the dimension tables in the text of a definition.

    The definition may be invalid for the present schema, because a later commit can make it valid.
    """
    if len(text) > TEXT_MAX:
        return frozenset()  # A text of this length never defines an index.
    texts = [text]
    if text.lstrip().startswith("{"):
        with suppress(BadRequest):  # A text that is not JSON defines no index.
            content = _parse_object(text)
            columns = content.get("columns")
            # JSON can escape any character, so search the decoded texts.
            texts += [column for column in columns if isinstance(column, str)] if isinstance(columns, list) else []
    return frozenset().union(*map(list_tables, texts))


def read_definitions(metadata: TableMetadata) -> Definitions:
    """Return the index definitions of a table. Invalid properties raise no error.

    The result is cached in the `__dict__` of the metadata, because each request on the table needs it.
    """
    definitions: Definitions | None = metadata.__dict__.get(_READ_DEFINITIONS)
    if definitions is None:
        definitions = metadata.__dict__[_READ_DEFINITIONS] = _read_definitions(metadata)
    return definitions


def list_writable_definitions(metadata: TableMetadata) -> tuple[IndexDefinition, ...]:
    """Return the enabled indexes whose columns the table still has. New files can have entries only of these indexes.

    An index with a dropped column stays defined, because the plans of earlier snapshots can use it.
    """
    columns = metadata.current_schema.index.by_id
    return tuple(index for index in read_definitions(metadata).enabled if columns.keys() >= set(index.column_ids))


def _read_definitions(metadata: TableMetadata) -> Definitions:
    names = sorted(key.removeprefix(PREFIX) for key in metadata.properties if key.startswith(PREFIX))
    if not names:
        return _NONE
    mapping = read_name_mapping(metadata.properties)
    by_name: dict[str, IndexDefinition] = {}
    problems = dict.fromkeys(names[DEFINITIONS_MAX:], f"a table has at most {DEFINITIONS_MAX} indexes")
    for name in names[:DEFINITIONS_MAX]:
        try:
            check_name(name)
            definition = _read_definition(
                name, metadata.properties[PREFIX + name], metadata.current_schema, metadata.schemas
            )
            by_name[name] = _add_mapping(definition, mapping)
        except BadRequest as error:
            problems[name] = error.message
    return Definitions(by_name, problems)


def add_name_mapping(definition: IndexDefinition, metadata: TableMetadata) -> IndexDefinition:
    """Return the definition with the part of the table's name mapping for its columns.

    The mapping identifies the columns of data files without field ids. A part that is too long is not added.
    """
    return _add_mapping(definition, read_name_mapping(metadata.properties))


def _add_mapping(definition: IndexDefinition, mapping: NameMapping | None) -> IndexDefinition:
    """Return the definition with its part of a name mapping.

    If the table has no mapping, or the part is too long for the id of a definition, the definition does not change.
    """
    if mapping is None:
        return definition
    part = select_columns(mapping, definition.column_ids)
    return (
        replace(definition, mapping=part) if len(msgspec.json.encode(part)) <= _MAPPING_CHARACTERS_MAX else definition
    )


def list_bucket_definitions(metadata: TableMetadata) -> tuple[IndexDefinition, ...]:
    """Return the indexes that partition specs define: one for each field that is a `bucket` of a column.

    Plans use them without index files.
    """
    definitions: dict[str, IndexDefinition] = {}
    for spec in metadata.partition_specs:
        for partition_field in spec.fields:
            if get_transform_name(partition_field.transform) != BUCKET or len(partition_field.sources) != 1:
                continue
            try:
                term = resolve_term_by_id(
                    partition_field.transform, partition_field.sources[0], metadata.current_schema, metadata.schemas
                )
            except BadRequest:  # This server does not support the type of the column.
                continue
            name = BUCKET_PREFIX + partition_field.name
            # Two specs can have fields of the same name on other columns, so add the spec's id to the later name.
            if name in definitions and definitions[name].terms != (term,):
                name = f"{BUCKET_PREFIX}{partition_field.name}:{spec.spec_id}"
            definitions.setdefault(name, IndexDefinition(name, BUCKET, (term,)))
    return tuple(definitions.values())


def define_index(
    name: str,
    kind: str,
    columns: Collection[str | Term],
    schema: Schema,
    *,
    parameters: Mapping[str, Any] | None = None,
    state: str = ENABLED,
    measures: Sequence[str | Measure] = (),
) -> IndexDefinition:
    """Check an index definition, and return it.

    Args:
        name: The name of the index.
        kind: The index kind, such as `bitmap`.
        columns: The indexed terms, or texts that are resolved in `schema`.
        schema: The current schema of the table.
        parameters: The parameters of the kind by name, such as `fpp`.
        state: Whether the index is enabled.
        measures: The aggregates of a cube, or texts that are resolved in `schema`.

    Raises:
        BadRequest: The definition is invalid.
    """
    check_name(name)
    if len(columns) > COLUMNS_MAX:
        raise BadRequest(f"An index is on at most {COLUMNS_MAX} columns, not on {len(columns)}")
    terms = [column if isinstance(column, Term) else resolve_term(column, schema) for column in columns]
    parsed_measures = [
        measure if isinstance(measure, Measure) else parse_measure(measure, schema)
        for measure in measures[: MEASURES_MAX + 1]  # One more than allowed is enough for the error.
    ]
    return _build_definition(name, kind, terms, parameters or {}, state, parsed_measures)


def check_name(name: str) -> str:
    """Check the name of an index, and return it.

    Raises:
        BadRequest: The name is not valid for an index.
    """
    if name.startswith(BUCKET_PREFIX):
        raise BadRequest(
            f"{name[:_SHOWN_MAX]!r} is an index that the table's partition spec defines; change the spec instead"
        )
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:_SHOWN_MAX]!r} cannot name an index: use up to 128 letters, digits, '_', '-' and '.'; "
            "the first character must not be '-' or '.'"
        )
    return name


def parse_definition(
    definition_id: str, schema: Schema, older_schemas: Iterable[Schema] = (), *, name: str = ""
) -> IndexDefinition:
    """Parse the id of a definition, which an index file contains. The id is the canonical JSON of the definition.

    Args:
        definition_id: The id.
        schema: The current schema of the table.
        older_schemas: All schemas of the table, for columns that were dropped.
        name: The name of the returned definition, which the id does not contain.

    Raises:
        BadRequest: The id is not a definition for this table.
    """
    content, schemas = _parse_object(definition_id), tuple(older_schemas)
    terms = content.pop("terms", None)
    kind = content.pop("kind", None)
    mapping = content.pop(_MAPPING_FIELD, None)
    measures = _pop_measures(content, schema, schemas)
    content.pop(_MEASURED_TYPES, None)  # The types are not parsed, but compared with the rest of the id below.
    if not isinstance(terms, list) or not all(_is_term(item) for item in terms):
        raise BadRequest("The definition has no terms; each term has a field-id, a transform and keys")
    resolved_terms = [resolve_term_by_id(item["transform"], item["field-id"], schema, schemas) for item in terms]
    definition = _build_definition(name, kind, resolved_terms, content, ENABLED, measures)
    if mapping is not None:
        try:
            definition = replace(definition, mapping=parse_name_mapping(msgspec.json.encode(mapping).decode()))
        except ValueError as error:
            raise BadRequest(f"The definition has an invalid name mapping: {error}") from None
    if definition.id != definition_id:
        raise BadRequest(f"The definition is not in its canonical form, which is {definition.id}")
    return definition


def _is_term(item: Any) -> bool:
    """Return whether an item of a definition's id has the form of a term."""
    return (
        isinstance(item, dict)
        and isinstance(item.get("field-id"), int)
        and isinstance(item.get("transform"), str)
        and isinstance(item.get("keys"), str)
        and len(item) == _TERM_FIELDS
    )


def _build_definition(
    name: str,
    kind: Any,
    terms: list[Term],
    parameters: Mapping[str, Any],
    state: Any,
    measures: Sequence[Measure] = (),
) -> IndexDefinition:
    """Check the parts of an index definition, and return the definition without a name mapping.

    The kind and the state can be any JSON values, because they come from a property of the table.

    Raises:
        BadRequest: A part is invalid.
    """
    index_kind = KINDS.get(kind) if isinstance(kind, str) else None
    if index_kind is None:
        hint = "; the table's partition spec defines indexes of this kind" if kind == BUCKET else ""
        raise BadRequest(f"There is no index kind {_show_value(kind)}; the kinds are {', '.join(KINDS)}{hint}")
    _check_terms(index_kind, terms)
    _check_measures(index_kind, measures)
    if state not in STATES:
        raise BadRequest(f"The state of an index is {' or '.join(STATES)}, not {_show_value(state)}")
    return IndexDefinition(
        name, index_kind.name, tuple(terms), _check_parameters(index_kind, parameters), state, None, tuple(measures)
    )


def _check_terms(kind: IndexKind[Any, Any], terms: Sequence[Term]) -> None:
    if not terms:
        raise BadRequest(f"A {kind.name} index needs a column")
    if len(terms) > kind.columns_max == 1:
        raise BadRequest(f"A {kind.name} index is on one column, not on {len(terms)}; define an index for each column")
    if len(terms) > kind.columns_max:
        raise BadRequest(f"A {kind.name} index is on at most {kind.columns_max} columns, not on {len(terms)}")
    term_ids = [(term.column_id, term.transform) for term in terms]
    for index, term in enumerate(terms):
        if term_ids[index] in term_ids[:index]:
            raise BadRequest(f"The column {term.text[:_SHOWN_COLUMN_MAX]} is in the index twice; remove one")
    for term in terms:
        if not kind.supports_type(term.kind):
            raise BadRequest(f"A {kind.name} index cannot be on {term.text}, of type {term.kind}")
        lookup = parse_lookup(term.transform)
        if lookup is not None and not kind.takes_attributes:
            kinds = ", ".join(other.name for other in KINDS.values() if other.takes_attributes)
            raise BadRequest(
                f"A {kind.name} index cannot be on {term.text[:_SHOWN_COLUMN_MAX]}: only {kinds} accept "
                "attributes of other tables"
            )
        if lookup is not None and lookup.attribute_id == HAS_PARTNER and not kind.aggregates:
            raise BadRequest(
                f"A {kind.name} index cannot be on {term.text[:_SHOWN_COLUMN_MAX]}: the field id {HAS_PARTNER} states "
                "whether a key has a partner, which only cubes use; use an attribute with another field id"
            )
        if problem := kind.find_term_problem(term):
            raise BadRequest(problem)


def _check_measures(kind: IndexKind[Any, Any], measures: Sequence[Measure]) -> None:
    if measures and not kind.aggregates:
        raise BadRequest(f"A {kind.name} index has no measures; only a cube has them")
    if kind.aggregates and not measures:
        raise BadRequest(f"A {kind.name} needs a measure, such as sum(amount) or count(*)")
    if len(measures) > MEASURES_MAX:
        raise BadRequest(f"A {kind.name} has at most {MEASURES_MAX} measures; remove the others")
    id_texts = [measure.id_text for measure in measures]
    for index, measure in enumerate(measures):
        if id_texts[index] in id_texts[:index]:
            raise BadRequest(f"The measure {measure.text[:_SHOWN_COLUMN_MAX]} is in the definition twice; remove one")


def _pop_measures(content: dict[str, Any], schema: Schema, schemas: tuple[Schema, ...]) -> list[Measure]:
    """Remove the measures from the content of a definition, and return them.

    At most one measure more than the limit is parsed, so that `_check_measures` detects that there are too many.

    Raises:
        BadRequest: A measure is invalid.
    """
    texts = content.pop(_MEASURES, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequest('measures must be a list of texts, such as ["sum(amount)", "count(*)"]')
    return [parse_measure(text, schema, schemas) for text in texts[: MEASURES_MAX + 1]]


def _check_parameters(kind: IndexKind[Any, Any], values: Mapping[str, Any]) -> dict[str, float]:
    parameter_names = [parameter.name for parameter in kind.parameters]
    unknown_names = sorted(str(name) for name in values if name not in parameter_names)
    if unknown_names:
        accepted_names = ", ".join(parameter_names) or "no parameters"
        raise BadRequest(
            f"A {kind.name} index accepts {accepted_names} in addition to its columns, not "
            f"{_show_value(unknown_names[0])}"
        )
    return {
        parameter.name: _check_number(parameter, values.get(parameter.name, parameter.default))
        for parameter in kind.parameters
    }


def _check_number(parameter: IndexParameter, value: Any) -> float:
    """Return the value of a parameter. Raise BadRequest if it is not a number in the parameter's range."""
    minimum, maximum = parameter.minimum, parameter.maximum
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise BadRequest(
            f"{parameter.name}, {parameter.meaning}, must be between {minimum:g} and {maximum:g}, "
            f"not {_show_value(value)}"
        )
    return float(value)


def _read_definition(name: str, text: str, schema: Schema, schemas: tuple[Schema, ...]) -> IndexDefinition:
    """Parse the value of a property `seamark.index.<name>`, as JSON or in the short form, such as `bitmap(c)`.

    Args:
        name: The name of the index.
        text: The value of the property.
        schema: The current schema of the table.
        schemas: All schemas of the table, for columns that were dropped.

    Raises:
        BadRequest: The value is not a valid definition.
    """
    if len(text) > TEXT_MAX:
        raise BadRequest(f"The definition has {len(text)} characters; the limit is {TEXT_MAX} characters")
    if not text.lstrip().startswith("{"):
        return _read_short_form(name, text, schema, schemas)
    content = _parse_object(text)
    kind, columns, ids = content.pop("kind", None), content.pop("columns", None), content.pop("field-ids", None)
    state = content.pop("state", ENABLED)
    measures = _pop_measures(content, schema, schemas)
    if not isinstance(columns, list) or not all(isinstance(column, str) for column in columns):
        raise BadRequest('columns must be a list of texts, such as {"kind": "bitmap", "columns": ["c"]}')
    if ids is None:
        terms = [resolve_term(column, schema, schemas) for column in columns]
    elif isinstance(ids, list) and len(ids) == len(columns) and all(isinstance(column_id, int) for column_id in ids):
        # Resolve columns by id, because another column may now have the name.
        terms = [
            resolve_term_by_id(parse_term(column)[0], column_id, schema, schemas)
            for column, column_id in zip(columns, ids, strict=True)
        ]
    else:
        raise BadRequest(f"field-ids must be a list of {len(columns)} numbers, one for each column in columns")
    return _build_definition(name, kind, terms, content, state, measures)


def _read_short_form(name: str, text: str, schema: Schema, schemas: tuple[Schema, ...]) -> IndexDefinition:
    """Parse an index definition in the short form, such as `cube(a, b; count(*), shrink=10)`.

    Options may follow the columns or the measures. Options after the measures are read with the columns.

    Raises:
        BadRequest: The text is not a valid definition.
    """
    call = _SHORT_FORM.fullmatch(text)
    if call is None:
        raise BadRequest(
            f"{text[:_SHOWN_MAX]!r} defines no index: write bitmap(c), bloom(c, fpp=0.01), record(a, b), "
            "cube(c; count(*)), or JSON"
        )
    terms: list[Term] = []
    options: dict[str, Any] = {}
    columns, *measure_lists = split_arguments(call[2], ";")
    if len(measure_lists) > 1:
        raise BadRequest("A definition has one semicolon, between the dimensions and the measures of a cube")
    measures: list[Measure] = []
    for part in split_arguments(measure_lists[0]) if measure_lists else ():
        if _OPTION.fullmatch(part):
            columns += f",{part}"
        else:
            measures.append(parse_measure(part, schema, schemas))
    for part in split_arguments(columns):
        option = _OPTION.fullmatch(part)
        if option is None:
            terms.append(resolve_term(part, schema, schemas))
        elif option[1] in options:
            raise BadRequest(f"{option[1]} is set twice")
        else:
            options[option[1].lower()] = _parse_option(option[2])
    state = options.pop("state", ENABLED)
    return _build_definition(name, call[1].lower(), terms, options, state, measures)


def _parse_option(text: str) -> Any:
    """Return the number in a text, or the text if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse_object(text: str) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"The definition is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadRequest("The definition must be a JSON object")
    return content


def _show_value(value: Any) -> str:
    return repr(value)[:_SHOWN_MAX]
