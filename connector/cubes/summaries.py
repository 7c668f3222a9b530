"""The use of cubes by a query, for users and for headers."""

from __future__ import annotations

from dataclasses import dataclass

ON, EXACT, OFF = "on", "exact", "off"
CUBE_USES = (ON, EXACT, OFF)
"""Whether queries use cubes. With `exact`, they do not use sums of floats, whose last digits depend on the order."""


@dataclass(frozen=True)
class CubeSummary:
    """The use of cubes by a query of one table.

    Attributes:
        index: The name of the cube, or None if the query is answered from rows only.
        files: The number of data files that are answered from the cube.
        row_files: The number of data files whose rows are read.
        reason: The reason why no cube is used.
    """

    index: str | None
    files: int
    row_files: int
    reason: str | None = None

    @property
    def text(self) -> str:
        """The summary in one line."""
        if self.index is None:
            return f"no cube: {self.reason}"
        return f"cube {self.index} answers {self.files} files; rows of {self.row_files} files are read"


def check_cube_use(use: str) -> None:
    """Check a value of the option `cubes`.

    Raises:
        ValueError: The value is not one of `CUBE_USES`.
    """
    if use not in CUBE_USES:
        raise ValueError(f"cubes must be one of {', '.join(CUBE_USES)}, not {use!r}")
