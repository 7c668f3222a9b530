"""Avro files of manifests and manifest lists: their schemas, and the container that they are written in.

Schemas are those of Iceberg's Java library for each format version (spec: "Manifests", "Manifest Lists", appendix A
"Avro"): readers go by `field-id`, but some, such as PyIceberg's, insist on order of branches, `element-id` and names.
fastavro encodes the rows. The container is made here (Avro 1.12 specification, "Object Container Files"), because
fastavro's own would need two more packages for codecs that Arrow has.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import islice
from typing import Any

import fastavro
import msgspec

from metaserver.errors import BadRequest
from metaserver.iceberg import properties as props
from metaserver.iceberg.content_file import UNKNOWN
from metaserver.iceberg.partition import PartitionField
from metaserver.iceberg.types import base_name
from metaserver.iceberg.values import decimal_precision, decimal_scale, fixed_length

AVRO_COMPRESSION = "write.avro.compression-codec"
AVRO_COMPRESSION_LEVEL = "write.avro.compression-level"
ROWS_PER_BLOCK = 200
"""About 100 kB inflated."""

Json = dict[str, Any]

_INVALID = re.compile(r"[^A-Za-z0-9_]")


def avro_name(name: str) -> str:
    """The name as Avro allows it, made as Java's library makes it: `1 a` is `_1_x20a`.

    Stricter than Java, which keeps letters of all scripts: other libraries refuse those.
    """
    units = name.encode("utf-16-be", "surrogatepass")
    text = "".join(chr(int.from_bytes(units[i : i + 2], "big")) for i in range(0, len(units), 2))
    made = _INVALID.sub(lambda match: f"_x{ord(match[0]):X}", text)
    return f"_{made}" if made[0].isdigit() else made


def _field(name: str, field_id: int, kind: object, *, optional: bool = False) -> Json:
    if optional:
        return {"name": name, "type": ["null", kind], "default": None, "field-id": field_id}
    return {"name": name, "type": kind, "field-id": field_id}


def _by_column(key_id: int, value_id: int, value: str) -> Json:
    fields = [_field("key", key_id, "int"), _field("value", value_id, value)]
    item = {"type": "record", "name": f"k{key_id}_v{value_id}", "fields": fields}
    return {"type": "array", "logicalType": "map", "items": item}


def _list(element_id: int, kind: object) -> Json:
    return {"type": "array", "items": kind, "element-id": element_id}


_TYPES: dict[str, object] = {
    UNKNOWN: "null",
    "boolean": "boolean",
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "bytes",
    "date": {"type": "int", "logicalType": "date"},
    "time": {"type": "long", "logicalType": "time-micros"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": False},
    "timestamptz": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": True},
    "timestamp_ns": {"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": False},
    "timestamptz_ns": {"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": True},
}


def decimal_size(kind: str) -> int:
    """Bytes of a decimal type in Avro: the fewest that hold every unscaled value of its precision."""
    greatest: int = 10 ** decimal_precision(kind) - 1
    return greatest.bit_length() // 8 + 1


def partition_names(fields: Sequence[PartitionField]) -> tuple[str, ...]:
    """Avro names of a spec's fields, none twice."""
    names: list[str] = []
    for field in fields:
        name = avro_name(field.name)
        names.append(name if name not in names else f"{name}_{field.field_id}")
    return tuple(names)


def _partition_type(kind: str, field_id: int) -> object:
    """Types of fixed size carry the field's id in their names: Avro allows none twice, PyIceberg no references."""
    match base_name(kind):
        case "uuid":
            return {"type": "fixed", "name": f"uuid_fixed_{field_id}", "size": 16, "logicalType": "uuid"}
        case "fixed":
            length = fixed_length(kind)
            return {"type": "fixed", "name": f"fixed_{length}_{field_id}", "size": length}
        case "decimal":
            precision, scale = decimal_precision(kind), decimal_scale(kind)
            name = f"decimal_{precision}_{scale}_{field_id}"
            fixed = {"type": "fixed", "name": name, "size": decimal_size(kind), "logicalType": "decimal"}
            return {**fixed, "precision": precision, "scale": scale}
        case name:
            return _TYPES[name]


