"""A random table of all types, its random history, and a model of its rows.

One seed decides the writers, the changes of schema and partitioning, the jobs and the indexes. After each step, the
test compares the rows, the rows that filters match, earlier snapshots and row ids with the model. The model has no
files.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT, At
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.jobs.server_jobs import rewrite_manifests
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.read.scans import scan
from seamark.connector.sql.session import SqlSession
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.connector.histories.columns import (
    LIST,
    MAP,
    NESTED_KINDS,
    PROMOTIONS,
    STRUCT,
    RandomColumn,
    compute_key,
    draw_value,
    list_kinds,
)
from tests.connector.histories.predicates import Row, draw_filter
from tests.connector.histories.statements import (
    can_be_read,
    can_be_written,
    draw_change,
    draw_literal_value,
    format_literal,
    make_sql_column,
    quote,
    to_sql_value,
)

NAMES = ("id", "a", "B", "naïve", "two words", "x-y", "größe", "1st", "null", "select", "day", 'q"q', "日本")
KEY_KINDS = ("long", "int", "string", "uuid", "decimal(9, 2)", "decimal(38, 10)", "date", "timestamp", "timestamptz")
KEY_KINDS += ("binary", "fixed[3]", "time", "double", "boolean")
_PRECOMBINE_KINDS = (
    "int",
    "long",
    "string",
    "timestamp",
    "date",
    "decimal(9, 2)",
    "decimal(38, 10)",
    "uuid",
    "boolean",
)
_BUCKET_KINDS = {"int", "long", "date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"}
_BUCKET_KINDS |= {"string", "uuid", "binary", "decimal", "fixed"}
_FILTERS_PER_STEP = 2


class TableHistory:
    """A table with random columns, its history, and the rows that it must have."""

    def __init__(self, client: IndexClient, seed: int, name: str) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: list[Row] = []
        self._rng, self._client, self._name = random.Random(f"life {seed}"), client, name
        self._version = self._rng.choice((2, 3, 3))
        self._last_id = 0
        self._last_part = 999  # The ids of partition fields begin at 1000.
        self._columns: list[RandomColumn] = []
        for _ in range(self._rng.choice((1, 1, 2))):
            self._columns.append(self._draw_column(self._rng.choice(KEY_KINDS)))
        self._keys = list(self._columns)
        for _ in range(self._rng.randint(3, 5)):
            self._columns.append(self._draw_new_column())
        self._rng.shuffle(self._columns)
        self._snapshots: dict[int, tuple[list[RandomColumn], Counter[Any]]] = {}
        self._row_ids: dict[Any, tuple[int, int]] = {}
        self._stored_dates: defaultdict[int, set[int]] = defaultdict(set)
        """The dates of each column that files have, also in deleted rows: a promotion converts them, too."""
        self._touched_ids: set[Any] | None = None
        """The keys whose rows may have other ids after the step. None means all keys."""
        self._spec: list[dict[str, Any]] = []
        self._create()

    # The table

    @property
    def _table(self) -> str:
        return f"db.{self._name}"

    def _draw_column(self, kind: str, children: Sequence[RandomColumn] = ()) -> RandomColumn:
        free_names = [name for name in NAMES if name.lower() not in {column.name.lower() for column in self._columns}]
        self._last_id += 1
        return RandomColumn(self._last_id, self._rng.choice(free_names), kind, list(children))

    def _draw_inner(self, name: str, depth: int) -> RandomColumn:
        kind = self._rng.choice((STRUCT, LIST)) if depth and self._rng.random() < 0.4 else ""
        names = {STRUCT: self._rng.sample(("a", "b", "C c"), self._rng.choice((1, 2))), LIST: ["element"]}.get(kind, [])
        self._last_id += 1
        column = RandomColumn(self._last_id, name, kind or self._rng.choice(list_kinds(self._version)))
        column.children = [self._draw_inner(name, depth - 1) for name in names]
        return column

    def _draw_new_column(self, *, default: bool = False) -> RandomColumn:
        rng = self._rng
        match rng.choice((STRUCT, LIST, MAP, *[""] * 7)):
            case "struct":
                return self._draw_column(
                    STRUCT, [self._draw_inner(name, 1) for name in rng.sample(("a", "b"), rng.choice((1, 2)))]
                )
            case "list":
                return self._draw_column(LIST, [self._draw_inner("element", 1)])
            case "map":
                key = self._draw_inner("key", 0)
                key.kind = rng.choice(("string", "int", "date"))
                return self._draw_column(MAP, [key, self._draw_inner("value", 1)])
        column = self._draw_column(rng.choice(list_kinds(self._version)))
        if default and self._version >= 3 and rng.random() < 0.5:
            value = draw_value(rng, column.kind)
            # NaN and infinity are no defaults, because JSON cannot represent them.
            column.initial_default = value if value == value and value not in (float("inf"), float("-inf")) else None
        return column

    def _create(self) -> None:
        """Create the table with random columns, indexes, partitions and clustering columns."""
        rng, plain_columns = self._rng, [column for column in self._columns if column.kind not in NESTED_KINDS]
        properties = {"format-version": str(self._version)}
        if rng.random() < 0.6:
            properties["seamark.index.keys"] = f"record({', '.join(_quote(key.name) for key in self._keys)})"
        if indexable := [column for column in plain_columns if column.kind not in ("float", "double")]:
            indexed_column = rng.choice(indexable)
            properties["seamark.index.other"] = f"{rng.choice(('bloom', 'bitmap'))}({_quote(indexed_column.name)})"
        # Row groups are small enough that compaction copies them.
        properties["write.parquet.row-group-size-bytes"] = rng.choice(("40", "40", "100000"))
        sorted_columns = [column.name for column in plain_columns if column.name.isidentifier()]
        if sorted_columns:
            properties["seamark.clustering.columns"] = ",".join(rng.sample(sorted_columns, min(2, len(sorted_columns))))
        body = {"name": self._name, "schema": self._build_schema(), "properties": properties}
        if rng.random() < 0.7:
            body["partition-spec"] = {"spec-id": 0, "fields": self._draw_spec()}
        self._post("/v1/namespaces/db/tables", body)
        metadata = self._read_metadata()
        for column, field in zip(self._columns, metadata["schemas"][0]["fields"], strict=True):
            column.take_ids(field)
        self._last_id = metadata["last-column-id"]
        self._spec = metadata["partition-specs"][0]["fields"]

    def _build_schema(self) -> dict[str, Any]:
        return {"type": "struct", "schema-id": 0, "fields": [column.json for column in self._columns]}

    def _draw_spec(self) -> list[dict[str, Any]]:
        column = self._rng.choice([column for column in self._columns if column.kind not in NESTED_KINDS])
        base = column.kind.partition("(")[0].partition("[")[0]
        transforms = ["void"] if base in ("float", "double") else ["identity"]
        transforms += [f"bucket[{self._rng.choice((2, 3))}]"] if base in _BUCKET_KINDS else []
        if base in ("int", "long", "decimal", "string", "binary"):
            transforms += [f"truncate[{self._rng.choice((1, 2, 10))}]"] * 2
        if base == "date" or base.startswith("timestamp"):
            transforms += ["year", "month", "day"]
        self._last_part += 1
        number = self._last_part
        transform = self._rng.choice(transforms)
        return [{"name": f"p{number}", "transform": transform, "source-id": column.id, "field-id": number}]

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._client._request("POST", path, {}, json.dumps(body).encode())

    def _update(self, *updates: dict[str, Any]) -> None:
        self._post(f"/v1/namespaces/db/tables/{self._name}", {"requirements": [], "updates": updates})

    def _read_metadata(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self._client.load_table(self._table, history=True).metadata)
        return result

    # Rows

    def _draw_row(self) -> Row:
        return {
            column.id: column.draw_value(self._rng) if column in self._keys else column.draw_or_null(self._rng)
            for column in self._columns
        }

    def _compute_key(self, row: Row) -> tuple[Any, ...]:
        return tuple(compute_key(row[key.id]) for key in self._keys)

    def _build_arrow_table(self, rows: Sequence[Row], columns: Sequence[RandomColumn] | None = None) -> pa.Table:
        columns = self._columns if columns is None else columns
        arrays = [column.build_array([column.read_value(row) for row in rows]) for column in columns]
        return pa.Table.from_arrays(arrays, [column.name for column in columns])

    def _freeze_rows(self, rows: Sequence[Row]) -> Counter[Any]:
        return Counter(tuple(column.freeze(column.read_value(row)) for column in self._columns) for row in rows)

    def _read(self, columns: Sequence[RandomColumn], where: Any = None, at: At = CURRENT) -> Counter[Any]:
        actual = scan(self._client, self._table, where=where, at=at).to_arrow().combine_chunks()
        assert actual.column_names == [column.name for column in columns]
        values = [
            map(column.freeze, column.to_plain_values(_combine_chunks(actual.column(position))))
            for position, column in enumerate(columns)
        ]
        return Counter(zip(*values, strict=True))

    # Steps

    def step(self) -> str:
        """Make a random step, count it, and return its description. Steps with a higher weight are more frequent."""
        steps: dict[Callable[[], str], int] = {
            **{
                self._append: 3,
                self._upsert: 6,
                self._upsert_with_equality_deletes: 1,
                self._delete: 2,
                self._delete_matching: 2,
            },
            **{self._compact: 3, self._cluster_table: 1, self._index_table: 2, self._rewrite_metadata: 1},
            **{self._evolve: 4, self._change_partitioning: 1, self._run_sql_change: 3, self._run_sql_insert: 1},
            **{self._run_sql_join: 2},
        }
        chosen_step = self._rng.choices(list(steps), list(steps.values()))[0]
        self._touched_ids = set()
        self.counts[chosen_step.__name__.strip("_")] += 1
        return f"{chosen_step.__name__.strip('_')} {chosen_step()}"

    def _append(self) -> str:
        known_keys, new_rows_by_key = {self._compute_key(row) for row in self.rows}, dict[Any, Row]()
        for row in (self._draw_row() for _ in range(8)):
            if self._compute_key(row) not in known_keys:
                new_rows_by_key[self._compute_key(row)] = row
        append(self._client, self._table, self._build_arrow_table(list(new_rows_by_key.values())))
        self.rows += new_rows_by_key.values()
        return str(list(new_rows_by_key.values()))

    def _draw_batch(self) -> list[Row]:
        """Return random rows, some with keys of stored rows."""
        rows = [self._draw_row() for _ in range(self._rng.randint(1, 6))]
        for row in rows:
            if self.rows and self._rng.random() < 0.6:
                stored_row = self._rng.choice(self.rows)
                row |= {key.id: stored_row[key.id] for key in self._keys}
        self._touched_ids = {self._compute_key(row) for row in rows}
        return rows

    def _upsert(self) -> str:
        rng, rows = self._rng, self._draw_batch()
        value_columns = [column for column in self._columns if column not in self._keys]
        sorted_columns = [column for column in value_columns if column.kind in _PRECOMBINE_KINDS]
        sort_column = rng.choice(sorted_columns) if sorted_columns and rng.random() < 0.4 else None
        written_columns = (
            rng.sample(value_columns, rng.randint(1, len(value_columns)))
            if value_columns and rng.random() < 0.3
            else None
        )
        mode, strategy = rng.choice(MODES), rng.choice((None, None, "scan"))
        upsert(
            self._client,
            self._table,
            self._build_arrow_table(rows),
            keys=[key.name for key in self._keys],
            precombine=None if sort_column is None else sort_column.name,
            columns=None if written_columns is None else [column.name for column in written_columns],
            mode=mode,
            strategy=strategy,
        )
        self._replace(rows, sort_column, written_columns)
        return f"{mode}, {strategy}, by {sort_column}, of {written_columns}: {rows}"

    def _upsert_with_equality_deletes(self) -> str:
        rows = self._draw_batch()
        try:
            upsert(
                self._client,
                self._table,
                self._build_arrow_table(rows),
                keys=[key.name for key in self._keys],
                strategy=EQUALITY,
            )
        # The server refuses float keys, and keys that do not determine the partition of a row.
        except (Unwritable, InvalidRequest) as error:
            self._touched_ids = set()
            self.counts["refused"] += 1
            return str(error)
        self._replace(rows, sort_column=None, columns=None)  # Each row replaces all columns of the row with its key.
        return str(rows)

    def _replace(
        self, rows: Sequence[Row], sort_column: RandomColumn | None, columns: Sequence[RandomColumn] | None
    ) -> None:
        def is_older(row: Row, other_row: Row) -> bool:
            if sort_column is None:
                return False
            own_value, other_value = sort_column.read_value(row), sort_column.read_value(other_row)
            return (
                other_value is not None
                if own_value is None
                else other_value is not None and bool(own_value < other_value)
            )

        stored_keys, latest_rows = {self._compute_key(row): row for row in self.rows}, dict[Any, Row]()
        for row in rows:
            earlier_row = latest_rows.get(self._compute_key(row))
            if earlier_row is None or not is_older(row, earlier_row):
                latest_rows[self._compute_key(row)] = row
        for key, row in latest_rows.items():
            old_row = stored_keys.get(key)
            if old_row is not None and is_older(row, old_row):
                continue
            if columns is None:
                stored_keys[key] = row
                continue
            written_ids = {
                column.id for column in (*columns, *self._keys, *([] if sort_column is None else [sort_column]))
            }
            old_values = {column.id: column.initial_default for column in self._columns} if old_row is None else old_row
            stored_keys[key] = old_values | {number: row[number] for number in written_ids}
        self.rows = list(stored_keys.values())

    def _delete(self) -> str:
        rows, mode = self._draw_batch(), self._rng.choice(MODES)
        keys = [key.name for key in self._keys]
        delete(self._client, self._table, keys=self._build_arrow_table(rows, self._keys), key=keys, mode=mode)
        removed_keys = {self._compute_key(row) for row in rows}
        self.rows = [row for row in self.rows if self._compute_key(row) not in removed_keys]
        return f"{mode}: {rows}"

    def _delete_matching(self) -> str:
        where, matches, _ = draw_filter(self._rng, self._columns, self.rows)
        mode = self._rng.choice(MODES)
        delete(self._client, self._table, where=where, mode=mode)
        self.rows = [row for row in self.rows if not matches(row)]
        return f"{mode}: {where}"

    def _run_sql_change(self) -> str:
        value_columns = [column for column in self._columns if column not in self._keys]
        change = draw_change(self._rng, f"db.{self._name}", self._columns, value_columns, self.rows)
        if change is None:
            return "nothing"
        matching_rows = [row for row in self.rows if change.matches(row)]
        with SqlSession(self._client.url) as session:
            (count,) = session.sql(change.text).to_arrow()["rows"].to_pylist()
        assert count == len(matching_rows), change.text
        self.counts["rows changed by SQL"] += count
        self._touched_ids = {self._compute_key(row) for row in matching_rows}
        if change.new_values:
            for row in matching_rows:
                row |= change.new_values
        else:
            self.rows = [row for row in self.rows if not change.matches(row)]
        return change.text

    def _run_sql_insert(self) -> str:
        """Run an INSERT that leaves some columns to their defaults. Return its text, or "nothing" if none is run."""
        writable_columns = [column for column in self._columns if can_be_written(column)]
        if any(key not in writable_columns for key in self._keys):
            return "nothing"
        known_keys, rows = {self._compute_key(row) for row in self.rows}, dict[Any, Row]()
        for _ in range(self._rng.randint(1, 3)):
            row = {column.id: column.initial_default for column in self._columns}
            row |= {
                column.id: draw_literal_value(self._rng, column, nulls=column not in self._keys)
                for column in writable_columns
            }
            if self._compute_key(row) not in known_keys:
                rows[self._compute_key(row)] = row
        if not rows:
            return "nothing"
        names = ", ".join(quote(column.name) for column in writable_columns)
        values = ", ".join(
            f"({', '.join(format_literal(column.kind, row[column.id]) for column in writable_columns)})"
            for row in rows.values()
        )
        text = f"INSERT INTO db.{self._name} ({names}) VALUES {values}"
        with SqlSession(self._client.url) as session:
            session.sql(text).to_arrow()
        self.rows += rows.values()
        return text

    def _run_sql_join(self) -> str:
        """Join the table with itself by its keys, and compare the values of all columns that SQL can read."""
        columns = [column for column in self._columns if can_be_read(column)]
        names = ", ".join(f"x.{quote(column.name)}" for column in columns)
        conditions = [f"x.{quote(key.name)} = y.{quote(key.name)}" for key in self._keys]
        key = self._rng.choice(self._keys)
        name = quote(key.name)
        if key.kind != "double":
            conditions.append(f"x.{name} IN (SELECT {name} FROM {self._table})")
        if key.kind not in ("double", "boolean"):
            conditions.append(f"y.{name} >= (SELECT min({name}) FROM {self._table})")
        text = f"SELECT {names} FROM {self._table} x, {self._table} y WHERE {' AND '.join(conditions)}"
        # In SQL, NaN is equal to no key.
        rows = [row for row in self.rows if all(row[key.id] == row[key.id] for key in self._keys)]
        with SqlSession(self._client.url) as session:
            result = session.sql(text).to_arrow().combine_chunks()
        sql_columns = [make_sql_column(column) for column in columns]
        actual_values = [
            map(column.freeze, column.to_plain_values(_combine_chunks(result.column(position))))
            for position, column in enumerate(sql_columns)
        ]
        expected = Counter(
            tuple(
                sql_column.freeze(to_sql_value(column, column.read_value(row)))
                for column, sql_column in zip(columns, sql_columns, strict=True)
            )
            for row in rows
        )
        assert Counter(zip(*actual_values, strict=True)) == expected, text
        return text

    def _compact(self) -> str:
        report = compact(self._client, self._table, policy=CompactionPolicy(self._rng.choice((3000, 1 << 20)), 2))
        assert not report.errors
        return ""

    def _cluster_table(self) -> str:
        try:
            report = cluster_incrementally(self._client, self._table, full=self._rng.random() < 0.5)
        except InvalidRequest as error:  # A clustering column was renamed or dropped.
            return str(error)
        assert not report.errors
        return ""

    def _index_table(self) -> str:
        return str(run_indexing(self._client, ("db", self._name)))

    def _rewrite_metadata(self) -> str:
        rewrite_manifests(self._client, self._table)
        compute_statistics(self._client, self._table)
        return ""

    def _change_partitioning(self) -> str:
        self._spec = self._draw_spec() if self._rng.random() < 0.85 else []
        new_spec = {"action": "add-spec", "spec": {"spec-id": 0, "fields": self._spec}}
        self._update(new_spec, {"action": "set-default-spec", "spec-id": -1})
        return str(self._spec)

    def _evolve(self) -> str:
        rng, columns = self._rng, self._columns
        used_ids = {field["source-id"] for field in self._spec}
        free_columns = [column for column in columns if column not in self._keys and column.id not in used_ids]
        change = rng.choice(("add", "drop", "readd", "rename", "swap", "promote", "promote", "move", "extend"))
        if change in ("drop", "readd") and free_columns:
            dropped_column = rng.choice(free_columns)
            columns.remove(dropped_column)
            for row in self.rows:
                row.pop(dropped_column.id, None)
            if change == "readd":
                self._change_schema()
                columns.append(self._draw_new_column(default=True))
                columns[-1].name = dropped_column.name
        elif change == "add" and len(columns) < len(NAMES):
            columns.insert(rng.randint(0, len(columns)), self._draw_new_column(default=True))
        elif change == "rename" and len(columns) < len(NAMES):
            rng.choice(columns).name = self._draw_column("int").name
        elif change == "swap" and len(columns) > 1:
            column, other_column = rng.sample(columns, 2)
            column.name, other_column.name = other_column.name, column.name
        elif change == "move":
            rng.shuffle(columns)
        elif change == "extend":
            structs = [
                inner_column for column in columns for inner_column in column.walk() if inner_column.kind == STRUCT
            ]
            for struct in rng.sample(structs, min(1, len(structs))):
                struct.children.append(self._draw_inner(f"n{self._last_id}", 1))
        elif change == "promote":
            self._promote([column for column in columns if column not in self._keys or column.kind != "date"], used_ids)
        self._change_schema()
        return f"{change}: {[column.json for column in columns]}"

    def _promote(self, columns: Sequence[RandomColumn], used_ids: set[int]) -> None:
        """Change the type of a random column or nested field to a wider type that Iceberg permits, if there is one.

        The keys of maps keep their types.

        Args:
            columns: The columns that may change.
            used_ids: The ids of the fields on which partition fields depend.
        """
        map_keys = {
            id(nested_column.children[0])
            for column in columns
            for nested_column in column.walk()
            if nested_column.kind == MAP
        }
        candidates = [
            (nested_column, kind)
            for column in columns
            for nested_column in column.walk()
            for kind in PROMOTIONS.get(nested_column.kind, ())
            if id(nested_column) not in map_keys
            # Dates are promoted in version 3. Dates within structs, lists and maps are not promoted, so that the model
            # stays simple.
            and (
                nested_column.kind != "date"
                or (self._version >= 3 and nested_column is column and nested_column.id not in used_ids)
            )
        ]
        if not candidates:
            return
        column, kind = self._rng.choice(candidates)
        stored_rows = [{column.id: value} for value in self._stored_dates[column.id]]
        if column.can_promote([*self.rows, *stored_rows], kind):
            for row in self.rows:
                column.promote_value(row, kind)
            column.promote(kind)

    def _change_schema(self) -> None:
        new_schema = {"action": "add-schema", "schema": self._build_schema(), "last-column-id": self._last_id}
        self._update(new_schema, {"action": "set-current-schema", "schema-id": -1})

    # Comparisons

    def check(self) -> None:
        """Compare the rows, two filters, the row ids and one recorded snapshot with the expected rows."""
        expected = self._freeze_rows(self.rows)
        for column in (column for column in self._columns if column.kind == "date"):
            self._stored_dates[column.id] |= {row[column.id] for row in self.rows if row.get(column.id) is not None}
        assert self._read(self._columns) == expected
        for _ in range(_FILTERS_PER_STEP):
            where, matches, _ = draw_filter(self._rng, self._columns, self.rows)
            actual_rows = [row for row in self.rows if matches(row)]
            self.counts["filters"] += 1
            self.counts["rows found"] += len(actual_rows)
            assert self._read(self._columns, where) == self._freeze_rows(actual_rows), json.dumps(where)
        self._check_row_ids()
        metadata = self._read_metadata()
        current_id = metadata.get("current-snapshot-id", -1)
        schemas = {snapshot["snapshot-id"]: snapshot.get("schema-id") for snapshot in metadata["snapshots"]}
        # A read of a snapshot uses its schema, so `self._columns` must be the columns of this schema.
        if schemas.get(current_id) == metadata["current-schema-id"]:
            self._snapshots.setdefault(current_id, (copy.deepcopy(self._columns), expected))
        if self._snapshots:
            chosen_snapshot = self._rng.choice(list(self._snapshots))
            columns, rows = self._snapshots[chosen_snapshot]
            assert self._read(columns, at=At(snapshot_id=chosen_snapshot)) == rows, f"as of {chosen_snapshot}"

    def _check_row_ids(self) -> None:
        if self._version < 3:
            return
        names = [key.name for key in self._keys]
        rows = scan(self._client, self._table, [*names, "_row_id", "_last_updated_sequence_number"]).to_arrow()
        *values, ids, numbers = (rows.combine_chunks().column(position) for position in range(rows.num_columns))
        keys = zip(
            *(key.to_plain_values(_combine_chunks(value)) for key, value in zip(self._keys, values, strict=True)),
            strict=True,
        )
        id_pairs = zip(ids.to_pylist(), numbers.to_pylist(), strict=True)
        stored_ids = {tuple(map(compute_key, key)): id_pair for key, id_pair in zip(keys, id_pairs, strict=True)}
        assert len({number for number, _ in stored_ids.values()}) == rows.num_rows
        for key in self._row_ids.keys() & stored_ids.keys() if self._touched_ids is not None else ():
            assert key in (self._touched_ids or ()) or stored_ids[key] == self._row_ids[key], key
        self._row_ids = stored_ids


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
