"""Random statements with what DuckDB takes and Trino does not: constants and columns of other types, and NaN."""

from __future__ import annotations

from tests.connector.trino.statements.statements import Column, Scope, Statements

LOOSE = {
    "long": ["'2'", "1.5", "2.0", "1e0", "'-1'"],
    "decimal(9, 2)": ["'1.5'", "2.25e0", "1.501"],
    "double": ["'NaN'::DOUBLE", "'1.5'", "'inf'::DOUBLE", "1.5::FLOAT"],
    "string": ["'B'", "E'a'"],
    "date": ["'2020-01-31'", "TIMESTAMP '2020-01-31 12:00:00'", "TIMESTAMP '2020-01-31 00:00:00'"],
    "timestamp": ["'2020-01-31'", "'2020-01-31 12:00:00'", "DATE '2020-01-31'", "'2020-01-31T12:00:00'"],
    "boolean": ["'true'", "1"],
}
WIDER = {("long", "double"), ("decimal(9, 2)", "long"), ("double", "decimal(9, 2)"), ("timestamp", "date")}


FORMATTED = {
    "%Y": ["2020", "2021", "0033"],
    "%Y-%m": ["2020-01", "2020-1", "2021-01"],
    "%Y%m%d": ["20200131", "20210101"],
    "%Y-%m-%d": ["2020-02-29", "2020-01-31"],
    "%d": ["31"],
}


class LooseStatements(Statements):
    other_groups = ("ALL",)

    def value(self, kind: str) -> str:
        return "'NaN'" if kind == "double" and self.chance(0.15) else super().value(kind)

    def literal(self, kind: str) -> str:
        return self.rng.choice(LOOSE[kind]) if self.chance(0.25) else super().literal(kind)

    def comparison(self, column: Column, scope: Scope) -> str:
        if column.kind == "string" and self.chance(0.1):
            return f"{self.reference(column, scope)} {self.rng.choice(['', 'NOT '])}ILIKE '{self.rng.choice('%_')}B%'"
        if column.kind in ("date", "timestamp") and self.chance(0.1):
            form = self.rng.choice(list(FORMATTED))
            text = f"strftime({self.reference(column, scope)}, '{form}')"
            return f"{text} {self.rng.choice(['=', '=', '<>'])} '{self.rng.choice(FORMATTED[form])}'"
        return super().comparison(column, scope)

    def equality(self, left: Scope, right: Scope, both: Scope) -> str:
        pairs = [
            (one, other)
            for one in left
            for other in right
            if ((one.kind, other.kind) in WIDER or (other.kind, one.kind) in WIDER)
            and self.can_name(one, both)
            and self.can_name(other, both)
        ]
        if not pairs or self.chance(0.6):
            return super().equality(left, right, both)
        one, other = self.rng.choice(pairs)
        return f"{self.reference(one, both)} = {self.reference(other, both)}"