def _partition_record(fields: Sequence[PartitionField], types: Sequence[str]) -> Json:
    made = []
    for field, name, kind in zip(fields, partition_names(fields), types, strict=True):
        field_id = field.field_id or 0
        avro = _partition_type(kind, field_id)
        if avro == "null":  # a union may not hold it twice
            one: Json = {"name": name, "type": "null", "default": None, "field-id": field_id}
        else:
            one = _field(name, field_id, avro, optional=True)
        made.append(one if name == field.name else {**one, "iceberg-field-name": field.name})
    return {"type": "record", "name": "r102", "fields": made}


def entry_schema(format_version: int, fields: Sequence[PartitionField], types: Sequence[str]) -> Json:
    """Of the rows of a manifest whose partition spec has these fields, of these types."""
    file = [
        _field("file_path", 100, "string"),
        _field("file_format", 101, "string"),
        _field("partition", 102, _partition_record(fields, types)),
        _field("record_count", 103, "long"),
        _field("file_size_in_bytes", 104, "long"),
    ]
    file.append(_field("block_size_in_bytes", 105, "long")) if format_version == 1 else file.insert(
        0, _field("content", 134, "int")
    )
    file += [
        _field("column_sizes", 108, _by_column(117, 118, "long"), optional=True),
        _field("value_counts", 109, _by_column(119, 120, "long"), optional=True),
        _field("null_value_counts", 110, _by_column(121, 122, "long"), optional=True),
        _field("nan_value_counts", 137, _by_column(138, 139, "long"), optional=True),
        _field("lower_bounds", 125, _by_column(126, 127, "bytes"), optional=True),
        _field("upper_bounds", 128, _by_column(129, 130, "bytes"), optional=True),
        _field("key_metadata", 131, "bytes", optional=True),
        _field("split_offsets", 132, _list(133, "long"), optional=True),
    ]
    if format_version >= 2:
        file.append(_field("equality_ids", 135, _list(136, "int"), optional=True))
    file.append(_field("sort_order_id", 140, "int", optional=True))
    if format_version >= 3:
        file.append(_field("first_row_id", 142, "long", optional=True))
    if format_version >= 2:
        file.append(_field("referenced_data_file", 143, "string", optional=True))
    if format_version >= 3:
        file.append(_field("content_offset", 144, "long", optional=True))
        file.append(_field("content_size_in_bytes", 145, "long", optional=True))
    entry = [_field("status", 0, "int"), _field("snapshot_id", 1, "long", optional=format_version > 1)]
    if format_version >= 2:
        entry.append(_field("sequence_number", 3, "long", optional=True))
        entry.append(_field("file_sequence_number", 4, "long", optional=True))
    entry.append(_field("data_file", 2, {"type": "record", "name": "r2", "fields": file}))
    return {"type": "record", "name": "manifest_entry", "fields": entry}


def list_schema(format_version: int) -> Json:
    """Of the rows of a manifest list."""
    summary = [
        _field("contains_null", 509, "boolean"),
        _field("contains_nan", 518, "boolean", optional=True),
        _field("lower_bound", 510, "bytes", optional=True),
        _field("upper_bound", 511, "bytes", optional=True),
    ]
    first = format_version == 1
    fields = [
        _field("manifest_path", 500, "string"),
        _field("manifest_length", 501, "long"),
        _field("partition_spec_id", 502, "int"),
    ]
    if not first:
        fields += [_field("content", 517, "int"), _field("sequence_number", 515, "long")]
        fields.append(_field("min_sequence_number", 516, "long"))
    fields += [
        _field("added_snapshot_id", 503, "long"),
        _field("added_files_count", 504, "int", optional=first),
        _field("existing_files_count", 505, "int", optional=first),
        _field("deleted_files_count", 506, "int", optional=first),
        _field("added_rows_count", 512, "long", optional=first),
        _field("existing_rows_count", 513, "long", optional=first),
        _field("deleted_rows_count", 514, "long", optional=first),
        _field("partitions", 507, _list(508, {"type": "record", "name": "r508", "fields": summary}), optional=True),
        _field("key_metadata", 519, "bytes", optional=True),
    ]
    if format_version >= 3:
        fields.append(_field("first_row_id", 520, "long", optional=True))
    return {"type": "record", "name": "manifest_file", "fields": fields}


