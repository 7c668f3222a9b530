"""Joins on random stars and snowflakes, compared with DuckDB's joins of their rows.

A plan keeps every file with a live row that joins with a row of each joined table. The plan is exact if bitmaps cover
all columns of all files, nothing is deleted and no join has several columns. Tables evolve, are partitioned, and have
keys of all types, nulls and duplicates; the limits that select between join methods are random too.

A failure names its seed; `JOIN_SEEDS=17 pytest tests/planner/test_joins_oracle.py -m "not slow"` replays seed 17,
`JOIN_SEEDS=100-300` a range.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from seamark.formats.index.keys import key_set
from seamark.formats.index.kinds import bloom
from seamark.metaserver.planner.pruning import dynamic_filters as dynamic_filters
from tests.api.client import Api
from tests.planner.lakes.kinds import draw_pool, format_decimal, strip_parameters, to_default_json
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.manifests import PartitionField
from tests.planner.lakes.stars import Col, Row, StarTable
from tests.server.rig import run_server

SLOW_SEEDS = range(1000, 1250)
PLANS_PER_SEED = 6
KEY_KINDS = ("int", "int", "long", "string", "date", "decimal(9, 2)", "decimal(20, 2)", "timestamp", "timestamptz")
KEY_KINDS += ("uuid", "fixed[4]", "binary", "boolean", "time", "decimal(30, 2)")
COMPARABLE_KINDS = {"int": "long", "long": "int", "decimal(9, 2)": "decimal(20, 2)", "decimal(20, 2)": "decimal(9, 2)"}
COMPARABLE_KINDS["decimal(30, 2)"] = "decimal(20, 2)"
PREDICATE_KINDS = ("int", "long", "string", "decimal(9, 2)", "double", "boolean")
"""Types of columns that have predicates."""


def parse_seeds(default_range: range) -> Iterator[int]:
    text = os.environ.get("JOIN_SEEDS", "")
    if not text:
        return iter(default_range)
    first, _, last = text.partition("-")
    return iter(range(int(first), int(last or first) + 1))


@dataclass
class RandomTable:
    """A random table with the columns of its rows and its references to other tables."""

    table: StarTable
    pools: dict[str, list[Any]]
    key: str
    key_kinds: tuple[str, ...]
    """The types of the key, in the order of schemas; the last type is the current one."""
    referenced_tables: dict[str, RandomTable] = field(default_factory=dict)
    """The tables to whose keys the columns of this table refer, by column."""
    second_references: dict[str, str] = field(default_factory=dict)
    """The second columns of references to a table whose key has two columns, by the first column of the reference.

    With {"f1": "g1"}, column f1 refers to the key of a table, and g1 to the column `k2` of the same table.
    """


def format_literal(kind: str, value: Any) -> tuple[str, str]:
    """Return a literal as SQL of a plan request, and as SQL of DuckDB."""
    if kind == "string":
        # DuckDB's tables have the UTF-8 bytes of texts as hexadecimal digits, which are ordered like Iceberg's texts.
        return "'" + value.replace("'", "''") + "'", f"'{value.encode().hex()}'"
    if kind.startswith("decimal"):
        return format_decimal(kind, value), str(value)
    if kind == "boolean":
        return str(value).lower(), str(value).lower()
    # DuckDB reads a number with a decimal point as a DECIMAL, which may not be exact.
    return repr(value), f"CAST('{value!r}' AS DOUBLE)" if kind == "double" else repr(value)


def draw_predicate(rng: random.Random, table: RandomTable, depth: int = 0) -> tuple[str, str]:
    """Return a predicate on the table's columns as SQL of a plan request, and as SQL of DuckDB."""
    if depth < 2 and rng.random() < 0.35:
        (left, duckdb_left), (right, duckdb_right) = (
            draw_predicate(rng, table, depth + 1),
            draw_predicate(rng, table, depth + 1),
        )
        connective = rng.choice(["AND", "OR"])
        return f"({left} {connective} {right})", f"({duckdb_left} {connective} {duckdb_right})"
    if depth < 2 and rng.random() < 0.15:
        predicate, duckdb_predicate = draw_predicate(rng, table, depth + 1)
        return f"NOT {predicate}", f"NOT {duckdb_predicate}"
    column = rng.choice([column for column in table.table.columns if column.kind in PREDICATE_KINDS])
    name, fraction = column.name, rng.random()
    if fraction < 0.15:
        text = f"({name} IS {rng.choice(['', 'NOT '])}NULL)"
        return text, text
    values = [
        format_literal(column.kind, item)
        for item in rng.choices(_list_unambiguous_values(table.pools[name]), k=rng.choice([2, 3, 9]))
    ]
    if fraction < 0.4 or column.kind == "boolean":
        return _format_predicate(f"({name} {rng.choice(['=', '<>'])} %s)", values[0])
    if fraction < 0.65:
        text = f"({name} {rng.choice(['', 'NOT '])}IN (%s))"
        return text % ", ".join(literal for literal, _ in values), text % ", ".join(literal for _, literal in values)
    if fraction < 0.75 and column.kind == "string" and "_" not in values[0][0] and "%" not in values[0][0]:
        prefix_literal = values[0][0][:-1]  # Without the closing quote
        return f"({name} LIKE {prefix_literal}%')", f"starts_with({name}, {values[0][1]})"
    return _format_predicate(f"({name} {rng.choice(['<', '<=', '>', '>='])} %s)", values[0])


