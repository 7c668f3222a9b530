"""Clusters new rows along a curve through the table's clustering columns (incremental clustering).

The files of one rewrite are a layer, in which each file covers a small range of the columns. New files
and files with many deletes are loose: they belong to no layer. A rewrite selects all loose files of a partition. Then
it selects layers, the smallest first, as long as a layer is at most as large as all files that are already selected. A
row is therefore rewritten a logarithmic number of times, and a query opens files of a logarithmic number of layers. If
the clustering columns change, existing layers stay until they are merged.

Rows are sorted within bounded memory. A sample of the rows divides the keys into ranges. The rows of each range are
written to a temporary file, and the ranges are sorted one after the other.

Invariant: the job adds, loses and changes no row (`write/replacements.py`).
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from seamark.connector.arrow.arrays import Longs
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.policies import read_effective_properties
from seamark.connector.client.progress import advance
from seamark.connector.parquet.copy.protection import PUBLISHES_LAYOUT, FileProtection, SourceCheck
from seamark.connector.parquet.encryption.keys import EncryptionScheme, ParquetKeys, read_table_keys
from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.read_plan import ReadPlan, plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.settled_files import now_ms, select_settled_tasks
from seamark.connector.read.tables import OpenTable, ScanTask, plan
from seamark.connector.write.clustering import (
    Attributes,
    Clustering,
    JoinedTable,
    choose_range_bounds,
    derive_layer_properties,
    generate_layer_name,
    read_joined_tables,
)
from seamark.connector.write.compaction import (
    CompactionPolicy,
    count_deletes,
    divide_groups,
    divide_tasks,
    group_by_partition,
    has_many_deletes,
)
from seamark.connector.write.data_files import divide_by_protection, require_unchanged_scheme
from seamark.connector.write.replacements import (
    BatchRunner,
    RewriteReport,
    RewrittenFiles,
    announce_batches,
    open_rewritable,
    replace_batches,
    run_here,
    select_rewritable,
)
from seamark.connector.write.row_origins import OriginLog
from seamark.connector.write.table_writer import TableWriter, WrittenFiles, discard_on_error
from seamark.connector.write.target import create_target, with_lineage
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.metadata.clustering import (
    CLUSTERED_BY,
    COLUMNS,
    LAYER_BYTES,
    LAYER_FILES,
    ClusteringLayout,
    parse_joins,
    parse_layer,
)
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.services.curves import choose_cell_bounds, to_sortable_keys

BATCH_BYTES, BATCH_FILES = 1 << 30, 2000
"""The maximum total size and number of the files of small partitions whose layers are committed together."""
RANGE_BYTES, RANGE_ROWS = 32 << 20, 1_000_000
"""The approximate limits of the rows that are sorted in memory together: the bytes of data files, and the rows."""
SPILL_BYTES = 32 << 30
"""The maximum size of the temporary files of one layer, because the rows of small data files may be large."""
JOINED_ROWS = 20_000_000
"""The maximum number of rows of a joined table, which is in memory as a whole."""
SAMPLE_ROWS = 200_000
"""The approximate number of rows of a layer in the sample from which its order is computed."""
_FILE_ROWS_MAX_FACTOR = 1.5
"""The maximum number of rows of a file, as a multiple of the target number.