Codec = tuple[str, Callable[[bytes], bytes]]
"""Avro's name, and what packs a block."""


def codec_of(properties: Mapping[str, str]) -> Codec:
    """What the table's properties ask for, by default gzip (Avro: deflate). BadRequest names the property."""
    name = properties.get(AVRO_COMPRESSION, "gzip").lower()
    level = props.as_int(properties, AVRO_COMPRESSION_LEVEL, -1) if AVRO_COMPRESSION_LEVEL in properties else None
    make = _CODECS.get(name)
    if make is None:
        raise BadRequest(
            f"Property {AVRO_COMPRESSION} is {name!r}: set it to one of gzip, zstd, snappy and uncompressed"
        )
    low, high = _LEVELS.get(name, (-(2**31), 2**31))
    if level is not None and not low <= level <= high:
        raise BadRequest(f"Property {AVRO_COMPRESSION_LEVEL} is {level}: {name} takes {low} to {high}")
    return make(level)


def _deflate(level: int | None) -> Codec:
    def pack(block: bytes) -> bytes:
        packer = zlib.compressobj(-1 if level is None else level, wbits=-15)
        return packer.compress(block) + packer.flush()

    return "deflate", pack


# pyarrow is looked up when a table asks for it: it costs each process a tenth of a second and 40 MB
def _zstandard(level: int | None) -> Codec:
    codec = importlib.import_module("pyarrow").Codec("zstd", compression_level=1 if level is None else level)
    return "zstandard", lambda block: codec.compress(block, asbytes=True)


def _snappy(_: int | None) -> Codec:
    codec = importlib.import_module("pyarrow").Codec("snappy")
    # Snappy's own block format, then the CRC-32 of what was packed
    return "snappy", lambda block: codec.compress(block, asbytes=True) + zlib.crc32(block).to_bytes(4, "big")


_CODECS: dict[str, Callable[[int | None], Codec]] = {
    "gzip": _deflate,
    "deflate": _deflate,
    "zstd": _zstandard,
    "zstandard": _zstandard,
    "snappy": _snappy,
    "uncompressed": lambda _: ("null", lambda block: block),
    "null": lambda _: ("null", lambda block: block),
}
_LEVELS = dict.fromkeys(("gzip", "deflate"), (-1, 9)) | dict.fromkeys(("zstd", "zstandard"), (1, 22))


def write_container(schema: Json, rows: Iterator[Json], header: Mapping[str, str], codec: Codec) -> bytes:
    """A whole Avro file. `rows` are as fastavro takes them: (branch, value) picks a union's branch unasked.

    The same rows make the same bytes: the sync marker is drawn from what comes before it.
    """
    name, pack = codec
    out = BytesIO()
    out.write(b"Obj\x01")
    entries = {**header, "avro.schema": msgspec.json.encode(schema).decode(), "avro.codec": name}
    out.write(_varint(len(entries)))
    for key, value in entries.items():
        out.write(_framed(key.encode()) + _framed(value.encode()))
    out.write(b"\x00")
    sync = hashlib.blake2b(out.getvalue(), digest_size=16).digest()
    out.write(sync)
    array = fastavro.parse_schema({"type": "array", "items": schema})
    while block := list(islice(rows, ROWS_PER_BLOCK)):
        out.write(_varint(len(block)) + _framed(pack(_encoded(array, block))) + sync)
    return out.getvalue()


def _encoded(array: Any, rows: list[Json]) -> bytes:
    """The rows one after the other: what fastavro makes of an array of them, without its count and its end."""
    out = BytesIO()
    fastavro.schemaless_writer(out, array, rows)
    data, count = out.getvalue(), _varint(len(rows))
    assert data.startswith(count)
    assert data.endswith(b"\x00")
    return data[len(count) : -1]


def _varint(value: int) -> bytes:
    """Of a number that is not negative."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _framed(data: bytes) -> bytes:
    return _varint(len(data)) + data
