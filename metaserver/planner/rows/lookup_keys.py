"""Parser of the keys of a lookup, from JSON or Arrow to the form of the index.

A key has one value for each term of the record index.

A JSON value is parsed like a filter literal (`literals.py`). A value that the column's type cannot represent, such as
5.5 for an integer, is valid and matches no row. Null matches rows where the column is null. For a float column, "NaN"
matches NaN. Arrow columns have the names and types of the terms.

For a term with a transform, such as `bucket[16](id)`, the key is the transformed value. For `lower(name)`, the key may
be in upper or lower case, because the index has one key for all texts that differ in case alone. The functions have no
side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from seamark.formats.iceberg.expressions.binding import Above, Below, Between, Literal, parse_literal
from seamark.formats.iceberg.files.budget import compute_expanded_bytes, has_shared_values
from seamark.formats.iceberg.types.values import FLOATS, INT_MAX, INT_MIN, LONG_MAX, LONG_MIN
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.functions import INDEXED_FUNCTIONS
from seamark.formats.index.keys.keys import Key, Keys, Mask, has_codes, make_key, pack_mask
from seamark.formats.index.keys.terms import Term
from seamark.formats.runtime.errors import BadRequest

_INTEGERS = {"int": (INT_MIN, INT_MAX), "long": (LONG_MIN, LONG_MAX)}
_SHOWN_CHARS_MAX, _REASON_CHARS_MAX = 80, 200
"""The maximum numbers of characters of a value, and of a reason, that error messages contain."""


def decode_json_keys(terms: Sequence[Term], rows: Sequence[Any]) -> tuple[list[Keys], Mask | None]:
    """Parse keys from JSON.

    Args:
        terms: The terms of the index.
        rows: The keys. Each key is a list of values in the order of the terms, or an object with the names of the
            terms. For an index with one term, it may also be the value itself.

    Returns:
        The columns of the keys, and bool[keys], whether each key can exist. The second item is None if all keys can
        exist.

    Raises:
        BadRequest: A key is invalid; the message contains the key's number.
    """
    is_possible = np.ones(len(rows), dtype=np.bool_)
    values = _transpose_keys(terms, rows)
    columns = [_make_column(term, column, is_possible) for term, column in zip(terms, values, strict=True)]
    return columns, None if is_possible.all() else is_possible


def extract_term_arrays(terms: Sequence[Term], table: pa.Table) -> tuple[list[pa.Array], int]:
    """Return the column of each term as one array, and the memory that shared values would need if each row had a copy.

    The caller must limit the memory, because a million rows in a request of one megabyte can share the same value.

    Raises:
        BadRequest: A column is missing, exists several times, or cannot be combined; the message names it.
    """
    texts = [term.text for term in terms]
    missing_texts = [text for text in texts if text not in table.column_names]
    if missing_texts:
        shown_names = ", ".join(table.column_names)[:_SHOWN_CHARS_MAX]
        raise BadRequest(
            f"The keys have no column {missing_texts[0]}; the index is on {', '.join(texts)}, but the keys have "
            f"{shown_names}"
        )
    arrays, shared_bytes = [], 0
    for term in terms:
        if table.column_names.count(term.text) > 1:
            raise BadRequest(f"The keys have several columns named {term.text}; send each column once")
        column = table.column(term.text)
        try:
            array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            array = array.storage if isinstance(array, pa.ExtensionArray) else array
            shared_bytes += compute_expanded_bytes(array) if has_shared_values(array.type) else 0
        except pa.ArrowException as error:
            raise _make_invalid_error(term, error) from None
        arrays.append(array)
    return arrays, shared_bytes


def build_keys(terms: Sequence[Term], arrays: Sequence[pa.Array]) -> list[Keys]:
    """Convert the columns of the terms to keys.

    Raises:
        BadRequest: A column does not have the type of its term; the message names the column.
    """
    columns = []
    for term, array in zip(terms, arrays, strict=True):
        function = INDEXED_FUNCTIONS.get(term.transform)
        try:
            values = array if function is None else function.values(pa.chunked_array([array]))
            columns.append(convert_to_keys(values, term.kind))
        except (ValueError, pa.ArrowException) as error:
            # For example, Arrow cannot expand dictionaries of views.
            raise _make_invalid_error(term, error) from None
    return columns


def _make_invalid_error(term: Term, error: Exception) -> BadRequest:
    return BadRequest(f"The column {term.text} of the keys is invalid: {str(error)[:_REASON_CHARS_MAX]}")


def _transpose_keys(terms: Sequence[Term], rows: Sequence[Any]) -> list[list[Any]]:
    """Return the values of each term as a column.

    Raises:
        BadRequest: A key does not have exactly one value for each term.
    """
    texts = [term.text for term in terms]
    if len(terms) == 1 and not any(isinstance(row, list | Mapping) for row in rows):
        return [list(rows)]
    columns: list[list[Any]] = [[] for _ in terms]
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            differing_names = set(texts).symmetric_difference(row)
            if differing_names:
                problem = (
                    f"lacks {min(differing_names)}"
                    if min(differing_names) in texts
                    else f"has {min(differing_names)[:_SHOWN_CHARS_MAX]!r}"
                )
                raise BadRequest(f"Key {number} {problem}: the index is on {', '.join(texts)}")
            values: Iterable[Any] = [row[text] for text in texts]
        elif isinstance(row, list):
            if len(row) != len(terms):
                raise BadRequest(f"Key {number} has {len(row)} values: the index is on {', '.join(texts)}")
            values = row
        elif len(terms) == 1:
            values = [row]
        else:
            raise BadRequest(
                f"Key {number} is {repr(row)[:_SHOWN_CHARS_MAX]}, not a list of values for {', '.join(texts)}"
            )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return columns


def _make_column(term: Term, values: list[Any], possible_keys: Mask) -> Keys:
    """Return the keys of one column. Set `possible_keys` to False for values that no row can have.

    If all values are integers that fit 64 bits, NumPy converts them at once. Other values are converted one by one.

    Raises:
        BadRequest: A value is not a value of the column's type.
    """
    limits = _INTEGERS.get(term.kind)
    if limits and all(type(value) is int for value in values):
        low, high = limits
        try:
            numbers = np.array(values, dtype=np.int64)
        except OverflowError:
            pass
        else:
            possible_keys &= (numbers >= low) & (numbers <= high)
            return convert_to_keys(pa.array(numbers), "long")
    keys: list[Key | None] = []
    nans = np.zeros(len(values), dtype=np.bool_)
    nulls = np.zeros(len(values), dtype=np.bool_)
    for number, value in enumerate(values):
        key: Key | None = None
        if value is None:
            nulls[number] = True
        elif value == "NaN" and term.kind in FLOATS:
            nans[number] = True
        else:
            key = _convert_key(term, value, number)
            possible_keys[number] &= key is not None
        keys.append(key)
    return _assemble_keys(term.kind, keys, nulls, nans)


def _convert_key(term: Term, value: Any, number: int) -> Key | None:
    """Return the key of a value, or None if no row can have the value.

    Args:
        term: The indexed column, or a function of a column.
        value: The value of the key in the request.
        number: The number of the key in the request, for the error message.

    Raises:
        BadRequest: The value is not a value of the column's type.
    """
    try:
        literal: Literal = parse_literal(term.kind, value)
    except BadRequest as error:
        raise BadRequest(f"Key {number}, column {term.text}: {error.message}") from None
    if isinstance(literal, Above | Below):  # The value is outside the range of the column's type.
        is_infinite = term.kind in FLOATS and literal.infinite
        return make_key(float("inf" if isinstance(literal, Above) else "-inf"), term.kind) if is_infinite else None
    if isinstance(literal, Between):  # The value is between two adjacent values of the type, so no row has it.
        return None
    function = INDEXED_FUNCTIONS.get(term.transform)
    try:
        return make_key(literal if function is None else function.value(str(literal)), term.kind)
    except ValueError:
        return None


def _assemble_keys(kind: str, keys: list[Key | None], nulls: Mask, nans: Mask) -> Keys:
    """Convert the keys of one column to the arrays of `Keys`: codes for numbers, or concatenated bytes.

    The key of a null or NaN row has no meaning. A bit marks such a row.
    """
    present_bits = pack_mask(~nulls) if nulls.any() else None
    nan_bits = pack_mask(nans) if nans.any() else None
    if has_codes(kind):
        codes = np.array([key if isinstance(key, int) else 0 for key in keys], dtype=np.uint64)
        return Keys(kind, len(keys), codes, None, None, present_bits, nan_bits)
    strings = [key if isinstance(key, bytes) else b"" for key in keys]
    starts = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum([len(string) for string in strings], out=starts[1:])
    heap = np.frombuffer(b"".join(strings), dtype=np.uint8)
    return Keys(kind, len(keys), None, starts, heap, present_bits, nan_bits)