def _format_predicate(template: str, literals: tuple[str, str]) -> tuple[str, str]:
    return template % literals[0], template % literals[1]


def _list_unambiguous_values(values: Sequence[Any]) -> list[Any]:
    """Return the values without those that clients compare differently and those that SQL cannot express.

    Values by which plans do not prune are left out too. If this leaves nothing, the result contains some of them, so it
    is never empty.
    """
    kept_values = [
        value
        for value in values
        if value == value and not (isinstance(value, float) and (value == 0 or abs(value) > 1e15))
    ]
    expressible_values = [item for item in kept_values if not (isinstance(item, str) and "\0" in item)]
    # Trino rounds float literals of more than 15 digits twice, so plans do not prune by such values.
    short_values = [
        item
        for item in expressible_values
        if not isinstance(item, float) or len(repr(item).lstrip("-0").replace(".", "")) < 16
    ]
    return short_values or expressible_values or [kept_values[0] if kept_values else values[0]]


async def draw_table(
    rng: random.Random, api: Api, name: str, referenced_tables: Sequence[RandomTable], *, is_fact: bool
) -> RandomTable:
    version = rng.choice([2, 3])
    key_kind = rng.choice(KEY_KINDS)
    old_key_kind = "int" if key_kind == "long" and rng.random() < 0.5 else key_kind
    kinds = {"k": old_key_kind, "k2": rng.choice(KEY_KINDS)}
    kinds |= {f"c{number}": rng.choice(PREDICATE_KINDS) for number in range(rng.choice([1, 2, 3]))}
    pools = {column: draw_pool(rng, kind, rng.choice([3, 12, 30])) for column, kind in kinds.items()}
    random_table = RandomTable(None, pools, "k", (key_kind,))  # type: ignore[arg-type]
    for number, referenced_table in enumerate(referenced_tables):
        reference, kind = f"f{number}", referenced_table.key_kinds[-1]
        kinds[reference] = COMPARABLE_KINDS.get(kind, kind) if rng.random() < 0.4 else kind
        pools[reference] = _to_values_of_kind(kinds[reference], referenced_table.pools["k"]) + draw_pool(
            rng, kinds[reference], 4
        )
        random_table.referenced_tables[reference] = referenced_table
        if rng.random() < 0.25:
            kinds[f"g{number}"] = referenced_table.table.columns[1].kind
            pools[f"g{number}"] = referenced_table.pools["k2"] + draw_pool(rng, kinds[f"g{number}"], 2)
            random_table.second_references[reference] = f"g{number}"
    columns = [Col(number, name, kind) for number, (name, kind) in enumerate(kinds.items(), 1)]
    parts = []
    if is_fact and random_table.referenced_tables and rng.random() < 0.4:
        source = next(column for column in columns if column.name == "f0")
        parts = [PartitionField(1000, "p", source.id, "identity")]
    random_table.table = await StarTable.create(api, name, columns, version=version, parts=parts)
    files = _draw_files(rng, random_table, rng.choice([0, 1, 3]) if not is_fact else rng.randint(3, 8))
    if old_key_kind != key_kind or rng.random() < 0.5:
        await random_table.table.commit(files)
        new_columns = [
            Col(column.id, column.name, key_kind if column.name == "k" else column.kind) for column in columns
        ]
        kind = rng.choice(PREDICATE_KINDS)
        pools["new"] = draw_pool(rng, kind, 5)
        default = rng.choice(_list_unambiguous_values(pools["new"])) if version == 3 and rng.random() < 0.7 else None
        default_value = None if default is None else to_default_json(kind, default)
        await random_table.table.evolve([*new_columns, Col(len(columns) + 1, "new", kind, default_value)])
        for rows in random_table.table.rows.values():
            for row in rows:
                row["new"] = default
        files = _draw_files(rng, random_table, rng.choice([0, 1, 2]))
    await random_table.table.commit(files)
    return random_table


