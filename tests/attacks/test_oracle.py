"""Tests that the oracle finds a secret in every form in which an answer may contain it."""

from __future__ import annotations

import base64
import gzip
import io
import json

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.attacks.oracle import Secrets

TEXT, NUMBER = 'name of "somebody" é', 7_310_442_189_553_001


def _encode_avro(value: object, kind: str) -> bytes:
    out = io.BytesIO()
    schema = {"type": "record", "name": "r", "fields": [{"name": "f", "type": kind}]}
    fastavro.writer(out, fastavro.parse_schema(schema), [{"f": value}], codec="deflate")
    return out.getvalue()


def _encode_parquet(value: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": [value]}), out, compression="zstd")
    return out.getvalue()


def _encode_arrow(value: object) -> bytes:
    table, out = pa.table({"a": [value]}), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return out.getvalue()


def _encode_puffin(value: bytes) -> bytes:
    return b"PFA1" + pa.compress(value * 3, "zstd", asbytes=True) + b"PFA1{}\x02\0\0\0\0\0\0\0PFA1"


NUMBER_BYTES = NUMBER.to_bytes(8, "little")
BODIES_WITH_SECRET = {
    "plain": f"… {TEXT} …".encode(),
    "json": json.dumps({"error": {"message": f"no {TEXT}"}}).encode(),
    "percent": b"/v1/name%20of%20%22somebody%22%20%C3%A9/x",
    "base64 at 0": base64.b64encode(TEXT.encode()),
    "base64 at 1": base64.urlsafe_b64encode(b"a" + TEXT.encode() + b"bc"),
    "base64 at 2": base64.b64encode(b"ab" + TEXT.encode() + b"c"),
    "hex": TEXT.encode().hex().upper().encode(),
    "gzip": gzip.compress(TEXT.encode()),
    "token in json": json.dumps({"t": base64.b64encode(gzip.compress(TEXT.encode())).decode()}).encode(),
    "avro": _encode_avro(TEXT, "string"),
    "avro bytes": _encode_avro(NUMBER_BYTES, "bytes"),
    "parquet": _encode_parquet(TEXT),
    "parquet number": _encode_parquet(NUMBER),
    "arrow": _encode_arrow(TEXT),
    "arrow bytes": _encode_arrow(NUMBER_BYTES),
    "puffin": _encode_puffin(TEXT.encode()),
    "bound in hex": json.dumps({"lower": NUMBER_BYTES.hex()}).encode(),
    "number in json": json.dumps([NUMBER]).encode(),
}


@pytest.mark.parametrize("form", BODIES_WITH_SECRET)
def test_secret_is_found_in_each_form(form: str) -> None:
    secrets = Secrets()
    secrets.register("name", TEXT, value=True)
    secrets.register("bound", NUMBER, value=True)
    assert secrets.find_leaks(BODIES_WITH_SECRET[form]), form


def test_secret_is_found_in_a_header() -> None:
    secrets = Secrets()
    secrets.register("name", "secret-of-others")
    assert secrets.find_leaks(b"", {"ETag": 'W/"secret-of-others"'})


def test_only_handles_that_the_attacker_did_not_receive_count_as_leaks() -> None:
    secrets = Secrets()
    secrets.register("folder", "secret-folder")
    secrets.register("file", "secret-file-0001")
    secrets.tell("s3://lake/secret-folder/x")
    assert {item.description for item in secrets.find_leaks(b"s3://lake/secret-folder/secret-file-0001")} == {"file"}


def test_value_cannot_be_given_as_a_hint() -> None:
    secrets = Secrets()
    secrets.register("row", "value-of-a-row", value=True)
    with pytest.raises(AssertionError, match="hint"):
        secrets.tell("path/value-of-a-row")


def test_no_secret_is_found_in_harmless_data() -> None:
    secrets = Secrets()
    secrets.register("name", TEXT)
    secrets.register("bound", NUMBER, value=True)
    for blob in (
        b"",
        b"{}",
        gzip.compress(b"nothing"),
        _encode_parquet("other"),
        _encode_avro("x", "string"),
        b"Obj\x01broken",
    ):
        assert not secrets.find_leaks(blob)
