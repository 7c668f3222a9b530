"""Literals of SQL statements, as the dialects' readers find them."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamark.connector.plans.quotes import quote_text
from seamark.formats.iceberg.expressions.typed_literals import TypedLiteral

LOCAL, ZONED = "local", "zoned"
_KINDS = {"integer": "number", "decimal": "number", "binary": "bytes"}


@dataclass(frozen=True)
class Literal:
    """`kind`: null, boolean, integer, decimal, double, text, date, timestamp, uuid, binary.

    Attributes:
        value: Its text without quotes; of binary, hexadecimal.
    """

    kind: str
    value: str
    zone: str | None = None
    """For a date or timestamp: `LOCAL` if it has no zone, `ZONED` if it has one."""
    bits: int = field(default=64, compare=False)
    """The width of the integer type that the engine gives it. The smaller width if the text leaves two."""

    @property
    def sql(self) -> str:
        match self.kind:
            case "text":
                return quote_text(self.value)
            case "date" | "timestamp" | "uuid":
                return f"{self.kind.upper()} '{self.value}'"
            case "binary":
                return f"X'{self.value}'"
        return self.value

    @property
    def typed(self) -> TypedLiteral:
        """The literal in an Iceberg expression; there is none for null."""
        kind = "timestamptz" if self.kind == "timestamp" and self.zone == ZONED else self.kind
        return TypedLiteral(_KINDS.get(kind, kind), self.value.lower() if kind == "boolean" else self.value)