A file may have more rows than the target if the sample has too few of its rows.
"""
_ROWS_PER_BATCH = 65_536
_SEALED_BYTES = 1 << 20
"""The maximum size in bytes of a block of an encrypted temporary file, before its encryption."""
_LENGTH_BYTES, _NONCE_BYTES = 4, 12
"""The size of the stored length of a block, and of a nonce of AES-GCM."""
_ORIGIN, _KEY = "_seamark_origin", "_seamark_key"
"""The last two columns of a temporary file: the origin and the key of each row."""

Keys = npt.NDArray[np.bytes_]
Layer = list[ScanTask]


def cluster_incrementally(
    client: SeamarkClient,
    table: Name,
    *,
    full: bool = False,
    dry_run: bool = False,
    settled: bool = False,
    branch: str = MAIN,
    runner: BatchRunner = run_here,
) -> RewriteReport:
    """Cluster the files that are not yet clustered, by the policy in the table's properties.

    Args:
        full: Whether to also cluster layers that have a different layout.
        dry_run: Whether to report the files that would be replaced, and commit nothing. The size of the new files is
            then an estimate.
        settled: Whether to leave out files that writers will probably replace soon.
        runner: A function that runs the rewrites, in this process or elsewhere.

    Raises:
        InvalidRequest: The table has no clustering columns, or has format version 1.
        Unreadable: A file cannot be read.
        Refused: The server refuses a commit.
    """
    source_table = open_rewritable(client, table, branch, history=settled)
    policy_properties = read_effective_properties(client, table)
    layout = ClusteringLayout.from_properties({**policy_properties, **source_table.metadata.properties})
    if layout is None:
        raise InvalidRequest(f"The table has no clustering columns; set the property {COLUMNS}")
    names = [field.name for field in source_table.schema.fields]
    joins = parse_joins({**policy_properties, **source_table.metadata.properties})
    tables = {name: JoinedTable(join.table, join.on) for name, join in joins.items()}
    joined_tables = read_joined_tables(client, layout.columns, tables, rows_max=JOINED_ROWS)
    attributes = Attributes(layout.columns, joined_tables, plan_read(source_table, names, TRUE).arrow)
    policy = CompactionPolicy.from_metadata(source_table.metadata, policy_properties)
    began_ms = now_ms()
    tasks = list(plan(client, source_table, sequence_numbers=settled))
    candidates: Sequence[ScanTask] = select_rewritable(tasks)
    choose = partial(_build_new_layers, layout=layout, policy=policy, full=full)
    recheck_after_s = 0.0
    if settled:
        candidates, recheck_after_s = select_settled_tasks(
            source_table, candidates, lambda tasks: chain.from_iterable(choose(tasks)), now_ms() - began_ms
        )
    layers = choose(candidates)
    batches = (
        (
            [task for layer in batch for task in layer],
            partial(_rewrite, source_table, batch, layout, attributes, policy),
        )
        for batch in divide_groups(layers, BATCH_BYTES, BATCH_FILES)
    )
    return replace_batches(
        client,
        source_table,
        tasks,
        announce_batches(batches),
        target_bytes=policy.target_bytes,
        dry_run=dry_run,
        branch=branch,
        runner=runner,
        recheck_after_s=recheck_after_s,
        summary={CLUSTERED_BY: layout.text},
    )


# Selection of files


def _build_new_layers(
    tasks: Sequence[ScanTask], layout: ClusteringLayout, policy: CompactionPolicy, *, full: bool
) -> Iterator[Layer]:
    """Yield the files of each new layer: the files that the job rewrites together, partition by partition.

    A file is loose if it belongs to no layer, has many deletes or, for a full run, was clustered by another layout. A
    partition is left out if its loose files are few and small, none has many deletes, and the run is not full.
    """
    shared_deletes = count_deletes(tasks)
    for members in group_by_partition(tasks):
        loose_tasks, is_due = list[ScanTask](), full
        layers: defaultdict[str, Layer] = defaultdict(list)
        for task in members:
            digest, layer = parse_layer(task.path) or (None, "")
            is_dirty = has_many_deletes(task, shared_deletes)
            is_due |= is_dirty
            if digest is None or (full and digest != layout.digest) or is_dirty:
                loose_tasks.append(task)
            else:
                layers[layer].append(task)
        if is_due or len(loose_tasks) >= policy.min_files or _sum_sizes(loose_tasks) >= policy.target_bytes:
            yield from _form_layers(loose_tasks, sorted(layers.values(), key=_sum_sizes))


def _form_layers(loose_tasks: Sequence[ScanTask], layers: list[Layer]) -> Iterator[Layer]:
    """Yield the files of each new layer: the loose files, merged with layers that are at most as large.

    A layer is the set of files that a rewrite has clustered together.

    Args:
        loose_tasks: The files that belong to no layer, for example new files and files with many deletes.
        layers: The layers, in ascending order of size.
    """
    for part in divide_tasks(loose_tasks, LAYER_BYTES, LAYER_FILES):
        layer_tasks, size_bytes = list(part), _sum_sizes(part)
        while layers and (layer_bytes := _sum_sizes(layers[0])) <= min(size_bytes, LAYER_BYTES - size_bytes):
            if len(layer_tasks) + len(layers[0]) > LAYER_FILES:
                break
            layer_tasks += layers.pop(0)
            size_bytes += layer_bytes
        yield layer_tasks


def _sum_sizes(tasks: Sequence[ScanTask]) -> int:
    return sum(task.size_bytes for task in tasks)


# Rewrite of a layer


def _rewrite(
    source_table: OpenTable,
    layers: Sequence[Layer],
    layout: ClusteringLayout,
    attributes: Attributes,
    policy: CompactionPolicy,
) -> RewrittenFiles:
    """Write the rows of the layers into clustered files, and return these files without committing them.

    Each layer is the list of files that are sorted together.

    Raises:
        Unwritable: A clustering column is encrypted.
    """
    target, origins, keys = (
        create_target(source_table.metadata, source_table.storage, source_table.name),
        OriginLog(),
        read_table_keys(source_table.name),
    )
    names = [field.name for field in source_table.schema.fields]
    if has_lineage(source_table.metadata):
        names, target = [*names, *NAMES], with_lineage(target)
    read_plan = plan_read(source_table, names, TRUE, positions=True)
    suffix = layout.make_suffix(generate_layer_name())
    layout_ids = [field.id for field in source_table.schema.fields if field.name in attributes.columns]
    # Files with different encryption cannot share a new file.
    layers_by_scheme: defaultdict[EncryptionScheme | None, list[Layer]] = defaultdict(list)
    protections: dict[EncryptionScheme | None, FileProtection | None] = {}
    for layer in layers:
        for protection, members in divide_by_protection(layer, target, keys):
            scheme = None if protection is None else protection.scheme
            if protection is not None:
                # The order of the rows would reveal the order of the values of an encrypted clustering column.
                protection.refuse(layout_ids, PUBLISHES_LAYOUT)
            protections[scheme] = protection
            layers_by_scheme[scheme].append(members)
    first_origin, rows, parts = 0, 0, list[WrittenFiles]()
    with discard_on_error(parts, target.storage):
        for scheme, layers_of_scheme in layers_by_scheme.items():
            works = []
            for members in layers_of_scheme:
                check = require_unchanged_scheme(scheme, target, keys)
                works.append(
                    _LayerWork(source_table, read_plan, members, layout, attributes, policy, first_origin, keys, check)
                )
                first_origin += sum(task.records for task in members)
            # The first layer determines the length of bounds in all layers, because the strings of all partitions are
            # assumed to be similar.
            _, sample_rows = works[0].sample
            properties = derive_layer_properties(target.properties, sample_rows, attributes.columns)
            layer_target = replace(target, properties=properties)
            with TableWriter(layer_target, origins=origins, suffix=suffix, protection=protections[scheme]) as writer:
                for work in works:
                    rows += work.run(writer)
                    del work.sample
                parts.append(writer.close())
    written_files = WrittenFiles.join(parts).discard_unless_complete(rows, target.storage)
    tasks = [task for layers_of_scheme in layers_by_scheme.values() for members in layers_of_scheme for task in members]
    return RewrittenFiles(source_table, target, tasks, written_files.limit_indexes(target.storage), origins)


@dataclass
class _LayerWork:
    """Writes the rows of one layer, whose files have the same encryption.

    Attributes:
        tasks: The old files.
        first_origin: The index of the layer's first row among the rows of the rewrite.
    """

    table: OpenTable
    read_plan: ReadPlan
    tasks: Layer
    layout: ClusteringLayout
    attributes: Attributes
    policy: CompactionPolicy
    first_origin: int
    keys: ParquetKeys | None
    check: SourceCheck | None
    """A function that checks that a file still has the encryption by which the layer was chosen, or None."""

    def run(self, writer: TableWriter) -> int:
        """Write the rows in the order of their clustering keys, and return their number.

        The rows are first divided into ranges of keys in temporary files, so that only one range at a time is sorted
        in memory. The temporary files are encrypted if the table has encryption keys. Each row keeps its number among
        the rows of all files of the job (its origin).
        """
        rows, sample = self.sample
        if not rows:
            return 0
        size_bytes = _sum_sizes(self.tasks)
        clustering = Clustering.from_sample(self.attributes, sample, self.layout.curve)
        ranges = max(-(-size_bytes // RANGE_BYTES), -(-rows // RANGE_ROWS))
        sample_keys = to_sortable_keys(clustering.compute_keys(sample))
        bounds = choose_range_bounds(sample_keys, ranges)
        files = max(1, -(-size_bytes // self.policy.target_bytes))
        # Rows of an older partition spec may belong to several partitions, and each partition gets its own files.
        divider = _FileDivider(
            writer, choose_cell_bounds(sample_keys, files), math.ceil(_FILE_ROWS_MAX_FACTOR * rows / files)
        )
        with TemporaryDirectory(prefix="seamark-clustering-") as folder:
            with _Spill(Path(folder), ranges, sealed=self.keys is not None) as spill:
                for batch, origins in self._read():
                    keys = to_sortable_keys(clustering.compute_keys(batch))
                    spill.add(batch, origins, keys, np.searchsorted(bounds, keys, "right"))
            for batch, origins, keys in spill.read_ranges():
                order = np.argsort(keys, kind="stable")
                divider.write(batch.take(pa.array(order)), origins[order], keys[order])
        writer.close_files()
        return rows

    @cached_property
    def sample(self) -> tuple[int, pa.Table]:
        """The number of rows, and a sample of the rows with the clustering columns."""
        fraction = SAMPLE_ROWS / max(1, sum(task.records for task in self.tasks))
        narrow_plan = plan_read(self.table, self.attributes.columns, TRUE)
        generator, rows, samples = np.random.default_rng(1), 0, []  # A repeated job draws the same rows.
        reader = TaskReader(narrow_plan, self.table.storage, threads=False, keys=self.keys, check=self.check)
        for batch in reader.read_all(self.tasks):
            rows += batch.num_rows
            samples.append(
                batch if fraction >= 1 else batch.filter(pa.array(generator.random(batch.num_rows) < fraction))
            )
        return rows, pa.Table.from_batches(samples, narrow_plan.arrow).combine_chunks()

    def _read(self) -> Iterator[tuple[pa.RecordBatch, Longs]]:
        """Yield the rows of the files that are sorted together, with their origins.

        The origin of a row is its number among the rows of all files of the job.
        """
        reader = TaskReader(self.read_plan, self.table.storage, threads=False, keys=self.keys, check=self.check)
        columns = list(range(len(self.read_plan.names)))
        first_origin = self.first_origin
        for task in self.tasks:
            for batch in reader.read(task):
                yield batch.select(columns), batch.column(len(columns)).to_numpy() + first_origin
            first_origin += task.records
            advance(1, task.size_bytes)


@dataclass
class _FileDivider:
    """Divides rows into files.

    A file ends before the first row whose key is at least the next bound, or after `rows_max` rows. The caller passes
    the rows in the order of their keys, with the origin of each row: its number among the rows of all old files.
    """

    writer: TableWriter
    bounds: Keys
    rows_max: int
    _rows: int = 0
    _file: int = 0

    def write(self, rows: pa.RecordBatch, origins: Longs, keys: Keys) -> None:
        files = np.searchsorted(self.bounds, keys, "right")
        start = 0
        while start < rows.num_rows:
            if self._rows == self.rows_max or (self._rows and files[start] != self._file):
                self.writer.close_files()
                self._rows = 0
            self._file = int(files[start])
            end = int(np.searchsorted(files, self._file, "right"))
            count = min(self.rows_max - self._rows, end - start, _ROWS_PER_BATCH)
            self.writer.write(rows.slice(start, count), origins[start : start + count])
            start, self._rows = start + count, self._rows + count


class _Spill:
    """Temporary files of rows, with one file for each range of keys. The rows of a single range stay in memory.

    Attributes:
        sealed: Whether the files are encrypted with a key in memory, because the rows come from encrypted data files.
    """

    def __init__(self, folder: Path, ranges: int, *, sealed: bool) -> None:
        self._folder, self._is_single = folder, ranges == 1
        self._keys: dict[int, AESGCM] | None = {} if sealed else None
        self._batches_in_memory: list[pa.RecordBatch] = []
        self._streams: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        self._distinct: defaultdict[int, set[bytes]] = defaultdict(set)
        """At most two distinct keys of each range, to recognise a range with a single key."""
        self._sinks: list[pa.NativeFile | _EncryptedFile] = []
        self._exit_stack = ExitStack()

    def __enter__(self) -> _Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def add(self, batch: pa.RecordBatch, origins: Longs, keys: Keys, numbers: npt.NDArray[np.intp]) -> None:
        """Add rows to the files of their ranges. If there is only one range, the rows stay in memory.

        For each range, up to two distinct keys are recorded: a range with one key does not have to be sorted.

        Args:
            batch: The rows.
            origins: The origin of each row: its number among the rows of all old files.
            keys: The clustering key of each row.
            numbers: The index of the range of each row.

        Raises:
            InvalidRequest: The files exceed `SPILL_BYTES` together.
        """
        binary = pa.Array.from_buffers(pa.binary(keys.itemsize), len(keys), [None, pa.py_buffer(keys)])
        rows = batch.append_column(_ORIGIN, pa.array(origins)).append_column(_KEY, binary)
        if self._is_single:
            self._batches_in_memory.append(rows)
            return
        for number in np.unique(numbers).tolist():
            is_selected = numbers == number
            if len(self._distinct[number]) < 2:
                self._distinct[number].update(np.unique(keys[is_selected])[:2].tolist())
            self._open_stream(number, rows.schema).write_batch(rows.filter(pa.array(is_selected)))
        if sum(sink.tell() for sink in self._sinks) > SPILL_BYTES:
            raise InvalidRequest(
                f"sorting takes more than {SPILL_BYTES:,} bytes of temporary files; use the Spark job `cluster`"
            )

    def _open_stream(self, number: int, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        if number not in self._streams:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            path = self._folder / str(number)
            if self._keys is None:
                sink = self._exit_stack.enter_context(pa.OSFile(str(path), "wb"))
                self._sinks.append(sink)
            else:
                self._keys[number] = AESGCM(AESGCM.generate_key(128))
                encrypted_file = _EncryptedFile(path, "wb", self._keys[number])
                self._sinks.append(encrypted_file)
                sink = self._exit_stack.enter_context(io.BufferedWriter(encrypted_file, _SEALED_BYTES))
            self._streams[number] = self._exit_stack.enter_context(pa.ipc.new_stream(sink, schema, options=options))
        return self._streams[number]

    def _open(self, number: int, path: Path) -> Any:
        if self._keys is None:
            return pa.OSFile(str(path))
        return io.BufferedReader(_EncryptedFile(path, "rb", self._keys[number]), _SEALED_BYTES)

    def read_ranges(self) -> Iterator[tuple[pa.RecordBatch, Longs, Keys]]:
        """Yield the rows of each range, in ascending order of ranges, with their origins and keys.

        The file of a range is deleted after its rows were yielded.

        The origin of a row is its number among the rows of all old files. If all rows of a range have the same key,
        they are yielded in several batches.
        """
        if self._batches_in_memory:
            yield _join_batches(self._batches_in_memory)
        for number in sorted(self._streams):
            path = self._folder / str(number)
            with self._open(number, path) as file, pa.ipc.open_stream(file) as batches:
                if len(self._distinct[number]) == 1:
                    for batch in batches:
                        yield _join_batches([batch])
                else:
                    yield _join_batches(list(batches))
            path.unlink()


class _EncryptedFile(io.RawIOBase):
    """A file of encrypted blocks. The length of each block is stored before the block.

    Each file has its own key. The nonce of a block is the number of the block in the file, from 1.
    """

    def __init__(self, path: Path, mode: str, cipher: AESGCM) -> None:
        self._file = path.open(mode)
        self._cipher, self._mode, self._blocks, self._size_bytes, self._unread = cipher, mode, 0, 0, b""

    def readable(self) -> bool:
        return self._mode == "rb"

    def writable(self) -> bool:
        return self._mode == "wb"

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any) -> int:
        data = data[:_SEALED_BYTES]  # The writer calls this function again with the remaining bytes.
        block = self._cipher.encrypt(self._make_nonce(), bytes(data), None)
        self._size_bytes += self._file.write(len(block).to_bytes(_LENGTH_BYTES, "little") + block)
        return len(data)

    def readinto(self, buffer: Any) -> int:
        if not self._unread:
            size = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            self._unread = self._cipher.decrypt(self._make_nonce(), self._file.read(size), None) if size else b""
        data, self._unread = self._unread[: len(buffer)], self._unread[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def _make_nonce(self) -> bytes:
        self._blocks += 1
        return self._blocks.to_bytes(_NONCE_BYTES, "little")

    def close(self) -> None:
        self._file.close()
        super().close()


def _join_batches(batches: Sequence[pa.RecordBatch]) -> tuple[pa.RecordBatch, Longs, Keys]:
    """Return the rows as one batch, with their origins and their clustering keys.

    These are the last two columns of the batches. The origin of a row is its number among the rows of all old files.
    """
    joined_batch = pa.concat_batches(batches)
    columns = list(range(joined_batch.num_columns - 2))
    origins, binary = joined_batch.column(len(columns)).to_numpy(), joined_batch.column(len(columns) + 1)
    width = binary.type.byte_width
    keys = np.frombuffer(binary.buffers()[1], f"S{width}", len(binary), binary.offset * width)
    return joined_batch.select(columns), origins, keys
