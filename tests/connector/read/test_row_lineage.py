"""Row lineage through upserts, against a dict: row ids, and the commit that last changed each row."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.lineage import NAMES
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import COPY_ON_WRITE, MERGE_ON_READ, delete, upsert
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import COLUMNS, FIELDS, build_rows, create_upsert_table
from tests.seeds import mark_fast

Row = tuple[Any, ...]


def read_lineage(client: SeamarkClient, name: str = "db.t") -> dict[int, tuple[int | None, int | None]]:
    """Return (row id, last updated sequence number) for each `id`."""
    values = scan(client, name, ["id", *NAMES]).to_arrow().to_pylist()
    assert len({value["id"] for value in values}) == len(values)
    return {value["id"]: (value["_row_id"], value["_last_updated_sequence_number"]) for value in values}


def read_sequence_number(client: SeamarkClient) -> int:
    """Return the sequence number of the table's last commit."""
    return int(client._request_json("GET", "/v1/namespaces/db/tables/t", {})["metadata"]["last-sequence-number"])


class LineageModel:
    """The expected rows and their lineage, in dicts.

    The table assigns the id of a new row, and the model copies it.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.ids: dict[int, tuple[int, int]] = {}
        self.used_ids: set[int] = set()

    def check(
        self, client: SeamarkClient, kept_ids: set[int], changed_ids: set[int], new_ids: set[int], context: str
    ) -> None:
        """Check the rows after a step.

        Rows with `kept_ids` keep everything. Rows with `changed_ids` keep their row ids, and rows with `new_ids` have
        row ids that were never used before. Changed and new rows have the last sequence number.
        """
        lineage_rows = read_lineage(client)
        assert lineage_rows.keys() == self.rows.keys() == kept_ids | changed_ids | new_ids, context
        sequence_number = read_sequence_number(client)
        for id_ in kept_ids:
            assert lineage_rows[id_] == self.ids[id_], f"{context}: the lineage of the copied row {id_} has changed"
        for id_ in changed_ids:
            assert lineage_rows[id_] == (self.ids[id_][0], sequence_number), f"{context}: row {id_} was updated"
        for id_ in new_ids:
            row_id, number = lineage_rows[id_]
            assert number == sequence_number, f"{context}: row {id_} is new"
            assert row_id is not None, context
            assert row_id not in self.used_ids, f"{context}: row {id_} has an id that another row had"
            self.used_ids.add(row_id)
        self.ids = {id_: (row_id or 0, number or 0) for id_, (row_id, number) in lineage_rows.items()}
        assert len({row_id for row_id, _ in lineage_rows.values()}) == len(lineage_rows), context
        actual_rows = scan(client, "db.t", COLUMNS).to_arrow().to_pylist()
        assert {row["id"]: tuple(row.values()) for row in actual_rows} == self.rows, context


@pytest.mark.parametrize("seed", mark_fast(range(6), 1))
@pytest.mark.parametrize("spec", mark_fast([(("bucket[4]", 1),), (), (("identity", 2),)], 1))
def test_rows_keep_their_ids_when_they_move_to_other_files(
    client: IndexClient, seed: int, spec: tuple[tuple[str, int], ...]
) -> None:
    rng = random.Random(100 * seed + len(spec))
    create_upsert_table(client, spec=spec, properties={"write.parquet.row-group-size-bytes": "400"})
    model = LineageModel()
    for step in range(14):
        context = f"seed {seed}, spec {spec}, step {step}"
        drawn_ids = rng.sample(range(50), 8)
        land_by_id = {number: rng.choice(("de", "fr", None)) for number in drawn_ids}
        live_ids = {number for number in drawn_ids if number in model.rows}
        mode = rng.choice((COPY_ON_WRITE, COPY_ON_WRITE, MERGE_ON_READ))
        match rng.choice(("append", "upsert", "upsert", "combined", "partial", "delete")):
            case "append":
                new_rows = {
                    number: (number, land_by_id[number], step, "new") for number in drawn_ids if number not in live_ids
                }
                append(client, "db.t", build_rows(*new_rows.values()))
                model.rows |= new_rows
                if new_rows:
                    model.check(
                        client, model.ids.keys() & model.rows.keys(), set(), set(new_rows), f"{context}, append"
                    )
            case "upsert":
                new_rows = {number: (number, land_by_id[number], step, "whole") for number in drawn_ids}
                upsert(client, "db.t", build_rows(*new_rows.values()), keys=["id"], mode=mode)
                kept_ids = set(model.rows) - live_ids
                model.rows |= new_rows
                changed_ids = live_ids if mode == COPY_ON_WRITE else set()
                model.check(client, kept_ids, changed_ids, set(new_rows) - changed_ids, f"{context}, {mode}")
            case "combined":
                new_rows = {
                    number: (number, land_by_id[number], rng.choice((step - 3, step + 1)), "later")
                    for number in drawn_ids
                }
                stale_ids = {id_ for id_ in live_ids if model.rows[id_][2] > new_rows[id_][2]}
                upsert(client, "db.t", build_rows(*new_rows.values()), keys=["id"], precombine="ts", mode=mode)
                kept_ids = set(model.rows) - live_ids | stale_ids
                model.rows |= {id_: row for id_, row in new_rows.items() if id_ not in stale_ids}
                if len(stale_ids) < len(new_rows):
                    model.check(
                        client,
                        kept_ids,
                        live_ids - stale_ids,
                        set(new_rows) - live_ids,
                        f"{context}, combined, {mode}",
                    )
            case "partial":
                new_rows = {number: (number, land_by_id[number], step, None) for number in drawn_ids}
                upsert(client, "db.t", build_rows(*new_rows.values()), keys=["id"], columns=["ts"], mode=mode)
                kept_ids, inserted_ids = set(model.rows) - live_ids, set(new_rows) - live_ids
                for number in drawn_ids:
                    old_row = model.rows.get(number, (number, None, None, None))
                    model.rows[number] = (number, old_row[1], step, old_row[3])
                model.check(client, kept_ids, live_ids, inserted_ids, f"{context}, partial, {mode}")
            case "delete":
                delete(client, "db.t", keys=pa.table({"id": drawn_ids}), mode=mode)
                model.rows = {id_: row for id_, row in model.rows.items() if id_ not in live_ids}
                if live_ids:
                    model.check(client, set(model.rows), set(), set(), f"{context}, delete, {mode}")


def test_rows_from_before_an_upgrade_receive_ids_when_they_are_rewritten(client: IndexClient) -> None:
    create_upsert_table(client, version=2)
    append(client, "db.t", build_rows((1, "de", 1, "a"), (2, "de", 1, "b")))
    append(client, "db.t", build_rows((3, "de", 1, "c")))
    upgrade = {"updates": [{"action": "upgrade-format-version", "format-version": 3}], "requirements": []}
    client._request_json("POST", "/v1/namespaces/db/tables/t", {}, upgrade)
    assert read_lineage(client) == dict.fromkeys((1, 2, 3), (None, None))
    upsert(client, "db.t", build_rows((2, "fr", 2, "B")), keys=["id"], mode=COPY_ON_WRITE)
    first_lineage = read_lineage(client)
    assert {id_: number for id_, (_, number) in first_lineage.items()} == {1: 3, 2: 3, 3: 2}, "row 3 stays in its file"
    assert sorted(row_id for row_id, _ in first_lineage.values() if row_id is not None) == [0, 1, 2]
    upsert(client, "db.t", build_rows((1, "fr", 3, "A"), (3, "fr", 3, "C")), keys=["id"], mode=COPY_ON_WRITE)
    assert read_lineage(client) == {1: (first_lineage[1][0], 4), 2: first_lineage[2], 3: (first_lineage[3][0], 4)}


def test_files_have_lineage_columns_only_if_rows_need_them(client: IndexClient, server: ServerThread) -> None:
    """Files with only new rows, and files of tables without lineage, have no lineage columns."""
    for version, lineage_columns in ((2, set()), (3, set(NAMES))):
        create_upsert_table(client, f"t{version}", version=version)
        files_before = set(server.home.rglob("*.parquet"))
        upsert(
            client, f"db.t{version}", build_rows((1, "de", 1, "a"), (2, "de", 1, "b")), keys=["id"], mode=COPY_ON_WRITE
        )
        (added_path,) = set(server.home.rglob("*.parquet")) - files_before
        assert pq.read_schema(added_path).names == list(COLUMNS)
        files_before = set(server.home.rglob("*.parquet"))
        upsert(
            client, f"db.t{version}", build_rows((2, "fr", 2, "B"), (3, "x", 2, "c")), keys=["id"], mode=COPY_ON_WRITE
        )
        (copied_path,) = set(server.home.rglob("*.parquet")) - files_before
        schema = pq.read_schema(copied_path)
        assert set(schema.names) == {*COLUMNS, *lineage_columns}
        if lineage_columns:
            ids = [int(schema.field(name).metadata[b"PARQUET:field_id"]) for name in NAMES]
            assert ids == [2147483540, 2147483539]  # The format reserves these field ids.
            row_ids = sorted((value["id"], value["_row_id"]) for value in pq.read_table(copied_path).to_pylist())
            assert row_ids == [(1, 0), (2, 1), (3, None)]


def test_table_with_a_column_of_a_reserved_name_must_rename_it(client: IndexClient) -> None:
    create_upsert_table(client, fields=[*FIELDS, {"id": 5, "name": "_row_id", "required": False, "type": "long"}])
    append(client, "db.t", build_rows((1, "de", 1, "a")))
    with pytest.raises(Unwritable, match="the table has a column _row_id, a name that the format reserves"):
        upsert(client, "db.t", build_rows((1, "fr", 2, "B")), keys=["id"], mode=COPY_ON_WRITE)
    upsert(client, "db.t", build_rows((1, "fr", 2, "B")), keys=["id"], mode=MERGE_ON_READ)
    assert scan(client, "db.t", ["id", "land", "_row_id"]).to_arrow().to_pylist() == [
        {"id": 1, "land": "fr", "_row_id": None}
    ]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_column_with_a_reserved_name_is_upserted_by_merge_on_read(client: IndexClient, version: int) -> None:
    create_upsert_table(
        client, fields=[*FIELDS, {"id": 5, "name": "_row_id", "required": False, "type": "long"}], version=version
    )

    def build_rows_with_ids(*rows: tuple[int, int, int]) -> pa.Table:
        values_by_name = [{"id": id_, "ts": ts, "_row_id": row_id} for id_, ts, row_id in rows]
        return pa.Table.from_pylist(
            values_by_name, pa.schema([("id", pa.int64()), ("ts", pa.int32()), ("_row_id", pa.int64())])
        )

    append(client, "db.t", build_rows_with_ids((1, 5, 10), (2, 5, 20), (3, 5, 30)))
    upsert(client, "db.t", build_rows_with_ids((1, 1, 11), (4, 1, 40)), keys=["id"], mode=MERGE_ON_READ)
    upsert(
        client, "db.t", build_rows_with_ids((2, 4, 21), (3, 6, 31)), keys=["id"], precombine="ts", mode=MERGE_ON_READ
    )
    upsert(
        client,
        "db.t",
        build_rows_with_ids((3, 7, 32), (5, 7, 50)),
        keys=["id"],
        columns=["_row_id"],
        mode=MERGE_ON_READ,
    )
    upsert(client, "db.t", build_rows_with_ids((4, 8, 99)), keys=["id"], columns=["ts"], mode=MERGE_ON_READ)
    values = scan(client, "db.t", ["id", "ts", "_row_id"]).to_arrow().sort_by("id").to_pylist()
    assert [tuple(value.values()) for value in values] == [
        (1, 1, 11),
        (2, 5, 20),
        (3, 6, 32),
        (4, 8, 40),
        (5, None, 50),
    ]
