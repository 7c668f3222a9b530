"""What is known of a table's place in a statement, of whichever engine: where it stands, and which rows can matter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Join:
    """A row matters only beside one of another scan's."""

    scan: int
    """The other one's number among the statement's."""
    on: tuple[tuple[str, str], ...]
    """Columns that are equal: this table's, the other's."""


@dataclass(frozen=True)
class Scan:
    """A reference to a table; names are as the engine compares them."""

    catalog: str | None
    schema: str | None
    table: str
    start: int
    end: int
    """Characters of the reference in the statement, [start, end), FOR VERSION and alias not among them."""
    name_start: int
    """Where the table's own name begins, behind catalog and schema."""
    alias_needed: str | None
    """What to add behind the new name (and behind FOR VERSION), where the reference has no alias."""
    snapshot_id: int | None
    """FOR VERSION AS OF a number."""
    version_span: tuple[int, int] | None
    predicate: str | None
    """SQL over the table's bare column names, as `seamark explain` takes it; None: nothing prunes.

    It is to be bound to the schema that the scan reads: a name of an older schema may be another column's."""
    named: frozenset[str] = frozenset()
    """The columns in the predicate."""
    joins: tuple[Join, ...] = ()
    """They go round: of two scans that are joined each has the other one."""
    quoted: bool = False
    """The reference stands in a text within the statement, in which every quote is doubled."""
