"""View metadata, version 1 (Iceberg view spec), as one immutable value, and its conversion from and to JSON."""

from __future__ import annotations

import zlib
from functools import cached_property

import msgspec

from seamark.formats.iceberg.metadata.table_json import decompress_if_gzip
from seamark.formats.iceberg.types.reading import Int32, Int64
from seamark.formats.iceberg.types.schema import Schema, copy_with_id
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, Corrupt

FORMAT_VERSION = 1


class Representation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The definition of a view in one form, such as SQL of a dialect.

    The spec defines only the type `sql`. Stored values of other types are kept.
    """

    type: str
    sql: str | None = None
    dialect: str | None = None


class ViewVersion(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    """A version of a view: its schema and its SQL in one or several dialects."""

    version_id: Int32
    timestamp_ms: Int64
    schema_id: Int32
    summary: dict[str, str]
    representations: tuple[Representation, ...]
    default_namespace: tuple[str, ...]
    default_catalog: str | None = None

    @property
    def dialects(self) -> frozenset[str]:
        """The SQL dialects in lower case."""
        return frozenset(item.dialect.lower() for item in self.representations if item.dialect is not None)

    def behaves_as(self, other: ViewVersion) -> bool:
        """Return whether two versions are equal except for id and time. An equal version is not added again."""
        return msgspec.structs.replace(self, version_id=0, timestamp_ms=0) == msgspec.structs.replace(
            other, version_id=0, timestamp_ms=0
        )


class ViewLogEntry(msgspec.Struct, frozen=True, gc=False, rename="kebab"):
    timestamp_ms: Int64
    version_id: Int32


class ViewMetadata(msgspec.Struct, frozen=True, dict=True, kw_only=True, rename="kebab"):
    """The metadata of a view. Times are milliseconds since the epoch."""

    view_uuid: str
    format_version: Int32
    location: str
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    schemas: tuple[Schema, ...]
    current_version_id: Int32
    versions: tuple[ViewVersion, ...]
    version_log: tuple[ViewLogEntry, ...]

    @cached_property
    def versions_by_id(self) -> dict[int, ViewVersion]:
        return {version.version_id: version for version in self.versions}

    @property
    def current_version(self) -> ViewVersion:
        version = self.versions_by_id.get(self.current_version_id)
        if version is None:
            raise BadRequest(
                f"Cannot find current version {self.current_version_id} in view versions: {[*self.versions_by_id]}"
            )
        return version

    def schema(self, schema_id: int) -> Schema | None:
        return next((schema for schema in self.schemas if schema.id == schema_id), None)


_ENCODER = msgspec.json.Encoder()


def decode_view(data: bytes, source: str) -> ViewMetadata:
    """Decode a metadata file, plain or gzipped.

    Raises:
        Corrupt: The metadata are invalid. The message names `source`, the file's location.
    """
    try:
        view = convert_json(decompress_if_gzip(data), ViewMetadata)
        check_view_invariants(view)
    except RecursionError:
        raise Corrupt(f"{source} is not valid view metadata: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError, zlib.error, BadRequest) as error:
        raise Corrupt(f"{source} is not valid view metadata: {error}") from error
    # A schema without a stored id gets the id 0.
    return msgspec.structs.replace(view, schemas=tuple(copy_with_id(schema, schema.id) for schema in view.schemas))


def encode_view(view: ViewMetadata) -> bytes:
    """Encode the metadata as UTF-8 JSON, for a metadata file or a REST response."""
    return _ENCODER.encode(view)


def check_view_invariants(view: ViewMetadata) -> None:
    """Check that the parts of the metadata do not contradict each other.

    Raises:
        BadRequest: Two parts contradict each other. The message describes the first contradiction.
    """
    if view.format_version != FORMAT_VERSION:
        raise BadRequest(f"Unsupported format version: {view.format_version} (supported: {FORMAT_VERSION})")
    if len(view.versions_by_id) != len(view.versions):
        raise BadRequest("Multiple view versions with the same id")
    ids = [schema.id for schema in view.schemas]
    if len(set(ids)) != len(ids):
        raise BadRequest(f"Multiple entries with the same schema id: {ids}")
    if view.current_version.schema_id not in ids:
        raise BadRequest(f"Cannot find current schema with id {view.current_version.schema_id} in schemas: {ids}")
