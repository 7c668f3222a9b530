"""Planted secrets, and the search for them in everything that a hostile client receives.

The search finds a secret in any form in which an answer may contain it: plain, escaped as JSON, percent-encoded, in
base64 or hexadecimal, and inside gzip, Avro, Parquet, Arrow, Puffin and zstd bodies. The oracle shares no code with the
server.

There are two kinds of secrets. A handle (a path, a name, an id) may be given to the attacker as a hint. Once the
attacker has sent it, an answer that repeats it reveals nothing. A value (of a row, a bound, a property, a text) is
never given, so each occurrence is a leak.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote, quote_plus, unquote_to_bytes

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq

_DEPTH_MAX = 4
_BYTES_MAX = 32 << 20
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{16,}={0,2}")
_HEX = re.compile(rb"(?:[0-9a-fA-F]{2}){8,}")
_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Secret:
    description: str
    text: str
    is_value: bool

    def __str__(self) -> str:
        return f"{self.description} {self.text!r}"


@dataclass
class Secrets:
    """All planted secrets, and the search for those that the attacker has not been given."""

    registered_secrets: list[Secret] = field(default_factory=list)
    known_secrets: set[Secret] = field(default_factory=set)
    """The secrets that the attacker has received as hints."""
    _forms: dict[Secret, tuple[bytes, ...]] = field(default_factory=dict)

    def register(self, label: str, text: str | int, *, value: bool = False) -> str:
        """Register a secret, and return its text.

        Args:
            label: What the secret is, for reports of leaks.
            text: The text, of at least 10 characters. A shorter text could occur by chance.
            value: Whether the secret is a value, which no attacker may receive as a hint.
        """
        assert len(str(text)) >= 10, f"{label} {text!r} is too short, because it could occur by chance"
        secret = Secret(label, str(text), value)
        if secret.text not in {item.text for item in self.registered_secrets}:
            self.registered_secrets.append(secret)
            self._forms[secret] = tuple(_encode_forms(secret.text))
        return secret.text

    def tell(self, *texts: str) -> None:
        """Give these texts to the attacker as hints. If a text contains a value, the test is wrong."""
        for text in texts:
            for secret in self._find_secrets(text.encode()):
                assert not secret.is_value, f"a hint contains the {secret}"
                self.known_secrets.add(secret)

    def find_leaks(self, body: bytes, headers: Mapping[str, str] | None = None) -> set[Secret]:
        """Return the secrets in an answer that the attacker has not been given."""
        lines = "\n".join(f"{name}: {text}" for name, text in (headers or {}).items())
        secrets: set[Secret] = set()
        for piece in (lines.encode("utf-8", "surrogateescape"), body):
            for blob in unpack(piece):
                secrets |= self._find_secrets(blob)
        return secrets - self.known_secrets

    def _find_secrets(self, blob: bytes) -> set[Secret]:
        return {secret for secret, forms in self._forms.items() if any(form in blob for form in forms)}


def _encode_forms(text: str) -> Iterator[bytes]:
    """Yield the forms in which an answer may contain the text, or the number that it is."""
    raw = text.encode()
    escaped_texts = {text, json.dumps(text)[1:-1], quote(text, safe=""), quote(text), quote_plus(text)}
    yield from {escaped_text.encode() for escaped_text in escaped_texts}
    yield from _encode_opaquely(raw)
    if text.lstrip("-").isdigit():
        for order in ("little", "big"):
            number = int(text).to_bytes(8, order, signed=True)  # type: ignore[arg-type]
            yield number
            yield from _encode_opaquely(number)


def _encode_opaquely(raw: bytes) -> Iterator[bytes]:
    """Yield the bytes in hexadecimal, and in base64 at each of the three possible alignments."""
    yield raw.hex().encode()
    yield raw.hex().upper().encode()
    for padding in range(3):
        encoded_text = base64.b64encode(b"\0" * padding + raw)
        # A character of base64 has 6 bits. Characters outside of `start` and `end` also have bits of the neighbouring
        # bytes.
        start = (0, 2, 3)[padding]
        end = len(encoded_text) if (padding + len(raw)) % 3 == 0 else (padding + len(raw)) // 3 * 4
        if end - start >= 8:  # A shorter text could occur by chance.
            yield encoded_text[start:end]
            yield encoded_text[start:end].replace(b"+", b"-").replace(b"/", b"_")


def unpack(blob: bytes, depth: int = 0) -> Iterator[bytes]:
    """Yield the bytes, and the compressed or encoded contents in them, up to `_DEPTH_MAX` levels deep.

    Of each content, only the first `_BYTES_MAX` bytes are used.
    """
    yield blob
    if depth >= _DEPTH_MAX or not blob:
        return
    for inner in _unpack_blob(blob):
        if inner and inner != blob:
            yield from unpack(inner[:_BYTES_MAX], depth + 1)


def _unpack_blob(blob: bytes) -> Iterator[bytes]:
    """Yield the decompressed or decoded forms of a blob, including forms of base64 and hexadecimal parts in it."""
    if blob[:2] == b"\x1f\x8b":  # gzip
        yield _read_or_return_nothing(lambda: gzip.decompress(blob))
    elif blob[:1] == b"\x78":  # zlib
        yield _read_or_return_nothing(lambda: zlib.decompress(blob))
    elif blob[:4] == b"Obj\x01":  # Avro
        yield _read_or_return_nothing(lambda: repr(list(fastavro.reader(io.BytesIO(blob)))).encode())
        yield _read_or_return_nothing(lambda: b"\0".join(_list_leaves(list(fastavro.reader(io.BytesIO(blob))))))
    elif blob[:4] == b"PAR1":  # Parquet
        yield _read_or_return_nothing(
            lambda: json.dumps(pq.read_table(io.BytesIO(blob)).to_pylist(), default=repr).encode()
        )
        yield _read_or_return_nothing(lambda: repr(pq.read_metadata(io.BytesIO(blob)).to_dict()).encode())
    elif blob[:4] == b"\xff\xff\xff\xff":  # a stream of Arrow
        yield _read_or_return_nothing(lambda: _decode_arrow(blob))
    else:
        for match in re.finditer(re.escape(_ZSTD), blob):
            yield _read_or_return_nothing(partial(_decompress_zstd, blob[match.start() :]))
        for token in _BASE64.findall(blob):
            token_text = token.rstrip(b"=")
            yield _read_or_return_nothing(partial(base64.urlsafe_b64decode, token_text + b"=" * (-len(token_text) % 4)))
        for token in _HEX.findall(blob):
            yield bytes.fromhex(token.decode())
        if b"%" in blob:
            yield unquote_to_bytes(blob)


def _list_leaves(value: object) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _list_leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _list_leaves(inner)
    else:
        yield str(value).encode()


def _decode_arrow(blob: bytes) -> bytes:
    with pa.ipc.open_stream(blob) as stream:
        table = stream.read_all()
    schema_text = repr(stream.schema.metadata)
    return (json.dumps(table.to_pylist(), default=repr) + schema_text).encode() + b"\0".join(
        _list_leaves(table.to_pylist())
    )


def _decompress_zstd(blob: bytes) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(blob), "zstd") as stream:
        return bytes(stream.read(_BYTES_MAX))


_DECODING_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    StopIteration,
    zlib.error,
    binascii.Error,
    pa.ArrowException,
)


def _read_or_return_nothing(read: Callable[[], bytes]) -> bytes:
    """Return the result of `read`, or no bytes if the data does not have the assumed format."""
    try:
        return bytes(read())
    except _DECODING_ERRORS:
        return b""


def merge_texts(secrets: Iterable[Secret]) -> str:
    return ", ".join(sorted(map(str, secrets)))
