"""Joins over HTTP: what plan-tables and explain make of them, what they answer, and all that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.client import Api
from tests.planner.stars import Col, StarTable

OWN = "/api/v1/tables/db"
SUPPLIER = [
    Col(1, "s_key", "int"),
    Col(2, "s_region", "string"),
    Col(3, "s_nation", "long"),
    Col(4, "s_rate", "double"),
]
FACT = [Col(1, "f_key", "long"), Col(2, "f_supplier", "long"), Col(3, "f_rate", "double"), Col(4, "f_name", "string")]
REGIONS = ("AFRICA", "AMERICA", "ASIA", "EUROPE")


class Star(Api):
    """`db.fact` of 20 files, file n of which has the suppliers from 100 n on; `db.supplier` of 2,000 suppliers, every
    fourth of one region, and `db.nation` of 25, which suppliers are of in turn."""

    fact: StarTable
    supplier: StarTable
    nation: StarTable

    async def plan(self, *joins: dict[str, Any], **body: Any) -> dict[str, Any]:
        answer = await self("POST", f"{OWN}/fact/plan-tables", {**body, "joins": list(joins)})
        assert answer.status == 200, answer.raw
        found: dict[str, Any] = answer.json
        return found

    async def kept(self, *joins: dict[str, Any], **body: Any) -> list[int]:
        """Numbers of the files that are left, which `explain` and a plan table agree on."""
        answer = await self("POST", f"{OWN}/fact/explain", {**body, "joins": list(joins), "files": True})
        assert answer.status == 200, answer.raw
        assert (await self.plan(*joins, **{{"where": "predicate"}.get(name, name): body[name] for name in body}))[
            "files"
        ] == answer.json["files"]
        paths = {one.path: number for number, one in enumerate(self.fact.data)}
        return sorted(paths[one["file-path"]] for one in answer.json["kept"])


@pytest.fixture
async def star(api: Api) -> Star:
    star = Star(api.server)
    star.fact = await StarTable.create(api, "fact", FACT)
    files = [star.fact.file([_sale(100 * number + at) for at in range(0, 100, 5)]) for number in range(20)]
    await star.fact.commit(files)
    star.supplier = await StarTable.create(api, "supplier", SUPPLIER)
    rows = [_supplier(number) for number in range(2000)]
    await star.supplier.commit([star.supplier.file(rows[:1500]), star.supplier.file(rows[1500:])])
    star.nation = await StarTable.create(api, "nation", [Col(1, "n_key", "long"), Col(2, "n_name", "string")])
    nations = [{"n_key": number, "n_name": f"n{number:02d}"} for number in range(25)]
    await star.nation.commit([star.nation.file(nations)])
    return star


def _sale(supplier: int) -> dict[str, Any]:
    return {"f_key": supplier * 10, "f_supplier": supplier, "f_rate": 0.5, "f_name": f"s{supplier}"}


def _supplier(number: int) -> dict[str, Any]:
    return {"s_key": number, "s_region": REGIONS[number % 4], "s_nation": number % 25, "s_rate": 0.5}


def supplier(predicate: str | None = None, **more: Any) -> dict[str, Any]:
    said = {} if predicate is None else {"predicate": predicate}
    return {"table": ["db", "supplier"], "on": {"f_supplier": "s_key"}, **said, **more}


async def test_files_stay_that_may_hold_a_row_of_the_joined_table(star: Star) -> None:
    assert await star.kept(supplier("s_key BETWEEN 250 AND 449")) == [2, 3, 4]
    assert await star.kept(supplier("s_key IN (255, 1990)")) == [2, 19]
    assert await star.kept(supplier("s_key BETWEEN 250 AND 1449")) == list(range(2, 15))
    assert await star.kept(supplier("s_key > 5000")) == []
