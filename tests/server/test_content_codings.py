"""Tests of compressed request bodies: allowed codings, and bodies that are rejected before decompression."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.runtime.errors import BadRequest, TooLarge, UnsupportedMediaType
from seamark.metaserver.api.http.content_codings import (
    MEMBERS_MAX,
    RATIO_FREE_BYTES,
    RATIO_MAX,
    Inflater,
    parse_content_encoding,
)
from tests.server.rig import run_server
from tests.server.test_bodies import build_head, encode_chunk, make_tokens
from tests.server.test_connections import RawConnection


def deflate(data: bytes) -> bytes:
    """Compress data without zlib's header and checksum, as some clients do for the coding `deflate`."""
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def inflate_pieces(coding: str, packed_data: bytes, *, piece_bytes: int = 1 << 20, step_bytes: int = 1 << 16) -> bytes:
    """Decompress data that arrives in pieces of `piece_bytes`. Each call returns at most `step_bytes`."""
    inflater, out = Inflater(coding), bytearray()
    for offset in range(0, len(packed_data), piece_bytes):
        inflater.feed(packed_data[offset : offset + piece_bytes])
        while chunk := inflater.inflate(step_bytes):
            assert len(chunk) <= step_bytes
            out += chunk
    inflater.finish()
    return bytes(out)


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", deflate),
}
PACKER_CASES = [pytest.param(*packer, id=name) for name, packer in PACKERS.items()]


@pytest.mark.parametrize(("coding", "pack"), PACKER_CASES)
@given(
    data=st.binary(max_size=3000) | st.integers(0, 9000).map(bytes),
    piece_bytes=st.integers(1, 40),
    step_bytes=st.integers(1, 300),
)
def test_compressed_body_is_read_in_pieces_of_any_size(
    coding: str, pack: Callable[[bytes], bytes], data: bytes, piece_bytes: int, step_bytes: int
) -> None:
    assert inflate_pieces(coding, pack(data), piece_bytes=piece_bytes, step_bytes=step_bytes) == data


@given(members=st.lists(st.binary(max_size=50), min_size=1, max_size=20), piece_bytes=st.integers(1, 200))
def test_gzip_members_form_one_body(members: list[bytes], piece_bytes: int) -> None:
    packed_body = b"".join(gzip.compress(member) for member in members)
    assert inflate_pieces("gzip", packed_body, piece_bytes=piece_bytes, step_bytes=7) == b"".join(members)


def test_number_of_empty_gzip_members_is_limited() -> None:
    assert inflate_pieces("gzip", gzip.compress(b"") * MEMBERS_MAX) == b""
    with pytest.raises(BadRequest, match="members"):
        inflate_pieces("gzip", gzip.compress(b"") * (MEMBERS_MAX + 1))


@pytest.mark.parametrize(("coding", "pack"), PACKER_CASES)
def test_truncated_body_is_rejected(coding: str, pack: Callable[[bytes], bytes]) -> None:
    packed_data = pack(b"some text, and more of it" * 40)
    for size in range(1, len(packed_data)):
        with pytest.raises(BadRequest, match="ends too early"):
            inflate_pieces(coding, packed_data[:size])


@pytest.mark.parametrize(("coding", "pack"), PACKER_CASES)
def test_bytes_after_the_end_of_a_compressed_body_are_rejected(coding: str, pack: Callable[[bytes], bytes]) -> None:
    for piece_bytes in (1, 1000):
        with pytest.raises(BadRequest, match=r"has bytes after its end|is corrupt"):
            inflate_pieces(coding, pack(b"text") + b"more of it", piece_bytes=piece_bytes)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_flipped_byte_is_rejected_or_changes_nothing(coding: str) -> None:
    data = random.Random(5).randbytes(300)
    packed_data = PACKERS["gzip" if coding == "gzip" else "zlib"][1](data)
    refused_count = 0
    for offset in range(len(packed_data)):
        damaged_bytes = bytearray(packed_data)
        damaged_bytes[offset] ^= 0x55
        try:
            # For example, the time in gzip's header does not affect the data.
            assert inflate_pieces(coding, bytes(damaged_bytes)) == data
        except BadRequest:
            refused_count += 1
    # The checksum covers all data. Only some bytes of the header have no effect.
    assert refused_count > 0.9 * len(data)


