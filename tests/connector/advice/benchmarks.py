"""The predicates of the Star Schema Benchmark and of TPC-DS on their fact tables, with the attributes of dimensions.

The rows are random, with the hierarchies of the attributes. Texts are replaced by numbers, so a region is 0 to 4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

_FIRST_YEAR, _YEARS = 1992, 7
_SSB = (
    "d_year = 1993 AND lo_discount >= 1 AND lo_discount <= 3 AND lo_quantity < 25",
    "d_yearmonth = 199401 AND lo_discount >= 4 AND lo_discount <= 6 AND lo_quantity >= 26 AND lo_quantity <= 35",
    "d_week = 6 AND d_year = 1994 AND lo_discount >= 5 AND lo_discount <= 7 AND lo_quantity > 25 AND lo_quantity <= 35",
    "p_category = 11 AND s_region = 1",
    "p_brand >= 460 AND p_brand <= 467 AND s_region = 2",
    "p_brand = 478 AND s_region = 3",
    "c_region = 2 AND s_region = 2 AND d_year >= 1992 AND d_year <= 1997",
    "c_nation = 9 AND s_nation = 9 AND d_year >= 1992 AND d_year <= 1997",
    "c_city IN (91, 95) AND s_city IN (91, 95) AND d_year >= 1992 AND d_year <= 1997",
    "c_city IN (91, 95) AND s_city IN (91, 95) AND d_yearmonth = 199712",
    "c_region = 1 AND s_region = 1 AND p_mfgr IN (0, 1)",
    "c_region = 1 AND s_region = 1 AND d_year IN (1997, 1998) AND p_mfgr IN (0, 1)",
    "c_region = 1 AND s_nation = 9 AND d_year IN (1997, 1998) AND p_category = 13",
)
"""The 13 queries of the Star Schema Benchmark."""
_TPC_DS = (
    "i_manufact_id = 128 AND d_moy = 11",
    "cd_gender = 1 AND cd_marital = 2 AND cd_education = 3 AND d_year = 2000",
    "d_year = 2001 AND ss_sales_price >= 100 AND ss_sales_price <= 150",
    "i_manager_id = 8 AND d_moy = 11 AND d_year = 1998",
    "cd_gender = 0 AND cd_marital = 4 AND cd_education = 1 AND d_year = 2002 AND s_state = 3",
    "ss_quantity >= 0 AND ss_quantity <= 5 AND ss_list_price >= 8 AND ss_list_price <= 18",
    "ss_quantity >= 6 AND ss_quantity <= 10 AND ss_list_price >= 90 AND ss_list_price <= 100",
    "ss_quantity >= 11 AND ss_quantity <= 15 AND ss_list_price >= 142 AND ss_list_price <= 152",
    "ss_quantity >= 16 AND ss_quantity <= 20 AND ss_list_price >= 135 AND ss_list_price <= 145",
    "i_manager_id = 1 AND d_moy = 11 AND d_year = 2000",
    "hd_dep_count = 4 AND d_year >= 1999 AND d_year <= 2001",
    "d_year = 2000 AND ss_sales_price >= 50 AND ss_sales_price <= 100",
    "i_manager_id = 28 AND d_moy = 11 AND d_year = 1999",
    "i_category IN (1, 4, 7) AND d_year = 1999",
    "t_hour = 8 AND hd_dep_count = 4",
    "t_hour = 20 AND hd_dep_count = 7",
    "i_category IN (2, 5, 8) AND d_year = 1999 AND d_moy >= 2 AND d_moy <= 3",
)
"""Predicates of the queries 3, 7, 13, 19, 27, 28, 42, 46, 48, 55, 89, 88, 96 and 98 of TPC-DS on `store_sales`."""


def _make_ssb_part(rng: np.random.Generator, rows: int) -> pa.Table:
    """Return random rows. A nation has 10 cities, a region 5 nations, a category 40 brands, a maker 5 categories."""
    years, days = rng.integers(0, _YEARS, rows), rng.integers(0, 364, rows)
    customer_city, supplier_city, brand = (
        rng.integers(0, 250, rows),
        rng.integers(0, 250, rows),
        rng.integers(0, 1000, rows),
    )
    return pa.table(
        {
            "lo_quantity": rng.integers(1, 51, rows),
            "lo_discount": rng.integers(0, 11, rows),
            "lo_revenue": rng.integers(1, 10_000_000, rows),
            "d_year": _FIRST_YEAR + years,
            "d_yearmonth": (_FIRST_YEAR + years) * 100 + 1 + days // 31,  # Each month has 31 days.
            "d_week": 1 + days // 7,
            "c_city": customer_city,
            "c_nation": customer_city // 10,
            "c_region": customer_city // 50,
            "s_city": supplier_city,
            "s_nation": supplier_city // 10,
            "s_region": supplier_city // 50,
            "p_brand": brand,
            "p_category": brand // 40,
            "p_mfgr": brand // 200,
        }
    )


def _make_tpc_ds_part(rng: np.random.Generator, rows: int) -> pa.Table:
    list_price = np.round(rng.uniform(1, 200, rows), 2)
    ranges = {
        "ss_quantity": (1, 101),
        "d_year": (1998, 2004),
        "d_moy": (1, 13),
        "i_category": (0, 10),
        "i_manufact_id": (1, 1001),
        "i_manager_id": (1, 101),
        "s_state": (0, 9),
        "cd_gender": (0, 2),
        "cd_marital": (0, 5),
        "cd_education": (0, 7),
        "hd_dep_count": (0, 10),
        "t_hour": (8, 22),
    }
    columns = {name: rng.integers(low, high, rows) for name, (low, high) in ranges.items()}
    prices = {"ss_list_price": list_price, "ss_sales_price": np.round(list_price * rng.uniform(0.2, 1, rows), 2)}
    return pa.table({**columns, **prices})


BENCHMARKS: dict[str, tuple[Callable[[np.random.Generator, int], pa.Table], tuple[str, ...]]] = {
    "ssb": (_make_ssb_part, _SSB),
    "tpc-ds": (_make_tpc_ds_part, _TPC_DS),
}
"""The function that makes the rows of one file, and the predicates, by the name of the benchmark."""
