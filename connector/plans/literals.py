"""Literals of SQL statements. The parsers of all dialects return them in this form."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamark.connector.plans.quotes import quote_text
from seamark.formats.iceberg.expressions.typed_literals import TypedLiteral

LOCAL, ZONED = "local", "zoned"
_KINDS = {"integer": "number", "decimal": "number", "binary": "bytes"}


@dataclass(frozen=True)
class Literal:
    """A literal of a statement.

    Attributes:
        kind: `null`, `boolean`, `integer`, `decimal`, `double`, `text`, `date`, `timestamp`, `uuid` or `binary`.
        value: The text without quotes. For `binary`, hexadecimal digits.
    """

    kind: str
    value: str
    zone: str | None = None
    """The kind of time zone of a date or timestamp: `LOCAL` if it has no zone, `ZONED` if it has one."""
    bits: int = field(default=64, compare=False)
    """The width of the integer type in the engine. If two widths are possible, the smaller width."""

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
        """The literal of an Iceberg expression. It is invalid for the kind `null`, for which Iceberg has no literal."""
        kind = "timestamptz" if self.kind == "timestamp" and self.zone == ZONED else self.kind
        return TypedLiteral(_KINDS.get(kind, kind), self.value.lower() if kind == "boolean" else self.value)