def _to_values_of_kind(kind: str, values: Sequence[Any]) -> list[Any]:
    if kind == "int":
        return [value for value in values if abs(value) < 2**31]
    if kind in ("decimal(9, 2)", "decimal(20, 2)"):
        return [value for value in values if abs(value) < 10 ** int(kind[8:].split(",")[0])]
    return list(values)


def _draw_files(rng: random.Random, table: RandomTable, count: int) -> list[DataFile]:
    files = []
    for _ in range(count):
        null_rate = rng.choice([0.0, 0.05, 0.3, 1.0])
        rows = [_draw_row(rng, table, null_rate) for _ in range(rng.choice([1, 4, 20, 70]))]
        for part in table.table.parts:
            name = next(column.name for column in table.table.columns if column.id == part.source)
            for row in rows:
                row[name] = rows[0][name]
        files.append(table.table.write_file(rows, rng=rng))
    return files


def _draw_row(rng: random.Random, table: RandomTable, null_rate: float) -> Row:
    return {
        column.name: None if rng.random() < null_rate else rng.choice(table.pools[column.name])
        for column in table.table.columns
    }


async def delete_random_rows(rng: random.Random, random_table: RandomTable) -> None:
    """Delete random rows of a table of version 2 that has data files. Do nothing for other tables.

    Version 3 does not allow new position delete files.
    """
    table = random_table.table
    if table.version > 2 or not table.data:
        return
    chosen_data = rng.sample(table.data, min(2, len(table.data)))
    position_deletes = [
        table.write_position_deletes(
            data_file, rng.sample(range(data_file.record_count), rng.randint(1, data_file.record_count))
        )
        for data_file in chosen_data
    ]
    await table.commit(deletes=position_deletes)


def store_in_duckdb(con: duckdb.DuckDBPyConnection, random_table: RandomTable) -> None:
    """Insert the live rows with the numbers of their files.

    Text and bytes are hexadecimal, which keeps their order; times and decimals are integers.
    """
    table = random_table.table
    live_rows = [
        (number, row)
        for number, file in enumerate(table.data)
        for position, row in enumerate(table.rows[file.path])
        if position not in table.deleted_positions.get(file.path, set())
    ]
    columns = {"file": pa.array([number for number, _ in live_rows], pa.int64())}
    for column in table.columns:
        columns[column.name] = _build_oracle_array(column.kind, [row[column.name] for _, row in live_rows])
    arrow = pa.table(columns)
    con.register("arrow", arrow)
    con.execute(f"CREATE OR REPLACE TABLE {table.name} AS SELECT * FROM arrow")


def _build_oracle_array(kind: str, values: Sequence[Any]) -> pa.Array:
    name = strip_parameters(kind)
    if name in ("string", "uuid", "fixed", "binary"):
        byte_values = [value.encode() if isinstance(value, str) else value for value in values]
        return pa.array([None if item is None else item.hex() for item in byte_values], pa.string())
    if name == "decimal":
        return pa.array(values, pa.decimal128(38, 0))
    return pa.array(values, {"boolean": pa.bool_(), "double": pa.float64()}.get(name, pa.int64()))


