"""The clustering policy of a table: the columns and the curve by which its rows are arranged in files.

The files of one rewrite form a layer. Together they contain the whole table once, and each file has a small range of
the columns. The names of the files contain the layer, because manifests have no field for it and snapshots expire.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from seamark.formats.iceberg.metadata.properties import parse_names
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest

CLUSTERED_BY = "clustered-by"
"""The key of a clustering's layout in the summary of its snapshot."""
COLUMNS = "seamark.clustering.columns"
CURVE = "seamark.clustering.curve"
JOINS = "seamark.clustering.joins"
"""The table property that defines the joined tables, as a JSON object by name.

The clustering columns refer to a column of a joined table as `name.column`.
"""
JOINS_MAX = 6
LINEAR, ZORDER, HILBERT = "linear", "zorder", "hilbert"
CURVES = (HILBERT, ZORDER, LINEAR)
LAYER_BYTES, LAYER_FILES = 4 << 30, 2000
"""The maximum size and number of the files that become one layer. They limit the disk space and the time of a commit.
"""
COLUMNS_MAX = 6
"""The maximum number of clustering columns. With more, a file would contain most of the range of each column."""
_FILE_NAME_END = re.compile(r"-clustered-([0-9a-f]{8})-([0-9a-f]{12})\.parquet\Z")
"""Matches the digest of a layout and a layer at the end of the name of a file."""
_DIGEST_CHARACTERS = 8
_SHOWN_MAX = 100


@dataclass(frozen=True)
class ClusteringLayout:
    """The columns and the curve of a clustering.

    Attributes:
        columns: The names of the columns. For the curve `linear`, the most important column is first.
        curve: The name of the curve, one of `CURVES`.
    """

    columns: tuple[str, ...]
    curve: str = HILBERT

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> ClusteringLayout | None:
        """Return the layout in a table's properties, or None if the property `seamark.clustering.columns` is not set.

        Raises:
            BadRequest: A property has an invalid value.
        """
        columns = parse_names(
            properties, COLUMNS, f"1 to {COLUMNS_MAX} different columns", minimum=1, maximum=COLUMNS_MAX
        )
        if not columns:
            return None
        curve = properties.get(CURVE, HILBERT)
        if curve not in CURVES:
            raise BadRequest(f"{CURVE} is {curve[:_SHOWN_MAX]!r}; it must be one of {', '.join(CURVES)}")
        return ClusteringLayout(columns, curve)

    @property
    def text(self) -> str:
        return f"{self.curve}({', '.join(self.columns)})"

    @property
    def digest(self) -> str:
        """The digest of the columns and the curve, as 8 hexadecimal digits, which the names of files contain."""
        return hashlib.sha256(msgspec.json.encode([self.curve, *self.columns])).hexdigest()[:_DIGEST_CHARACTERS]

    def make_suffix(self, layer: str) -> str:
        """Return the end of the names of a layer's files. A layer consists of all files of one rewrite.

        The names contain the layer, because manifests have no field for it.

        Args:
            layer: 12 hexadecimal digits that are different for each layer.
        """
        return f"-clustered-{self.digest}-{layer}.parquet"


class JoinDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table that a clustering joins, so that rows can be arranged by columns of this table.

    Attributes:
        table: The name of the table, with dots.
        on: The joined columns of `table`, by the column of the clustered table or of an earlier join that they must
            equal.
    """

    table: str
    on: dict[str, str]


def parse_joins(properties: Mapping[str, str]) -> dict[str, JoinDefinition]:
    """Return the joined tables by name. If the property is not set, the result is empty.

    Raises:
        BadRequest: The property is invalid.
    """
    text = properties.get(JOINS, "").strip()
    if not text:
        return {}
    try:
        tables = convert_json(text, dict[str, JoinDefinition])
    except msgspec.MsgspecError as error:
        raise BadRequest(
            f'{JOINS} is invalid ({error}); it must be like {{"customer": {{"table": "db.customers", "on": '
            f'{{"customer_id": "id"}}}}}}'
        ) from None
    if len(tables) > JOINS_MAX or not all(join.table and join.on for join in tables.values()):
        raise BadRequest(f"{JOINS} must have at most {JOINS_MAX} tables, each with a table and columns in on")
    return tables


def parse_layer(location: str) -> tuple[str, str] | None:
    """Return the digest of the layout and the layer of a file, or None if no clustering wrote the file.

    The layer identifies the rewrite that wrote the file. Both are in the name of the file.
    """
    match = _FILE_NAME_END.search(location)
    return None if match is None else (match[1], match[2])
