"""Write `formats/index/keys/case_folding_table.py` from the case mappings of engines.

    .venv/bin/python -m tests.index.case_folding.write_table JAVA

A code point and each text that an engine makes of it must have the same folded text. The script solves these equations
one after another. Two single characters become one class. A character that becomes several is replaced by them.
Combining marks are omitted, because some locales add or remove them. If the table changes, change `CASE_KEYS` in
`formats/index/keys/functions.py` too, because the keys of stored indexes differ.
"""

from __future__ import annotations

import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from tests.index.case_folding.mappings import read_duckdb_mappings, read_java_mappings, read_python_mappings

_TABLE = Path(__file__).parents[3] / "formats/index/keys/case_folding_table.py"
_IOTA_BELOW = 0x345
"""A combining mark whose upper case is a letter."""
_HEAD = '''"""The folded forms of characters, for texts that are compared without regard to case (`case_folding.py`).

Written by `python -m tests.index.case_folding.write_table` from the case mappings of Unicode 16. Code points are
hexadecimal.
"""

from __future__ import annotations

'''


class Equations:
    """A case folding that meets all equations which were added.

    Single characters that an equation makes equal belong to one class, whose representative replaces them all. A
    character that equals several characters is replaced by them. Combining marks are removed.
    """

    def __init__(self) -> None:
        self._representatives: dict[int, int] = {}
        """Another code point of the same class, by code point. The representative of a class has no entry."""
        self._replacements: dict[int, tuple[int, ...]] = {}
        """The several code points that replace a code point, by this code point."""
        # The Unicode block from U+0300 to U+036F has the combining marks. The iota is kept, because its upper case is a
        # letter.
        self._omitted_points = set(range(0x300, 0x370)) - {_IOTA_BELOW}

    def fold(self, points: Iterable[int]) -> list[int]:
        """Return the code points after case folding: replaced, and without combining marks."""
        folded_points: list[int] = []
        for point in points:
            while point in self._representatives:
                point = self._representatives[point]
            if point in self._replacements:
                folded_points += self.fold(self._replacements[point])
            elif point not in self._omitted_points:
                folded_points.append(point)
        return folded_points

    def add(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Add an equation: both sequences of code points must have the same folded form.

        Raises:
            ValueError: The equation has no solution.
        """
        left, right = self.fold(left), self.fold(right)
        if left == right:
            return
        if len(left) == len(right):  # The characters at the same position are equal.
            for point, other_point in zip(left, right, strict=True):
                self._join(*self.fold([point]), *self.fold([other_point]))
        elif len(left) == 1 and left[0] not in right:  # One character, such as ß, equals several others.
            self._replacements[left[0]] = tuple(right)
        elif len(right) == 1 and right[0] not in left:
            self._replacements[right[0]] = tuple(left)
        else:
            raise ValueError(f"no folding makes {left} and {right} equal")

    def _join(self, point: int, other_point: int) -> None:
        if point != other_point:
            representative, member = sorted((point, other_point), key=_compute_rank)
            self._representatives[member] = representative


def _compute_rank(point: int) -> tuple[bool, bool, int]:
    """Return a sort key. The first character by this key represents the characters that differ from it only in case.

    Lower-case ASCII letters are first, then other lower-case letters, then all other characters. Within each of these
    groups, the order is that of the code points.
    """
    text = chr(point)
    return not (text.isascii() and text.islower()), unicodedata.category(text) != "Ll", point


def solve_equations(mappings: Iterable[dict[int, set[str]]], unassigned_points: set[int]) -> dict[int, str]:
    """Return the folded text of each code point that differs from its own folded text.

    A code point and each text that an engine's upper or lower case makes of it get the same folded text.

    Args:
        mappings: For each engine, the texts that it makes of a code point.
        unassigned_points: The code points that an engine does not know. They remain unchanged.
    """
    equations = Equations()
    for engine_mappings in mappings:
        for point, texts in sorted(engine_mappings.items()):
            for text in sorted(texts, key=len):
                if point not in unassigned_points and not unassigned_points & set(map(ord, text)):
                    equations.add([point], list(map(ord, text)))
    folded_texts = {point: "".join(map(chr, equations.fold([point]))) for point in range(0x110000)}
    return {point: text for point, text in folded_texts.items() if text != chr(point)}


def format_table_source(folded_texts: dict[int, str], unassigned_points: set[int]) -> str:
    single_points = sorted((point, ord(text) - point) for point, text in folded_texts.items() if len(text) == 1)
    runs = " ".join(f"{first:x}-{last:x}/{step}{change:+x}" for first, last, step, change in _find_runs(single_points))
    other_points = " ".join(
        f"{point:x}={'+'.join(f'{ord(item):x}' for item in text)}"
        for point, text in sorted(folded_texts.items())
        if len(text) != 1
    )
    ranges = " ".join(f"{first:x}-{last:x}" for first, last in _find_ranges(sorted(unassigned_points)))
    return _HEAD + "\n".join(
        [
            _format_constant(
                "MOVED", runs, "First and last code point, step, and the difference to the folded code point."
            ),
            _format_constant(
                "REPLACED", other_points, "Code points with a folded text of several code points, or of none."
            ),
            _format_constant("UNASSIGNED", ranges, "The code points that Unicode 16 does not assign."),
        ]
    )


def _format_constant(name: str, text: str, comment: str) -> str:
    lines = textwrap.wrap(text, 115, break_on_hyphens=False, break_long_words=False)
    return f'{name} = """\n' + "\n".join(lines) + f'\n"""\n"""{comment}"""\n'


def _find_runs(changes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of code points with the same change and the same distance, which is 1 or 2.

    Args:
        changes: Pairs of a code point and the difference to its folded code point, in ascending order.

    Yields:
        The first and the last code point of a run, the distance between its code points, and their change.
    """
    run: list[int] = []
    step, change = 0, 0
    for point, delta in changes:
        gap = point - run[-1] if run else 0
        if run and delta == change and gap in (1, 2) and step in (0, gap):
            step = gap
            run.append(point)
            continue
        if run:
            yield run[0], run[-1], step or 1, change
        run, step, change = [point], 0, delta
    if run:
        yield run[0], run[-1], step or 1, change


def _find_ranges(points: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, group in groupby(enumerate(points), key=lambda item: item[1] - item[0]):
        listed_points = [point for _, point in group]
        yield listed_points[0], listed_points[-1]


def main(java_path: str) -> None:
    java_mappings, unassigned_points = read_java_mappings(java_path)
    folded_texts = solve_equations([java_mappings, read_python_mappings(), read_duckdb_mappings()], unassigned_points)
    _TABLE.write_text(format_table_source(folded_texts, unassigned_points))


if __name__ == "__main__":
    main(sys.argv[1])
