"""Random predicates whose operands have several types; an engine first converts them to one type."""

from __future__ import annotations

import random

NUMBERS = ("big", "fine", "id", "k", "price", "rate", "x", "y")
TIMES = ("d", "ts", "tz")
_CONVERSION_SENSITIVE_VALUES = {
    "big": ("9007199254740992", "9007199254740993", "-9007199254740993"),
    "fine": ("0.3", "0.299999999999999999", "0.300000000000000001"),
    "price": ("0.3", "-250", "12.25"),
    "x": ("0.1", "1.5", "-2.25"),
    "y": ("0.1", "1.5", "-2.25"),
}
"""Values that become equal to others when they are converted."""
_COMMON_NUMBERS = (
    "1",
    "3",
    "7",
    "30",
    "0.5",
    "1.50",
    "1e0",
    "0.3e0",
    "1e300",
    "9007199254740993e0",
    "-2.25e0",
    "0.1e0",
    "1e10",
)
_DAYS = tuple(f"2022-01-{day:02d}" for day in (8, 15, 20, 28))
_NULLS = ("NULL", "CAST(NULL AS double)", "CAST(NULL AS bigint)")


class MixedPredicates:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw_predicate(self, prefix: str = "") -> str:
        column = self._rng.choice((*NUMBERS, *NUMBERS, *TIMES))
        return self._draw_comparison(prefix, column, TIMES if column in TIMES else NUMBERS)

    def draw_operand(self, column: str) -> str:
        rng = self._rng
        if column in TIMES:
            day, clock = rng.choice(_DAYS), rng.choice(("00:00:00", "12:00:00", "01:00:00"))
            zone = rng.choice(("UTC", "+01:00"))
            return rng.choice((f"DATE '{day}'", f"TIMESTAMP '{day} {clock}'", f"TIMESTAMP '{day} {clock} {zone}'"))
        if rng.random() < 0.06:
            return rng.choice(_NULLS)
        return rng.choice(
            _CONVERSION_SENSITIVE_VALUES[column]
            if column in _CONVERSION_SENSITIVE_VALUES and rng.random() < 0.5
            else _COMMON_NUMBERS
        )

    def _draw_comparison(self, prefix: str, column: str, family: tuple[str, ...]) -> str:
        rng, name = self._rng, f"{prefix}{column}"
        first, second, third = (self.draw_operand(column) for _ in range(3))
        other_column = f"{prefix}{rng.choice(family)}"
        op = rng.choice(("=", "<>", "<", "<=", ">", ">="))
        negated = rng.choice(("", "NOT "))
        return rng.choice(
            (
                f"{name} {negated}IN ({first}, {second})",
                f"{name} {negated}IN ({first}, {second}, {third})",
                f"{name} {negated}BETWEEN {first} AND {second}",
                f"{name} {negated}BETWEEN {first} AND {other_column}",
                f"{first} {negated}BETWEEN {name} AND {second}",
                f"{name} {op} {first}",
                f"{name} {op} {other_column}",
                f"CASE {name} WHEN {first} THEN true WHEN {second} THEN true ELSE false END",
                f"CASE {name} WHEN {first} THEN 1 WHEN {other_column} THEN 2 ELSE 3 END < 3",
                f"coalesce({name}, {second}) {op} {first}",
                f"nullif({name}, {second}) {op} {first}",
                f"if({name} IS NULL, {second}, {name}) {op} {first}",
                f"CASE WHEN {name} > {other_column} THEN {name} ELSE {second} END {op} {first}",
            )
        )

    def draw_trino_predicate(self, prefix: str = "") -> str:
        """Return a predicate that Trino supports. Other engines may not support it."""
        column = self._rng.choice((*NUMBERS, *TIMES))
        first, second, third = (self.draw_operand(column) for _ in range(3))
        negated = self._rng.choice(("", "NOT "))
        name = f"{prefix}{column}"
        return self._rng.choice(
            (
                f"({name}, 1) {negated}IN (({first}, 1), ({second}, 1.0))",
                f"{name} IN (VALUES {first}, {second})",
                f"{name} = ANY (VALUES {first}, {second})",
                f"{name} IN (SELECT v FROM (VALUES {first}, {second}, {third}) AS w (v))",
                f"{name} IN (SELECT {first} UNION ALL SELECT {second})",
                f"contains(ARRAY[{first}, {second}], {name})",
                f"greatest({name}, {first}) {negated}IN ({second}, {third})",
                self.draw_predicate(prefix),
            )
        )
