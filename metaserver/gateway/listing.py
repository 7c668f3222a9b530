"""Parses requests of ListObjectsV2, and writes the answers: pages of sorted keys. The module does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.metaserver.gateway.answers import NAMESPACE, XML_HEAD, format_timestamp
from seamark.metaserver.gateway.s3_errors import S3Error, escape_xml

PAGE_MAX = 1000


@dataclass(frozen=True, slots=True)
class Listed:
    """A key, or a common prefix, in a listing. A common prefix has no ETag."""

    key: str
    size: int = 0
    modified_ns: int = 0
    etag: str = ""


@dataclass(frozen=True, slots=True)
class ListingRequest:
    """A parsed request for a listing.

    Attributes:
        start_after: The listing starts after this key.
        limit: The maximum number of keys in the answer.
    """

    bucket: str
    query: Mapping[str, str]
    prefix: str
    delimiter: str
    start_after: str
    limit: int

    @staticmethod
    def parse(bucket: str, query: Mapping[str, str]) -> ListingRequest:
        """Parse the query of a request.

        Raises:
            S3Error: The request is for version 1, or its token is malformed.
        """
        if query.get("list-type") != "2":
            raise S3Error("NotImplemented", "Only version 2 of listings is supported; send list-type=2")
        token = query.get("continuation-token")
        start_after = query.get("start-after", "") if token is None else _read_token(token)
        limit = min(int(query.get("max-keys", PAGE_MAX)), PAGE_MAX)
        return ListingRequest(bucket, query, query["prefix"], query.get("delimiter", ""), start_after, limit)

    def write(self, entries: Sequence[Listed]) -> bytes:
        """Return the answer as XML.

        Args:
            entries: The first `limit` entries after `start_after`. If there are more entries, one more.
        """
        query = self.query
        is_truncated, page = len(entries) > self.limit, entries[: self.limit]
        encode = (lambda text: quote(text, safe="/-_.~")) if query.get("encoding-type") == "url" else escape_xml
        fields = [("Name", self.bucket), ("Prefix", encode(self.prefix)), ("KeyCount", str(len(page)))]
        fields += [("MaxKeys", str(self.limit)), ("IsTruncated", str(is_truncated).lower())]
        if self.delimiter:
            fields.append(("Delimiter", encode(self.delimiter)))
        if "encoding-type" in query:
            fields.append(("EncodingType", query["encoding-type"]))
        if "continuation-token" in query:
            fields.append(("ContinuationToken", escape_xml(query["continuation-token"])))
        if query.get("start-after"):
            fields.append(("StartAfter", encode(query["start-after"])))
        if is_truncated:
            fields.append(("NextContinuationToken", _encode_token(page[-1].key)))
        text = "".join(f"<{name}>{value}</{name}>" for name, value in fields)
        text += "".join(_format_entry(entry, encode(entry.key)) for entry in page)
        return f'{XML_HEAD}<ListBucketResult xmlns="{NAMESPACE}">{text}</ListBucketResult>'.encode()


def _format_entry(entry: Listed, key: str) -> str:
    """Return an object or a common prefix as XML. `key` is its encoded key."""
    if not entry.etag:  # Only objects have an ETag, so the entry is a common prefix.
        return f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{key}</Key><LastModified>{format_timestamp(entry.modified_ns)}</LastModified>"
        f"<ETag>{escape_xml(entry.etag)}</ETag><Size>{entry.size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _encode_token(key: str) -> str:
    return to_base64url(encode_key(key))


def _read_token(token: str) -> str:
    try:
        raw = decode_base64url(token)
        return raw.decode("utf-8", "surrogateescape")
    except ValueError:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from None
