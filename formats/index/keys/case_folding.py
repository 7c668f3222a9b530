"""Folded texts: a common form of all texts that any engine's `lower` or `upper` treats as equal.

Engines convert case in different ways. Trino maps code points one by one. DuckDB has its own table. Spark uses ICU,
with rules for several characters (`ß` becomes `SS`), for context (a sigma at the end of a word) and for the JVM's
locale (in Turkish, the lower case of `I` is `ı`; in Greek, capitals have no accents). Two texts have the same folded
text if any engine treats them as equal: each character has one folded text, which is the same for all results that the
engines compute from it. Therefore the folding treats more texts as equal than each engine does: `ß` and `ss`, `i` and
`ı`.

    fold(lower(x)) = fold(upper(x)) = fold(x)    in each engine, version of Unicode and locale

A version of Unicode may add the capital of a letter that had none. If a text has a character that this table's version
does not assign, its folding is unknown, and its key is `UNKNOWN_CASE`. It is also unknown which texts have the same
`lower` as this text. Therefore a search for `lower(c) = 'x'` also looks for this key, and a search for such a text is
not possible.

The table is a part of the package, because the libraries of writers and of servers may have other versions of Unicode.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from seamark.formats.index.keys.case_folding_table import MOVED, REPLACED, UNASSIGNED
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

UNKNOWN_CASE = "\U0010ffff"
"""The key of all texts whose folding is unknown. Unicode never assigns this code point, so no folded text contains it.
"""
_TABLED_MAX, _LAST = 0xFFFF, 0x10FFFF
"""The last character that Python's regular expressions find in a table, and the last character of all."""
_SURROGATES = (0xD800, 0xDFFF)
_RUN = re.compile(r"([0-9a-f]+)-([0-9a-f]+)/([12])([+-][0-9a-f]+)", re.ASCII)


def fold_case(text: str) -> str:
    """Return the folded text, in which letters that differ only by case are equal.

    If this version of Unicode does not assign a character, its folding is unknown, and the result is `UNKNOWN_CASE`.
    """
    if text.isascii():
        return text.lower()
    return text.translate(_load_folds()) if has_known_case(text) else UNKNOWN_CASE


def has_known_case(text: str) -> bool:
    """Return whether the cases of all characters of the text are known.

    The case of a character is known if this version of Unicode assigns the character. A later version may assign it to
    a letter. A fast pattern is used first. It also matches rare assigned characters, so the exact pattern checks its
    matches.
    """
    if text.isascii() or _make_unassigned_pattern().search(text) is None:
        return True
    return _compile_unknown_pattern().search(text) is None


def fold_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the texts of a column with folded case: texts that differ only by case become equal.

    The column can be a dictionary, or binary without a UTF-8 annotation.

    Raises:
        ValueError: The column has another type, or contains invalid UTF-8.
    """
    if pa.types.is_null(column.type):
        return column
    return pa.chunked_array([_fold_texts(chunk) for chunk in _convert_to_strings(column).chunks], pa.large_string())


def _fold_texts(texts: pa.Array) -> pa.Array:
    """Return the folded texts of an array. Texts that are not ASCII are folded once per distinct text."""
    is_ascii = pc.string_is_ascii(texts)
    # `ascii_lower` and `replace_with_mask` are not used, because for slices, pyarrow 26 returns arrays with wrong
    # offsets.
    lower = pc.utf8_lower(texts)
    if pc.all(is_ascii, min_count=0).as_py():
        return lower
    is_other = pc.fill_null(pc.invert(is_ascii), False)
    non_ascii = texts.filter(is_other).dictionary_encode()
    values = pa.array([fold_case(text) for text in non_ascii.dictionary.to_pylist()], pa.large_string())
    # Take the ASCII texts from `lower`, and the other texts from `values`, which follow `lower` in the joined array.
    indexes = np.arange(len(texts))
    indexes[is_other.to_numpy(zero_copy_only=False)] = len(texts) + non_ascii.indices.to_numpy()
    return pa.concat_arrays([lower, values]).take(pa.array(indexes))


def _convert_to_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    value_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not any(is_text(value_type) for is_text in _IS_TEXT):
        raise ValueError(f"a column of Arrow type {column.type} does not contain strings")
    return column.cast(pa.large_string())


_IS_TEXT = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)


@cache
def _load_folds() -> dict[int, str]:
    """Return the folded text of each character that changes, by code point.

    `MOVED` lists ranges of characters that change by the same distance. `REPLACED` lists single characters, whose
    folded text can have several characters.
    """
    characters: dict[int, str] = {}
    for run in MOVED.split():
        match = _RUN.fullmatch(run)
        assert match is not None
        first, last, step, change = int(match[1], 16), int(match[2], 16), int(match[3]), int(match[4], 16)
        characters |= {point: chr(point + change) for point in range(first, last + 1, step)}
    for replacement in REPLACED.split():
        point, _, text = replacement.partition("=")
        characters[int(point, 16)] = "".join(chr(int(part, 16)) for part in text.split("+") if part)
    return characters


@cache
def _make_unassigned_pattern() -> re.Pattern[str]:
    """Return a pattern that matches unassigned characters, and also all characters beyond U+FFFF.

    `has_known_case` checks the matches again with an exact pattern. Python's regular expressions look up characters up
    to U+FFFF in a table, but compare other characters with each range, so here all other characters are one range.
    """
    return _compile_character_class(
        [*((first, last) for first, last in _list_unassigned_ranges() if last <= _TABLED_MAX), (_TABLED_MAX + 1, _LAST)]
    )


@cache
def _compile_unknown_pattern() -> re.Pattern[str]:
    """Return a pattern that matches an unassigned character, or a surrogate, which is not a character."""
    return _compile_character_class(_list_unassigned_ranges())


def _list_unassigned_ranges() -> list[tuple[int, int]]:
    """Return the ranges of unassigned code points, and of the surrogates."""
    ranges = (part.split("-") for part in UNASSIGNED.split())
    return [*((int(first, 16), int(last, 16)) for first, last in ranges), _SURROGATES]


def _compile_character_class(ranges: list[tuple[int, int]]) -> re.Pattern[str]:
    """Return a pattern that matches a character in one of the ranges."""
    spans = (f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in ranges)
    return re.compile(f"[{''.join(spans)}]")
