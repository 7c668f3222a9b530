"""The clustering policy of a table: by which columns, and along which curve, its rows are laid out in files.

Files of one rewrite form a layer: together they cover the table once, each with a small range of the columns. The names
of its files contain the layer, because manifests have no place for it and snapshots expire.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from seamark.formats.iceberg.metadata.properties import as_names
from seamark.formats.runtime.decoding import from_json
from seamark.formats.runtime.errors import BadRequest

CLUSTERED_BY = "clustered-by"
"""A key of the summary of a clustering's snapshot, with its layout."""
COLUMNS = "seamark.clustering.columns"
CURVE = "seamark.clustering.curve"
JOINS = "seamark.clustering.joins"
"""A JSON object of the tables that `name.column` in the columns refers to, by name."""
JOINS_MAX = 6
LINEAR, ZORDER, HILBERT = "linear", "zorder", "hilbert"
CURVES = (HILBERT, ZORDER, LINEAR)
LAYER_BYTES, LAYER_FILES = 4 << 30, 2000
"""Limits of the files that become one layer: they bound the disk space and the time of a commit."""
COLUMNS_MAX = 6
"""With more columns a file covers most of the range of each."""
_NAME = re.compile(r"-clustered-([0-9a-f]{8})-([0-9a-f]{12})\.parquet")


@dataclass(frozen=True)
class ClusteringLayout:
    """`columns`: by name; for the curve `linear` in the order of their weight."""

    columns: tuple[str, ...]
    curve: str = HILBERT

    @staticmethod
    def of(properties: Mapping[str, str]) -> ClusteringLayout | None:
        """Return None for a table without the property `seamark.clustering.columns`.

        Raises:
            BadRequest: For an invalid value.
        """
        columns = as_names(properties, COLUMNS, f"1 to {COLUMNS_MAX} different columns", least=1, most=COLUMNS_MAX)
        if not columns:
            return None
        curve = properties.get(CURVE, HILBERT)
        if curve not in CURVES:
            raise BadRequest(f"{CURVE} is {curve[:100]!r}; it must be {', '.join(CURVES)}")
        return ClusteringLayout(columns, curve)

    @property
    def text(self) -> str:
        return f"{self.curve}({', '.join(self.columns)})"

    @property
    def digest(self) -> str:
        """8 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode([self.curve, *self.columns])).hexdigest()[:8]

    def suffix(self, layer: str) -> str:
        """Return the end of the names of a layer's files.

        Args:
            layer: 12 hexadecimal digits, different for each layer.
        """
        return f"-clustered-{self.digest}-{layer}.parquet"


class JoinDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`table`: its name with dots.

    Attributes:
        on: Column of the clustered table, or of an earlier join, to column of `table`.
    """

    table: str
    on: dict[str, str]


def joins_of(properties: Mapping[str, str]) -> dict[str, JoinDefinition]:
    """Return the joined tables, by name; empty without the property.

    Raises:
        BadRequest: For an invalid value.
    """
    text = properties.get(JOINS, "").strip()
    if not text:
        return {}
    try:
        tables = from_json(text, dict[str, JoinDefinition])
    except msgspec.MsgspecError as error:
        raise BadRequest(
            f'{JOINS} is invalid ({error}); it must be like {{"customer": {{"table": "db.customers", "on": '
            f'{{"customer_id": "id"}}}}}}'
        ) from None
    if len(tables) > JOINS_MAX or not all(join.table and join.on for join in tables.values()):
        raise BadRequest(f"{JOINS} must have at most {JOINS_MAX} tables, each with a table and columns in on")
    return tables


def layer_of(location: str) -> tuple[str, str] | None:
    """Return the digest of the layout, and the layer, of a file that a clustering wrote."""
    match = _NAME.search(location[-64:])
    return None if match is None or match.end() < len(location[-64:]) else (match[1], match[2])
