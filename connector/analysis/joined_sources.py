"""The joins of the sources of a block, as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sqlglot import exp


@dataclass(frozen=True)
class JoinedSource:
    """`keeps_left`: a left row without a partner is kept, with nulls."""

    left: Tree
    right: Tree
    keeps_left: bool = False
    keeps_right: bool = False
    on: exp.Expr | None = None
    using: tuple[str, ...] = ()


Tree: TypeAlias = int | JoinedSource
"""A number is the position of a source in the block."""


def sources_of(tree: Tree) -> frozenset[int]:
    return frozenset({tree}) if isinstance(tree, int) else sources_of(tree.left) | sources_of(tree.right)


def inner_joins(tree: Tree) -> tuple[list[Tree], list[JoinedSource]]:
    """The operands of nested inner joins, and these joins."""
    if isinstance(tree, int) or tree.keeps_left or tree.keeps_right:
        return [tree], []
    (left, of_left), (right, of_right) = inner_joins(tree.left), inner_joins(tree.right)
    return [*left, *right], [*of_left, *of_right, tree]


def seen_in_on(on: exp.Expr, tree: Tree | None) -> frozenset[int]:
    """The sources that a subquery in this ON sees: those of its join."""
    return next((sources_of(join) for join in _joins(tree) if join.on is on), frozenset())


def seen_by_lateral(number: int, tree: Tree | None) -> frozenset[int]:
    """The sources that each engine lets a LATERAL subquery see: the left side of its join. Not all let it see those
    before a comma, too."""
    return next((sources_of(join.left) for join in _joins(tree) if join.right == number), frozenset())


def _joins(tree: Tree | None) -> Iterator[JoinedSource]:
    left = [tree]
    while left:
        found = left.pop()
        if isinstance(found, JoinedSource):
            yield found
            left += [found.left, found.right]
