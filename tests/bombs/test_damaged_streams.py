"""Tests of Arrow streams of keys with damaged bytes. None crashes the process, although clients can send any bytes."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.hashing import hash_halves
from seamark.formats.index.keys.terms import resolve_term
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.metaserver.planner.rows.lookup_keys import build_keys, extract_term_arrays
from seamark.metaserver.streams.incoming.arrow_body import read_stream
from tests.bombs.peak import measure_peak

ROWS = 60
KINDS = {"n": "long", "s": "string", "x": "fixed[4]"}
TERMS = [
    resolve_term(
        name, Schema(tuple(Field(index, name, False, kind) for index, (name, kind) in enumerate(KINDS.items(), 1)))
    )
    for name in KINDS
]


def encode_stream(columns: dict[str, pa.Array], rows: int) -> bytes:
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return bytes(sink.getvalue())


def encode_all_forms() -> list[bytes]:
    """Return encoded streams: plain columns, and each form in which rows share values, in one batch and in several."""
    plain_table = {
        "n": pa.array(range(ROWS), pa.int64()),
        "s": pa.array([f"value {number % 9} that is long" if number % 5 else None for number in range(ROWS)]),
        "x": pa.array([b"abcd"] * ROWS, pa.binary(4)),
    }
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([30, ROWS], pa.int32()), pa.array(["x", None]))
    forms = (
        plain_table,
        {**plain_table, "s": plain_table["s"].dictionary_encode(), "n": plain_table["n"].dictionary_encode()},
        {**plain_table, "s": plain_table["s"].cast(pa.string_view())},
        {**plain_table, "s": runs},
    )
    return [encode_stream(columns, rows) for columns in forms for rows in (ROWS, 20)]


def count_keys(data: bytes) -> str:
    """Return a text with the number of keys in a body, or the message of an expected error.

    The route for keys reads bodies in the same way.
    """
    try:
        arrays, shared_bytes = extract_term_arrays(TERMS, read_stream(data, "The body", rows_max=1_000_000))
        if shared_bytes > 1 << 26:
            return "too large"
        keys = build_keys(TERMS, arrays)
        hash_halves(keys)
    except (BadRequest, TooLarge) as error:
        return error.message
    return f"{keys[0].rows} keys"


def read_invalid_view_of_null() -> str:
    """Read a stream with a null whose view has a negative length, and return the outcome (`count_keys`).

    Only views of values must be valid.
    """
    text = pa.array(["a value that is long", None, "short"], pa.string_view())
    views = np.frombuffer(text.buffers()[1], dtype=np.int32).reshape(-1, 4).copy()
    views[1] = (-(1 << 31), 0, 0, 0)
    array = pa.Array.from_buffers(text.type, 3, [text.buffers()[0], pa.py_buffer(views), *text.buffers()[2:]])
    columns = {"n": pa.array([1, 2, 3]), "s": array, "x": pa.array([b"abcd"] * 3, pa.binary(4))}
    return count_keys(encode_stream(columns, rows=3))


def test_null_may_have_any_view() -> None:
    _, outcome = measure_peak(read_invalid_view_of_null)
    assert outcome == "3 keys"


def list_unexpected_outcomes(seed: str) -> str:
    """Decode 1,500 randomly damaged streams, and return the errors that the server does not expect, as text.

    Each stream has one to three changes, mostly one, because a stream with many changes fails at the first of them.
    """
    rng, unexpected_errors = random.Random(seed), []
    bodies = encode_all_forms()
    for _ in range(1500):
        data = bytearray(rng.choice(bodies))
        for _ in range(rng.choice((1, 1, 2, 3))):
            offset = rng.randrange(len(data) - 8)
            if rng.random() < 0.3:
                offset -= offset % 8  # The numbers of the format have 8 bytes and are aligned.
                data[offset : offset + 8] = rng.choice((1 << 62, 1 << 31, 100_000, 0)).to_bytes(8, "little")
            else:
                data[offset] = rng.choice((rng.randrange(256), data[offset] ^ 1 << rng.randrange(8), 0, 255, 127))
        try:
            count_keys(bytes(data))
        except Exception as error:  # noqa: BLE001  an error that the server does not expect
            unexpected_errors.append(repr(error))
    return str(unexpected_errors)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_damaged_streams_are_read_or_rejected_with_expected_errors(seed: str) -> None:
    _, unexpected_outcomes = measure_peak(list_unexpected_outcomes, seed)
    assert unexpected_outcomes == "[]"
