"""Measure libraries that could replace code of this project: `python -m bench.structure.libraries`.

The benchmark measures the installed libraries. botocore is a dependency, and `pip install theine thriftpy2` adds the
others. The decisions are in docs/design/0044-libraries.md.
"""

from __future__ import annotations

import importlib
import io
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from seamark.cache.admission import AdmittingCache
from seamark.cache.frequency import FrequencySketch
from seamark.cache.memory import ENTRY_OVERHEAD_BYTES
from seamark.formats.iceberg.files.footer import read_footer
from seamark.metaserver.gateway.sigv4 import RequestTarget, SignatureClaim, is_signed

REQUESTS, ACCESSES, KEYS, KEPT_KEYS = 5_000, 400_000, 100_000, 2_000
COLUMNS, GROUPS = 50, 40
ROUNDS = 5
SECRET, REGION, STAMP = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1", "20261128T110000Z"


def main() -> None:
    _measure_signatures()
    _measure_admission()
    _measure_footers()


def _measure_signatures() -> None:
    token = "t" * 400
    headers = {
        "host": "127.0.0.1:8182",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": STAMP,
        "x-amz-security-token": token,
    }
    targets = [
        RequestTarget("GET", f"/lake/db/t/data/part-{n:06}.parquet", "", {**headers, "range": f"bytes={n}-{n + 9}"})
        for n in range(REQUESTS)
    ]
    claim = SignatureClaim("AK", token, STAMP, REGION, tuple(headers), "0" * 64, "UNSIGNED-PAYLOAD")
    signer = S3SigV4Auth(Credentials("AK", SECRET, token), "s3", REGION)

    def verify_by_botocore(target: RequestTarget) -> bool:
        request = AWSRequest(target.method, f"http://127.0.0.1:8182{target.path}")
        for name in claim.signed_headers:
            request.headers[name] = target.headers[name]
        request.context["timestamp"] = claim.timestamp
        text = signer.string_to_sign(request, signer.canonical_request(request))
        return signer.signature(text, request) == claim.signature

    for name, verify in (("ours", lambda target: is_signed(claim, target, SECRET)), ("botocore", verify_by_botocore)):
        seconds = _measure_minimum(lambda verify=verify: [verify(target) for target in targets])
        _print_figure("verify a signature", name, f"{seconds / REQUESTS * 1e6:.1f} µs")


def _measure_admission() -> None:
    """Compare the hit rate and the CPU time of a cache with those of theine, if it is installed."""
    draw = random.Random(1)
    # Zipf's law with the exponent 0.8.
    weights = [1 / (rank + 1) ** 0.8 for rank in range(KEYS)]
    keys = draw.choices(range(KEYS), weights, k=ACCESSES)
    keys[ACCESSES // 2 : ACCESSES // 2] = range(KEYS, 2 * KEYS)  # A scan reads each of its keys once.
    value = b"x"

    def ours() -> tuple[Callable[[int], object], Callable[[int], object]]:
        sketch = FrequencySketch(KEPT_KEYS)
        cache: AdmittingCache[int, bytes] = AdmittingCache(KEPT_KEYS * (ENTRY_OVERHEAD_BYTES + 1), sketch)
        return cache.get, lambda key: cache.put(key, value, 1)

    caches = {"ours": ours}
    theine = _import_or_none("theine")
    if theine is not None:

        def theirs() -> tuple[Callable[[int], object], Callable[[int], object]]:
            cache = theine.Cache(KEPT_KEYS)
            return lambda key: cache.get(key)[0], lambda key: cache.set(key, value)

        caches["theine"] = theirs
    for name, make in caches.items():
        seconds, hits = [], 0
        for _ in range(ROUNDS):
            get, put = make()
            hits, cpu_s_before = 0, time.process_time()
            for key in keys:
                if get(key) is None:
                    put(key)
                else:
                    hits += 1
            seconds.append(time.process_time() - cpu_s_before)
        share = f"{hits / len(keys):.1%} hits"
        _print_figure("get, and put on a miss", name, f"{min(seconds) / len(keys) * 1e6:.2f} µs, {share}")


def _measure_footers() -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "wide.parquet"
        table = pa.table({f"column_{number}": pa.array(range(GROUPS)) for number in range(COLUMNS)})
        pq.write_table(table, path, row_group_size=1)
        data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8]
    _print_figure(
        "read a footer of 2,000 chunks", "ours", f"{_measure_minimum(lambda: read_footer(footer)) * 1e3:.2f} ms"
    )
    thriftpy2 = _import_or_none("thriftpy2")
    if thriftpy2 is None:
        return
    parquet = thriftpy2.load_fp(io.StringIO(_IDL), "parquet_thrift")
    compact = importlib.import_module("thriftpy2.protocol.compact")
    transport = importlib.import_module("thriftpy2.transport")

    def read_by_library() -> object:
        metadata = parquet.FileMetaData()
        compact.TCompactProtocol(transport.TMemoryBuffer(footer)).read_struct(metadata)
        assert len(metadata.row_groups) == GROUPS
        return metadata

    _print_figure(
        "read a footer of 2,000 chunks",
        "thriftpy2",
        f"{_measure_minimum(read_by_library) * 1e3:.2f} ms, drops unknown fields",
    )


def _measure_minimum(work: Callable[[], object]) -> float:
    """Return the least CPU seconds of all rounds."""
    seconds = []
    for _ in range(ROUNDS):
        cpu_s_before = time.process_time()
        work()
        seconds.append(time.process_time() - cpu_s_before)
    return min(seconds)


def _import_or_none(name: str) -> ModuleType | None:
    """Return the module `name`, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _print_figure(case: str, library: str, figure: str) -> None:
    print(f"{case:32} {library:10} {figure}")


_IDL = """
struct Statistics {
  1: binary max; 2: binary min; 3: i64 null_count; 4: i64 distinct_count; 5: binary max_value; 6: binary min_value
}
struct SchemaElement {
  1: i32 type; 2: i32 type_length; 3: i32 repetition_type; 4: binary name; 5: i32 num_children; 6: i32 converted_type
}
struct KeyValue { 1: binary key; 2: binary value }
struct PageEncodingStats { 1: i32 page_type; 2: i32 encoding; 3: i32 count }
struct ColumnMetaData {
  1: i32 type; 2: list<i32> encodings; 3: list<binary> path_in_schema; 4: i32 codec; 5: i64 num_values;
  6: i64 total_uncompressed_size; 7: i64 total_compressed_size; 8: list<KeyValue> key_value_metadata;
  9: i64 data_page_offset; 10: i64 index_page_offset; 11: i64 dictionary_page_offset; 12: Statistics statistics;
  13: list<PageEncodingStats> encoding_stats
}
struct ColumnChunk {
  1: binary file_path; 2: i64 file_offset; 3: ColumnMetaData meta_data; 4: i64 offset_index_offset;
  5: i32 offset_index_length; 6: i64 column_index_offset; 7: i32 column_index_length
}
struct RowGroup {
  1: list<ColumnChunk> columns; 2: i64 total_byte_size; 3: i64 num_rows; 5: i64 file_offset;
  6: i64 total_compressed_size; 7: i16 ordinal
}
struct FileMetaData {
  1: i32 version; 2: list<SchemaElement> schema; 3: i64 num_rows; 4: list<RowGroup> row_groups;
  5: list<KeyValue> key_value_metadata; 6: binary created_by
}
"""

if __name__ == "__main__":
    sys.exit(main())