def test_decompression_bomb_is_rejected_at_the_ratio_limit() -> None:
    bomb, unpacked_bytes = gzip.compress(b" " * (64 << 20)), 0
    inflater = Inflater("gzip")
    inflater.feed(bomb)

    def inflate_all() -> None:
        nonlocal unpacked_bytes
        while chunk := inflater.inflate(1 << 16):
            unpacked_bytes += len(chunk)

    with pytest.raises(TooLarge, match="200 times"):
        inflate_all()
    assert RATIO_FREE_BYTES <= unpacked_bytes <= RATIO_FREE_BYTES + RATIO_MAX * 8192


def test_small_bodies_may_have_any_ratio() -> None:
    assert inflate_pieces("gzip", gzip.compress(b" " * RATIO_FREE_BYTES)) == b" " * RATIO_FREE_BYTES


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ([], ""),
        (["identity"], ""),
        ([" GZIP "], "gzip"),
        (["x-gzip"], "gzip"),
        (["identity, deflate"], "deflate"),
        (["identity", "gzip", ""], "gzip"),
    ],
)
def test_content_encoding_header_is_parsed(values: list[str], coding: str) -> None:
    assert parse_content_encoding(values) == coding


@pytest.mark.parametrize(
    "values", [["br"], ["zstd"], ["x-deflate"], ["gzip, gzip"], ["gzip", "deflate"], ["identity, lzw"]]
)
def test_unsupported_codings_are_rejected(values: list[str]) -> None:
    with pytest.raises(UnsupportedMediaType, match="gzip, deflate, identity"):
        parse_content_encoding(values)


NAMESPACE = b'{"namespace":["db","packed"]}'


BODIES = {
    "gzip": ("gzip", gzip.compress(NAMESPACE), 200),
    "members": ("x-gzip, identity", gzip.compress(NAMESPACE[:9]) + gzip.compress(NAMESPACE[9:]), 200),
    "zlib": ("deflate", zlib.compress(NAMESPACE), 200),
    "raw deflate": ("deflate", deflate(NAMESPACE), 200),
    "cut off": ("gzip", gzip.compress(NAMESPACE)[:-4], 400),
    "more than gzip": ("gzip", gzip.compress(NAMESPACE) + b"{}", 400),
    "no gzip": ("gzip", NAMESPACE, 400),
    "more than zlib": ("deflate", zlib.compress(NAMESPACE) + b"{}", 400),
    "twice": ("gzip, gzip", gzip.compress(gzip.compress(NAMESPACE)), 415),
    "brotli": ("br", NAMESPACE, 415),
    "zstd": ("zstd", NAMESPACE, 415),
}
KINDS_OF_REFUSALS = {400: "BadRequestException", 415: "UnsupportedMediaTypeException"}


@pytest.mark.each_value
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize(("encoding", "body", "status"), BODIES.values(), ids=BODIES)
async def test_compressed_bodies_are_read_or_rejected_in_the_standards_form(
    tmp_path: Path, has_length: bool, encoding: str, body: bytes, status: int
) -> None:
    async with run_server(tmp_path) as server, await RawConnection.open(server) as raw_connection:
        length_header = f"Content-Length: {len(body)}" if has_length else "Transfer-Encoding: chunked"
        await raw_connection.send(build_head("POST", "/v1/namespaces", f"Content-Encoding: {encoding}", length_header))
        await raw_connection.send(
            body if has_length else encode_chunk(body[:10]) + encode_chunk(body[10:]) + b"0\r\n\r\n"
        )
        actual_status, answer = await raw_connection.read_answer()
        assert actual_status == status
        if status != 200:
            assert json.loads(answer)["error"]["type"] == KINDS_OF_REFUSALS[status]


async def test_error_of_an_unsupported_coding_lists_the_supported_codings(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        headers = {"Content-Encoding": "br"}
        async with server.http.post(server.url + "/v1/namespaces", data=NAMESPACE, headers=headers) as answer:
            assert (answer.status, answer.headers["Accept-Encoding"]) == (415, "gzip, deflate")


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_login_with_an_invalid_compressed_body_gets_an_oauth_error(tmp_path: Path, encoding: str) -> None:
    await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token") as server:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/x-www-form-urlencoded"}
        async with server.http.post(server.url + "/v1/oauth/tokens", data=b"x=y", headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]) == (400, "invalid_request")


async def test_connection_stays_open_after_a_compressed_body(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server, await RawConnection.open(server) as raw_connection:
        for number in range(3):
            body = gzip.compress(b'{"namespace":["db","n%d"]}' % number)
            await raw_connection.send(
                build_head("POST", "/v1/namespaces", "Content-Encoding: gzip", f"Content-Length: {len(body)}") + body
            )
            assert (await raw_connection.read_answer())[0] == 200
