"""Tests of star joins whose tables the analysis of a statement has found, on tables of a small test server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sqlglot
from aiohttp import web
from aiohttp.test_utils import TestServer

from seamark.connector.cubes.dialects import TRINO, NotFromCube
from seamark.connector.cubes.star_scans import StarScan, translate_star
from seamark.connector.plans.async_client import KnownTable, open_seamark
from seamark.connector.plans.scan import Scan
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import encode_refs_view
from seamark.formats.index.definitions import PREFIX, define_index
from tests.iceberg.samples import add_snapshots, apply_json_updates, build_field, build_schema, build_table

TEXT = "SELECT d.region, sum(f.amount) FROM db.facts f, db.shops d WHERE f.shop_id = d.id GROUP BY d.region"
SHOPS = (build_field(1, "id", "int"), build_field(2, "region", "string"), build_field(3, "region_new", "string"))
RENAMED_FIELDS = (
    build_field(1, "id", "int"),
    build_field(2, "region_old", "string"),
    build_field(3, "region", "string"),
)


def build_facts(attribute_id: int) -> TableMetadata:
    """Return the metadata of a table `facts` with a cube that groups by a column of `db.shops`.

    `lookup[db.shops@7:1:ID:TYPE](shop_id)` is the value of the field ID in the row of `db.shops` whose field 1 equals
    `shop_id`, at snapshot 7. The id 0 stands for whether this row exists.

    Args:
        attribute_id: The field id of the column. The cube reads it from snapshot 7 of `db.shops`.
    """
    fields = build_schema(build_field(1, "shop_id", "int"), build_field(2, "amount", "long"))
    facts = build_table(schema=fields)
    terms = [f"lookup[db.shops@7:1:{number}](shop_id)" for number in ("0:boolean", f"{attribute_id}:string")]
    cube = define_index("by_region", "cube", terms, facts.current_schema, measures=["sum(amount)"])
    return add_snapshots(build_table(schema=fields, properties={f"{PREFIX}by_region": cube.property_text}), 5)


async def load_tables(*tables: TableMetadata) -> list[KnownTable]:
    """Return the tables as the client reads them from a server."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/config":
            return web.json_response({"defaults": {}, "overrides": {}})
        body = encode_refs_view(tables[int(request.path.rpartition("/")[2])]).decode()
        return web.Response(text=f'{{"metadata": {body}}}', content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with (
        TestServer(app, host="127.0.0.1") as server,
        open_seamark(str(server.make_url("")), token=None, lease_s=60) as client,
    ):
        loaded_tables = [await client.load_table(("db", str(number))) for number in range(len(tables))]
    return [table for table in loaded_tables if table is not None]


def translate_to_cube(tables: Sequence[KnownTable]) -> str:
    """Return the statement that reads the groups of the cube of `facts` instead of joining `facts` with `shops`."""
    scans = []
    for name, table in zip(("facts", "shops"), tables, strict=True):
        start = TEXT.index(f"db.{name}")
        end, name_start = start + len(f"db.{name}"), start + len("db.")
        scan = Scan(
            catalog=None, schema="db", table=name, start=start, end=end, name_start=name_start,
            alias_needed=None, snapshot_id=None, version_span=None, condition=None,
        )  # fmt: skip
        scans.append(StarScan(scan, ("db", name), table, f"db.{name} FOR VERSION AS OF {table.snapshot_id}"))
    tree = sqlglot.parse_one(TEXT, dialect="trino")
    _, statement = translate_star(tree, scans, lambda node: int(node.parts[0].meta["start"]), TRINO, floats=True)
    return statement.write("groups", "db.facts FOR VERSION AS OF 9")


async def test_renamed_columns_of_a_dimension_table_are_not_read_with_the_schema_of_its_snapshot() -> None:
    shop_metadata = add_snapshots(build_table(schema=build_schema(*SHOPS)), 7)
    statement = translate_to_cube(await load_tables(build_facts(2), shop_metadata))
    assert 'LEFT JOIN db.shops FOR VERSION AS OF 7 AS "d" ON' in statement
    renamed_metadata = apply_json_updates(
        shop_metadata,
        {"action": "add-schema", "schema": build_schema(*RENAMED_FIELDS, schema_id=1), "last-column-id": 3},
        {"action": "set-current-schema", "schema-id": -1},
    )
    # The snapshot 7 has the name `region` for the field 2, and the cube has the field 3.
    with pytest.raises(NotFromCube, match="columns of a dimension table have changed since its current snapshot"):
        translate_to_cube(await load_tables(build_facts(3), renamed_metadata))