def draw_joins(
    rng: random.Random, table: RandomTable, counts: Counter[str]
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Return random joins.

    Returns:
        The joins as JSON of a plan request, the conditions on the table in DuckDB, and whether a plan can be exact.
    """
    joins, exists_conditions, is_exact = [], [], True
    for reference, dimension in table.referenced_tables.items():
        if rng.random() < 0.2:
            continue
        name, join_columns = dimension.table.name, {reference: "k"}
        if reference in table.second_references and rng.random() < 0.6:
            join_columns[table.second_references[reference]] = "k2"
            is_exact = False
            counts["joins on two columns"] += 1
        join: dict[str, Any] = {"table": ["db", name], "on": join_columns}
        conditions = [
            f"{table.table.name}.{fact_column} = {name}.{dimension_column}"
            for fact_column, dimension_column in join_columns.items()
        ]
        if rng.random() < 0.8:
            join["predicate"], condition = draw_predicate(rng, dimension)
            conditions.append(condition)
        likes, condition, are_likes_exact = draw_likes(rng, dimension)
        if likes:
            join["likes"] = likes
            conditions.append(condition)
            is_exact = is_exact and are_likes_exact
            counts["joins with LIKE"] += 1
        nested_joins, nested_conditions, is_nested_exact = draw_joins(rng, dimension, counts)
        if nested_joins:
            join["joins"] = nested_joins
            conditions += nested_conditions
            counts["nested joins"] += 1
        joins.append(join)
        exists_conditions.append(f"EXISTS (SELECT 1 FROM {name} WHERE {' AND '.join(conditions)})")
        is_exact = is_exact and is_nested_exact
    return joins, exists_conditions, is_exact


def draw_likes(rng: random.Random, table: RandomTable) -> tuple[list[list[dict[str, Any]]], str, bool]:
    """Return up to two conditions, each of one or two LIKE predicates on the table's texts that are joined by OR.

    Returns:
        The conditions as JSON, all conditions in DuckDB's form, and whether a plan is exact.
    """
    texts = [column.name for column in table.table.columns if column.kind == "string"]
    likes: list[list[dict[str, Any]]] = []
    conditions, is_exact = [], True
    for _ in range(rng.choice([0, 1, 1, 2]) if texts else 0):
        alternatives, duckdb_alternatives = [], []
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice(texts)
            value = str(rng.choice([pool for pool in table.pools[name] if isinstance(pool, str)] or ["a"]))
            part = value[: rng.randint(0, 3)].replace("\x00", "")
            # The escape character # precedes a % or _ of the text.
            pattern = (
                rng.choice(["", "%", "_"]) + part.replace("%", "#%").replace("_", "#_") + rng.choice(["", "%", "_%"])
            )
            like = {"column": name, "pattern": pattern.replace("##", "#"), "negated": rng.random() < 0.3}
            if "#" in pattern:
                # A text that contains # itself would need a further escape, so any text is accepted instead.
                like |= {"pattern": pattern, "escape": "#"} if "#" not in part else {"pattern": "%"}
            if rng.random() < 0.3:
                like["function"] = rng.choice(["lower", "upper"])
                is_exact = False
            alternatives.append(like)
            text = f"decode(unhex({table.table.name}.{name}))"
            text = f"{like['function']}({text})" if "function" in like else text
            escape = f" ESCAPE '{like['escape']}'" if "escape" in like else ""
            quoted_pattern = str(like["pattern"]).replace("'", "''")
            duckdb_alternatives.append(f"({text} {'NOT ' if like['negated'] else ''}LIKE '{quoted_pattern}'{escape})")
        likes.append(alternatives)
        conditions.append(f"({' OR '.join(duckdb_alternatives)})")
    return likes, " AND ".join(conditions), is_exact


async def check_star(seed: int, api: Api, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    rng = random.Random(f"star {seed}")
    predicate_keys_max = rng.choice([0, 2, 200])
    monkeypatch.setattr(dynamic_filters, "PREDICATE_KEYS_MAX", predicate_keys_max)
    monkeypatch.setattr(dynamic_filters, "LISTED_MAX", rng.choice([predicate_keys_max + 1, 5000]))
    monkeypatch.setattr(key_set, "_TABLE_BITS_PER_KEY", rng.choice([0, 1 << 12]))
    monkeypatch.setattr(bloom, "HASHED_MAX", rng.choice([3, 2000]))
    outer = [await draw_table(rng, api, f"o{seed}_{number}", [], is_fact=False) for number in range(rng.choice([0, 1]))]
    dims = [
        await draw_table(rng, api, f"d{seed}_{number}", outer if rng.random() < 0.6 else [], is_fact=False)
        for number in range(rng.choice([1, 2, 3]))
    ]
    fact = await draw_table(rng, api, f"s{seed}", dims, is_fact=True)
    is_deleted = rng.random() < 0.4
    if is_deleted:
        for random_table in (*outer, *dims, fact):
            await delete_random_rows(rng, random_table)
    indexing_mode, is_covered = rng.choice(["none", "some", "all", "all"]), True
    for column in fact.table.columns if fact.table.data and indexing_mode != "none" else ():
        if indexing_mode == "all" or rng.random() < 0.5:
            kind = "bitmap" if indexing_mode == "all" else rng.choice(["bitmap", "bloom", "record"])
            covered_files = (
                fact.table.data if indexing_mode == "all" else rng.sample(fact.table.data, len(fact.table.data) // 2)
            )
            if covered_files:
                is_covered &= await fact.table.index(f"i_{column.name}", kind, [column.name], covered_files)
    con = duckdb.connect()
    for random_table in (*outer, *dims, fact):
        store_in_duckdb(con, random_table)
    for number in range(PLANS_PER_SEED):
        context = f"seed {seed}, plan {number}"
        joins, conditions, is_exact = draw_joins(rng, fact, counts)
        body: dict[str, Any] = {"joins": joins, "files": True}
        if rng.random() < 0.4:
            body["where"], condition = draw_predicate(rng, fact)
            conditions.append(condition)
        answer = await api("POST", f"/api/v1/tables/db/{fact.table.name}/explain", body)
        assert answer.status == 200, f"{context}: {answer.raw!r}"
        query = f"SELECT DISTINCT file FROM {fact.table.name} WHERE {' AND '.join(conditions or ['true'])}"
        expected = {file for (file,) in con.execute(query).fetchall()}
        numbers_by_path = {file.path: position for position, file in enumerate(fact.table.data)}
        kept_numbers = {numbers_by_path[kept_file["file-path"]] for kept_file in answer.json["kept"]}
        assert expected <= kept_numbers, (
            f"{context}: {expected - kept_numbers} are lost\n{body}\n{query}\n{answer.json['joins']}"
        )
        reported_joins = answer.json.get("joins", [])
        assert all(join["used"] for join in reported_joins), f"{context}: {reported_joins}"
        if indexing_mode == "all" and is_covered and is_exact and not is_deleted and answer.json["complete"]:
            assert kept_numbers == expected, (
                f"{context}: {kept_numbers - expected} are kept\n{body}\n{query}\n{answer.json['stages']}"
            )
            counts["exact plans"] += 1
        counts["plans"] += 1
        counts["joins"] += len(reported_joins)
        counts["kept"] += len(kept_numbers)
        counts["files with joined rows"] += len(expected)
        counts["files"] += len(numbers_by_path)


async def run_campaign(seeds: Iterator[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    async with run_server(folder) as server:
        for seed in seeds:
            await check_star(seed, Api(server), monkeypatch, counts)
    return counts


@pytest.mark.parametrize("numbers", [range(11, 20), pytest.param(range(25), marks=pytest.mark.slow)], ids=["9", "25"])
async def test_plan_keeps_the_rows_that_duckdb_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: range
) -> None:
    """Plans keep all files with joined rows, and only these files if the indexes make the plan exact.

    The seeds of the fast tier include joins of every kind, each more than five times.
    """
    counts = await run_campaign(parse_seeds(numbers), tmp_path, monkeypatch)
    assert counts["kept"] < counts["files"], counts
    if "JOIN_SEEDS" not in os.environ:
        assert (
            min(
                counts["exact plans"],
                counts["nested joins"],
                counts["joins on two columns"],
                counts["files with joined rows"],
                counts["joins with LIKE"],
            )
            > 5
        ), counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_many_plans_keep_the_rows_that_duckdb_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await run_campaign(parse_seeds(SLOW_SEEDS), tmp_path, monkeypatch))["exact plans"] > 100
