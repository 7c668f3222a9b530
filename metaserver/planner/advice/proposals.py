"""Proposals of the advisor: layouts and indexes of a table, ranked by the gain of the recorded statements.

Each proposal is a hypothesis. A replay of the history (`replay.py`) predicts its gain: it compares the files that the
statements read now with the files that they would read after the change. The cost of a proposal is the number of bytes
that the change writes or rewrites. A proposal pays if it saves more bytes in `HORIZON_DAYS` than it costs. Proposals
that pay come first.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, permutations
from itertools import count as count_from

import msgspec
import numpy as np

from seamark.formats.iceberg.metadata.clustering import COLUMNS as CLUSTERING_COLUMNS
from seamark.formats.iceberg.metadata.clustering import CURVE, HILBERT, LINEAR, ClusteringLayout
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT, parse_count
from seamark.formats.index.definitions import define_index, read_definitions
from seamark.formats.index.kinds.bloom import FALSE_POSITIVE_PROBABILITY
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.planner.advice.cube_candidates import CubeCandidate, find_answered_shapes, find_cube_candidates
from seamark.metaserver.planner.advice.current_layout import make_current_layout
from seamark.metaserver.planner.advice.engine_times import SCAN_BYTES_PER_S, EngineTimes
from seamark.metaserver.planner.advice.read_shares import ReplayedFiles, compute_read_shares
from seamark.metaserver.planner.advice.replay import (
    ROWS_PER_FILE_MIN,
    DrawnStatement,
    RecordedShape,
    Shares,
    SimulatedLayout,
    compute_curve_order,
    compute_weighted_mean,
    simulate_clustering,
    simulate_layout,
)
from seamark.metaserver.planner.advice.row_samples import RowSample, compute_partition_codes
from seamark.metaserver.planner.advice.spark_statements import format_partition_commands, quote_path
from seamark.metaserver.planner.lookup.lookup import FoundFiles

HORIZON_DAYS = 30
COLUMNS_MAX, CLUSTERED_MAX = 5, 3
"""The maximum number of compared columns for which layouts are simulated, and of columns in one layout."""
_SORTED_MAX = 3
"""The maximum number of compared columns for which sort orders are simulated."""
REWRITE_BYTES_PER_S = 50_000_000
PROPOSALS_MAX, _PROPOSALS_PER_KIND_MAX = 20, 3
GAIN_MIN_FRACTION = 0.02
"""The minimum share of the bytes that a listed proposal saves."""
_INDEX_BYTES_PER_ROW = {"bloom": 1.5, "bitmap": 1.0}
_BITMAP_VALUES_MAX = 1000
"""The maximum number of sampled distinct values for a bitmap index. With more, a bloom index is proposed."""
_PROPOSED_BUCKET_COUNTS = (16, 64, 256)
_SMALLER_FILES_FACTOR, _SMALLER_FILES_COLUMNS_MAX, _SMALLER_FILES_BYTES_MIN = 4, 2, 1 << 20
"""The factor that divides the target size in a proposal of smaller files, the columns, and the lowest target size."""
_ID_DIGITS = 12  # Hexadecimal digits of the digest that identifies a proposal.
_VALUES_PER_BUCKET_MIN = 10
"""The minimum number of sampled distinct values for each bucket. With fewer, the buckets would have unequal sizes."""
_PARTITIONS_PER_FILE_MAX = 4
"""The maximum number of partitions for each present file. With more, the files would be smaller than they are now."""
_MERGED_FILES_MIN, _FILES_PER_TARGET_FILE_MIN = 8, 4
"""The minimum number of files for which a merge is proposed, in total and for each file of the target size."""
_USEFUL_WITHOUT_FEWER_BYTES = ("drop-index", "file-size", "pin")
_PINNED_READS_PER_DAY_MIN = 10
"""The minimum number of times a day that statements read the bytes of a table for which pinning is proposed."""
_CACHE_PINNED = "seamark.cache.pinned"
CUBE = "cube"
FALSE_SHARES = {"bloom": FALSE_POSITIVE_PROBABILITY, "bitmap": 0.0, "record": 0.0}


class Reads(msgspec.Struct, frozen=True, rename="kebab"):
    """The files, bytes and seconds that an average statement reads."""

    files: float
    bytes: int
    seconds: float


class ProposedChange(msgspec.Struct, frozen=True, rename="kebab"):
    """A change that a client makes to apply a proposal.

    Attributes:
        kind: `cluster`, `add-index`, `add-cube`, `drop-index`, `compact`, or `none` if the user makes the change.
        columns: The columns of the clustering, the index, the cube or, with the kind `none`, the sort order.
        curve: The curve of the clustering.
        target_file_bytes: The new target size of files, or None to keep the present target.
        index_kind: The kind of the new index.
        index_name: The name of the index.
        measures: The measures of the new cube.
    """

    kind: str = "none"
    columns: list[str] = []
    curve: str = ""
    target_file_bytes: int | None = None
    index_kind: str = ""
    index_name: str = ""
    measures: list[str] = []


class Proposal(msgspec.Struct, frozen=True, rename="kebab"):
    """A change of a table, with its predicted gain.

    Attributes:
        id: A digest of the change. It stays the same as long as the change is proposed.
        kind: `cluster`, `index`, `drop-index`, `cube`, `partition`, `bucket`, `sort-order`, `file-size` or `pin`.
        title: The change in words.
        commands: The commands or statements that make the change.
        change: The change that a client makes to apply the proposal.
        before: The files, bytes and seconds that an average statement reads now, as a simulation predicts.
        predicted: The files, bytes and seconds that this statement would read after the change.
        cost_bytes: The bytes that the change reads and writes once.
        cost_seconds: The time that the change takes.
        saved_bytes_per_day: The bytes that all recorded statements of a day are predicted to save.
        pays_after_days: The number of days after which the saved bytes exceed the cost. None if they never exceed it.
        correction: The factor by which the predicted bytes were multiplied. It comes from measurements of earlier
            proposals.
        time_correction: The factor by which the predicted seconds were multiplied. It comes from times that
            engines reported after earlier proposals.
    """

    id: str
    kind: str
    title: str
    commands: list[str]
    change: ProposedChange
    before: Reads
    predicted: Reads
    cost_bytes: int
    cost_seconds: float
    saved_bytes_per_day: int
    pays_after_days: float | None
    correction: float = 1.0
    time_correction: float = 1.0

    @property
    def pays(self) -> bool:
        return self.pays_after_days is not None and self.pays_after_days <= HORIZON_DAYS


@dataclass(frozen=True)
class AdvisedTable:
    """The state of a table from which the advisor makes proposals.

    Attributes:
        name: The dotted name of the table, as commands take it.
        metadata: The metadata of the table.
        files: The data files of the snapshot.
        total_bytes: The total size of the data files.
        rows: The total number of rows of the data files.
        sample: The sampled rows.
        statements: The statements that are drawn from the history and replayed.
        statements_per_day: The average number of recorded statements in a day.
        unused_indexes: The names of indexes that plans have probed, but that left out no file.
        corrections: The factor by which the predicted bytes of each kind of proposal are multiplied, because earlier
            proposals of this kind were measured.
        time_corrections: The factor by which the predicted seconds of each kind of proposal are multiplied, because
            engines have reported times after earlier proposals of this kind.
        times: The times that engines have reported.
        shapes: The shapes of the drawn statements, by their fingerprints.
        pinnable_bytes: The bytes of the table that the gateway can pin in its cache, or 0 without such a cache.
    """

    name: str
    metadata: TableMetadata
    files: FoundFiles
    total_bytes: int
    rows: int
    sample: RowSample
    statements: Sequence[DrawnStatement]
    statements_per_day: float
    unused_indexes: list[str]
    corrections: Mapping[str, float] = field(default_factory=dict)
    time_corrections: Mapping[str, float] = field(default_factory=dict)
    times: EngineTimes = field(default_factory=EngineTimes)
    shapes: Mapping[str, RecordedShape] = field(default_factory=dict)
    pinnable_bytes: int = 0

    @property
    def target_bytes(self) -> int:
        return max(1, parse_count(self.metadata.properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))


def make_proposals(state: AdvisedTable) -> tuple[Reads, list[Proposal]]:
    """Return the present reads of an average statement, and the ranked proposals, with the best proposal first."""
    advisor = _Advisor(state)
    return advisor.before, advisor.rank_proposals()


def measure_reads(state: AdvisedTable) -> Reads:
    """Return the files, bytes and seconds that an average statement reads at present.

    They are predicted by simulating the recorded statements with the bounds and indexes of the table.
    """
    return _Advisor(state).before


class _Advisor:
    """Computes the proposals for one table.

    Attributes:
        before: The present reads of an average statement.
    """

    def __init__(self, state: AdvisedTable) -> None:
        self._state = state
        # Other kinds have no known rate of false positives. Indexes on dimension tables help only conditions on them.
        self._indexes = [
            index
            for index in read_definitions(state.metadata).enabled
            if index.kind in FALSE_SHARES and not index.dimension_tables
        ]
        cubes = [index for index in read_definitions(state.metadata).enabled if index.kind == CUBE]
        self._answered_shapes = find_answered_shapes(state.shapes, cubes)  # These statements read no data files.
        self._layout = make_current_layout(state.files, state.sample)
        self._current_shares = self._compute_shares(self._layout)
        self.before = self._average_reads(*self._current_shares, state.files.file_count)

    def rank_proposals(self) -> list[Proposal]:
        """Return the useful proposals by the net time that they save. If none saves more than it costs, return none."""
        proposals = [
            *self._propose_clusterings(),
            *self._propose_indexes(),
            *self._propose_index_drops(),
            *self._propose_partitions(),
        ]
        proposals += self._propose_buckets()
        proposals += self._propose_sort_orders()
        proposals += self._propose_cubes()
        proposals += self._propose_file_size()
        proposals += self._propose_pin()
        useful = [
            proposal
            for proposal in proposals
            if proposal.kind in _USEFUL_WITHOUT_FEWER_BYTES or self._is_useful(proposal)
        ]
        # A pin keeps the files of the table in a cache. Statements still read as many bytes, so it comes later.
        useful.sort(
            key=lambda proposal: (
                not proposal.pays,
                proposal.kind == "pin",
                -self._compute_net_seconds(proposal),
                proposal.id,
            )
        )
        # Proposals that save less than they cost come last.
        return _keep_best_of_each_kind(useful)[:PROPOSALS_MAX] if useful and useful[0].pays else []

    def _is_useful(self, proposal: Proposal) -> bool:
        """Return whether the proposal saves at least the minimum share of the bytes."""
        return proposal.predicted.bytes < (1 - GAIN_MIN_FRACTION) * self.before.bytes

    def _sum_weights(self, column_id: int, accepts: Callable[[int], bool]) -> float:
        """Return the total weight of the statements with a condition on the column.

        `accepts` decides by the number of values in the condition.
        """
        return sum(
            statement.weight
            for statement in self._state.statements
            if any(
                condition.column_id == column_id and accepts(condition.named_values)
                for alternatives in statement.conditions
                for condition in alternatives
            )
        )

    def _rank_compared_columns(self) -> list[int]:
        """Return the ids of the most frequently compared columns, at most `COLUMNS_MAX`."""
        weights = {column_id: self._sum_weights(column_id, lambda _: True) for column_id in self._state.sample.columns}
        compared_ids = [column_id for column_id, weight in weights.items() if weight > 0]
        return sorted(compared_ids, key=lambda column_id: (-weights[column_id], column_id))[:COLUMNS_MAX]

    # Candidates

    def _propose_clusterings(self) -> Iterator[Proposal]:
        """Propose clusterings by combinations of the most compared columns, and one with smaller files."""
        # In the property that lists clustering columns, commas separate names, and a dot refers to a joined table.
        columns = [
            column_id
            for column_id in self._rank_compared_columns()
            if not set(self._get_column_name(column_id)) & set(",.")
        ]
        try:
            current_layout = ClusteringLayout.from_properties(self._state.metadata.properties)
        except BadRequest:
            current_layout = None
        for count in range(1, CLUSTERED_MAX + 1):
            for combination in combinations(columns, count):
                names = [self._get_column_name(column_id) for column_id in combination]
                if current_layout is not None and sorted(current_layout.columns) == sorted(names):
                    continue
                yield self._propose_clustering(combination, names, None)
        if columns:
            smaller_bytes = self._state.target_bytes // _SMALLER_FILES_FACTOR
            clustered_columns = tuple(columns[:_SMALLER_FILES_COLUMNS_MAX])
            names = [self._get_column_name(column_id) for column_id in clustered_columns]
            if smaller_bytes >= _SMALLER_FILES_BYTES_MIN:
                yield self._propose_clustering(clustered_columns, names, smaller_bytes)

    def _propose_clustering(self, columns: tuple[int, ...], names: list[str], smaller_bytes: int | None) -> Proposal:
        """Propose a clustering by these columns. `smaller_bytes` replaces the present target size of files."""
        curve = HILBERT if len(columns) > 1 else LINEAR
        table, sample = self._state.name, self._state.sample
        files = math.ceil(self._state.total_bytes / (smaller_bytes or self._state.target_bytes))
        layout = simulate_clustering(sample, columns, curve, files)
        if layout.files > 1:  # A file ends between two cells of the curve, often before it has the target size.
            requested_files = min(files, sample.rows // ROWS_PER_FILE_MIN)  # As many as the sample has rows for.
            files = max(files, round(files * layout.files / requested_files))
        size = "" if smaller_bytes is None else f" in files of {smaller_bytes >> 20} MiB"
        settings = [f"{CLUSTERING_COLUMNS}={','.join(names)}", f"{CURVE}={curve}"]
        if smaller_bytes is not None:
            settings.append(f"{TARGET_FILE_BYTES}={smaller_bytes}")
        return self._propose_rewrite(
            "cluster",
            f"Cluster by {', '.join(names)}{size}",
            [
                shlex.join(["seamark", "policy", "set", table, *settings]),
                shlex.join(["seamark", "run", "cluster", table]),
            ],
            ProposedChange("cluster", names, curve, smaller_bytes),
            layout,
            files,
        )

    def _propose_rewrite(
        self, kind: str, title: str, commands: list[str], change: ProposedChange, layout: SimulatedLayout, files: int
    ) -> Proposal:
        """Make a proposal that rewrites the whole table in a simulated layout."""
        prediction = self._average_reads(*self._compute_shares(layout, new_files=files), max(files, 1))
        return self._make_proposal(kind, title, commands, change, prediction, self._rewrite_bytes)

    @property
    def _rewrite_bytes(self) -> int:
        """The cost of a rewrite of the table, in bytes. It reads all bytes and writes them again."""
        return 2 * self._state.total_bytes

    def _propose_indexes(self) -> Iterator[Proposal]:
        """Propose a bitmap or bloom index on each column without an index that statements compare with values."""
        indexed_ids = {term.column_id for index in self._indexes for term in index.terms}
        for column_id in self._rank_compared_columns():
            column = self._state.sample.columns[column_id]
            if column_id in indexed_ids or not self._sum_weights(column_id, lambda values: values > 0):
                continue
            kind = "bitmap" if len(column.values) <= _BITMAP_VALUES_MAX else "bloom"
            name = self._get_column_name(column_id)
            index_name = self._choose_index_name(name)
            try:
                define_index(index_name, kind, [name], self._state.metadata.current_schema)
            except BadRequest:  # The name of the index may not have such characters, or the column needs quotes.
                continue
            shares = self._compute_shares(self._layout, added_index=(kind, column_id))
            prediction = self._average_reads(*shares, self._state.files.file_count)
            written_bytes = int(self._state.rows * _INDEX_BYTES_PER_ROW[kind])
            read_bytes = int(self._state.total_bytes / max(1, len(self._state.metadata.current_schema.fields)))
            table, options = self._state.name, ["--columns", name, "--name", index_name]
            yield self._make_proposal(
                "index",
                f"Add a {kind} index on {name}",
                [
                    shlex.join(["seamark", "index", "create", table, "--kind", kind, *options]),
                    shlex.join(["seamark", "run", "index", table]),
                ],
                ProposedChange("add-index", [name], index_kind=kind, index_name=index_name),
                prediction,
                written_bytes + read_bytes,
            )

    def _choose_index_name(self, column: str) -> str:
        """Return a name that no index of the table has, so that the proposal replaces no index."""
        definitions = read_definitions(self._state.metadata)
        base = f"by_{column.replace('.', '_')}"
        names = chain([base], (f"{base}_{number}" for number in count_from(2)))
        return next(name for name in names if name not in definitions.by_name and name not in definitions.problems)

    def _propose_index_drops(self) -> Iterator[Proposal]:
        """Propose to drop the indexes that plans have probed, but that left out no file."""
        for name in sorted(self._state.unused_indexes):
            yield self._make_proposal(
                "drop-index",
                f"Drop the index {name}: plans probed it and it left out no file",
                [shlex.join(["seamark", "index", "drop", self._state.name, name])],
                ProposedChange("drop-index", index_name=name),
                self.before,
                0,
            )

    def _propose_partitions(self) -> Iterator[Proposal]:
        """Propose to partition an unpartitioned table by day or value of a column, unless partitions are too small."""
        sample, rows = self._state.sample, self._state.sample.rows
        if any(spec.fields for spec in self._state.metadata.partition_specs):
            return
        for column_id in self._rank_compared_columns():
            column = sample.columns[column_id]
            transform_and_codes = compute_partition_codes(column)
            if transform_and_codes is None:
                continue
            transform, partition_codes = transform_and_codes
            # The code 0 of a column is null. Rows with null are in a separate partition, -1.
            partition_of_rows = np.concatenate([[-1], partition_codes])[column.codes]
            order = np.argsort(partition_of_rows, kind="stable")
            target_files = math.ceil(self._state.total_bytes / self._state.target_bytes)
            partition_count = len(np.unique(partition_of_rows))
            partitions_max = _PARTITIONS_PER_FILE_MAX * max(target_files, self._state.files.file_count)
            if partition_count > min(rows // ROWS_PER_FILE_MIN, partitions_max):
                continue  # The partitions would be smaller than files are now.
            layout = simulate_layout(sample, order, target_files, partition_of_rows[order])
            name = self._get_column_name(column_id)
            field = name if transform == "identity" else f"{transform}({name})"
            yield self._propose_rewrite(
                "partition",
                f"Partition by {field}",
                format_partition_commands(
                    self._state.name, "{}" if transform == "identity" else f"{transform}({{}})", name
                ),
                ProposedChange(),
                layout,
                max(target_files, partition_count),
            )

    def _propose_buckets(self) -> Iterator[Proposal]:
        """Propose buckets of each column that statements compare with values, for an unpartitioned table."""
        if any(spec.fields for spec in self._state.metadata.partition_specs):
            return
        target_files = math.ceil(self._state.total_bytes / self._state.target_bytes)
        buckets = max(
            (count for count in _PROPOSED_BUCKET_COUNTS if count <= max(_PROPOSED_BUCKET_COUNTS[0], target_files)),
            default=_PROPOSED_BUCKET_COUNTS[0],
        )
        for column_id in self._rank_compared_columns():
            column = self._state.sample.columns[column_id]
            weight = self._sum_weights(column_id, lambda values: values > 0)
            is_float = column.values.dtype == np.float64  # Iceberg has no buckets of floating-point numbers.
            if not weight or is_float or len(column.values) < _VALUES_PER_BUCKET_MIN * buckets:
                continue
            files = max(target_files, buckets)
            name = self._get_column_name(column_id)
            shares = self._compute_shares(self._layout, new_files=files, new_buckets={column_id: buckets})
            prediction = self._average_reads(*shares, files)
            yield self._make_proposal(
                "bucket",
                f"Partition into {buckets} buckets of {name}",
                format_partition_commands(self._state.name, f"bucket({buckets}, {{}})", name),
                ProposedChange(),
                prediction,
                self._rewrite_bytes,
            )

    def _propose_sort_orders(self) -> Iterator[Proposal]:
        """Propose sort orders by two columns, if the table has none. A sort by one column equals a clustering."""
        if self._state.metadata.default_sort_order_id:
            return
        columns = self._rank_compared_columns()[:_SORTED_MAX]
        files = math.ceil(self._state.total_bytes / self._state.target_bytes)
        for pair in permutations(columns, 2):
            names = [self._get_column_name(column_id) for column_id in pair]
            order = compute_curve_order(self._state.sample, pair, LINEAR)
            fields = ", ".join(quote_path(name) for name in names)
            table = quote_path(self._state.name)
            literal = self._state.name.replace("'", "''")
            yield self._propose_rewrite(
                "sort-order",
                f"Sort by {', '.join(names)}",
                [
                    f"ALTER TABLE {table} WRITE ORDERED BY {fields}",
                    f"CALL system.rewrite_data_files(table => '{literal}', strategy => 'sort', "
                    "options => map('rewrite-all', 'true'))",
                ],
                ProposedChange(columns=names),
                simulate_layout(self._state.sample, order, files),
                files,
            )

    def _propose_cubes(self) -> Iterator[Proposal]:
        """Propose the cubes that would answer recorded shapes which no existing cube answers."""
        files = max(1, self._state.files.file_count)
        rows_per_file = max(1, self._state.rows // files)
        schema = self._state.metadata.current_schema
        unanswered = {key: shape for key, shape in self._state.shapes.items() if key not in self._answered_shapes}
        for candidate in find_cube_candidates(unanswered, self._state.sample, rows_per_file):
            if not all(column_id in schema.index.by_id for column_id in candidate.column_ids):
                continue
            dimensions = [self._get_column_name(column_id) for column_id in candidate.dimensions]
            measures = [
                f"{measure.function}({self._get_column_name(measure.column_id) if measure.column_id else '*'})"
                for measure in candidate.measures
            ]
            index_name = self._choose_index_name("_and_".join(dimensions))
            try:
                define_index(index_name, CUBE, dimensions, schema, measures=measures)
            except BadRequest:  # A cube cannot have such a column, or the name of a column needs quotes.
                continue
            yield self._propose_cube(candidate, dimensions, measures, index_name, files)

    def _propose_cube(
        self, candidate: CubeCandidate, dimensions: list[str], measures: list[str], index_name: str, files: int
    ) -> Proposal:
        """Propose a cube. The statements that it answers read its groups and no data file."""
        is_answered = np.array(
            [statement.fingerprint in candidate.fingerprints for statement in self._state.statements]
        )
        cube_bytes = candidate.entry_bytes * files
        size_shares, file_shares = self._current_shares
        size_shares = np.where(is_answered, cube_bytes / self._state.total_bytes, size_shares)
        file_shares = np.where(is_answered, 0.0, file_shares)
        table = self._state.name
        columns = max(1, len(self._state.metadata.current_schema.fields))
        read_bytes = int(self._state.total_bytes * min(1.0, len(candidate.column_ids) / columns))
        options = ["--columns", ",".join(dimensions), "--measures", ",".join(measures), "--name", index_name]
        return self._make_proposal(
            "cube",
            f"Add a cube by {', '.join(dimensions)} with {', '.join(measures)}",
            [
                shlex.join(["seamark", "index", "create", table, "--kind", CUBE, *options]),
                shlex.join(["seamark", "run", "index", table]),
            ],
            ProposedChange("add-cube", dimensions, index_kind=CUBE, index_name=index_name, measures=measures),
            self._average_reads(size_shares, file_shares, files),
            read_bytes + int(cube_bytes),
        )

    def _propose_pin(self) -> Iterator[Proposal]:
        """Propose to pin the table in the gateway's cache, if there is room and statements read the table often."""
        total = self._state.total_bytes
        if _CACHE_PINNED in self._state.metadata.properties or not 0 < total <= self._state.pinnable_bytes:
            return
        reads_per_day = self.before.bytes * self._state.statements_per_day / total
        if reads_per_day >= _PINNED_READS_PER_DAY_MIN:
            yield self._make_proposal(
                "pin",
                f"Pin the table in the gateway's cache: statements read its bytes {reads_per_day:,.0f} times a day",
                [f"ALTER TABLE {quote_path(self._state.name)} SET TBLPROPERTIES ('{_CACHE_PINNED}'='true')"],
                ProposedChange(),
                self.before,
                0,
            )

    def _propose_file_size(self) -> Iterator[Proposal]:
        """Propose to merge small files, if statements would be faster after the merge."""
        files = self._state.files.file_count
        target_files = math.ceil(self._state.total_bytes / self._state.target_bytes)
        if files < max(_MERGED_FILES_MIN, _FILES_PER_TARGET_FILE_MIN * target_files):
            return
        # A merged file covers the ranges of all files that it replaces, so statements read more of its bytes.
        order = np.arange(self._state.sample.rows)
        layout = simulate_layout(self._state.sample, order, target_files)
        prediction = self._average_reads(*self._compute_shares(layout, new_files=target_files), target_files)
        bytes_max = self.before.bytes * (1 + GAIN_MIN_FRACTION)  # The sizes are estimates from a sample.
        if prediction.seconds < self.before.seconds and prediction.bytes <= bytes_max:
            yield self._make_proposal(
                "file-size",
                f"Merge {files:,} files into {target_files:,} (target {max(1, self._state.target_bytes >> 20)} MiB)",
                [shlex.join(["seamark", "run", "compact", self._state.name])],
                ProposedChange("compact"),
                prediction,
                self._rewrite_bytes,
            )

    # Shares

    def _compute_shares(
        self,
        layout: SimulatedLayout,
        *,
        added_index: tuple[str, int] | None = None,
        new_files: int | None = None,
        new_buckets: Mapping[int, int] | None = None,
    ) -> tuple[Shares, Shares]:
        """Return the shares of the bytes and of the files that each statement reads, float64[statements] each.

        Args:
            layout: The bounds of the files.
            added_index: The kind and the column of an index, in addition to those of the table.
            new_files: The number of files after a rewrite of the table, or None if it is not rewritten.
            new_buckets: The buckets by column id into which the table is divided, or None for those of its spec.
        """
        kinds_and_columns = [(index.kind, index.terms[0].column_id) for index in self._indexes if len(index.terms) == 1]
        if added_index is not None:
            kinds_and_columns.append(added_index)
        indexed_ids: defaultdict[float, set[int]] = defaultdict(set)
        for kind, column_id in kinds_and_columns:
            if column_id in self._state.sample.columns:
                indexed_ids[FALSE_SHARES[kind]].add(column_id)
        files = self._state.files.file_count
        replayed = ReplayedFiles(
            layout,
            files,
            max(1, files if new_files is None else new_files),
            self._read_buckets() if new_buckets is None else new_buckets,
            {false_share: frozenset(column_ids) for false_share, column_ids in indexed_ids.items()},
        )
        statements = self._state.statements
        sizes, file_shares = compute_read_shares(
            replayed, statements, self._state.sample, splits_buckets=new_buckets is not None
        )
        is_answered = [statement.fingerprint in self._answered_shapes for statement in statements]
        sizes[is_answered] = file_shares[is_answered] = 0.0  # A cube answers them without reading data files.
        return sizes, file_shares

    def _read_buckets(self) -> dict[int, int]:
        """Return the number of buckets of the current partition spec by column id."""
        return {
            partition_field.source_id: int(partition_field.transform.removeprefix("bucket[").removesuffix("]"))
            for partition_field in self._state.metadata.default_spec.fields
            if partition_field.transform.startswith("bucket[") and partition_field.source_id is not None
        }

    # Proposals

    def _average_reads(self, size_shares: Shares, file_shares: Shares, files: int) -> Reads:
        """Return the reads of an average statement.

        The shares, float64[statements], are the parts of the table's bytes and files that each statement reads.
        """
        statements, duration_estimator = self._state.statements, self._state.times
        sizes, counts = size_shares * self._state.total_bytes, file_shares * files
        estimates = [
            duration_estimator.estimate(statement.fingerprint, count, size)
            for statement, count, size in zip(statements, counts.tolist(), sizes.tolist(), strict=True)
        ]
        count, size = compute_weighted_mean(counts, statements), compute_weighted_mean(sizes, statements)
        return Reads(round(count, 2), int(size), round(compute_weighted_mean(np.array(estimates), statements), 4))

    def _make_proposal(
        self,
        kind: str,
        title: str,
        commands: list[str],
        change: ProposedChange,
        prediction: Reads,
        cost_bytes: int,
    ) -> Proposal:
        """Make a proposal. Correct its prediction, and compute its cost and the bytes that it saves."""
        raw_prediction, prediction = prediction, self._correct_prediction(kind, prediction)
        saved_bytes = (self.before.bytes - prediction.bytes) * self._state.statements_per_day
        if kind == "file-size":
            # A merge of small files saves time. Count the saved time as the bytes that a scan reads in this time.
            saved_bytes = (self.before.seconds - prediction.seconds) * SCAN_BYTES_PER_S * self._state.statements_per_day
        pays_after = cost_bytes / saved_bytes if saved_bytes > 0 else 0.0 if cost_bytes == 0 else None
        return Proposal(
            id=hashlib.sha256(msgspec.json.encode([kind, commands])).hexdigest()[:_ID_DIGITS],
            kind=kind,
            title=title,
            commands=commands,
            change=change,
            before=self.before,
            predicted=prediction,
            cost_bytes=cost_bytes,
            cost_seconds=round(cost_bytes / REWRITE_BYTES_PER_S, 1),
            saved_bytes_per_day=int(saved_bytes),
            pays_after_days=None if pays_after is None else round(pays_after, 2),
            correction=round(prediction.bytes / max(1, raw_prediction.bytes), 4) or 1.0,
            time_correction=self._state.time_corrections.get(kind, 1.0),
        )

    def _correct_prediction(self, kind: str, prediction: Reads) -> Reads:
        """Correct a prediction by the measurements of earlier proposals of the same kind.

        A correction never turns a gain into a loss, or a loss into a gain.
        """
        reads_before, files, size, seconds = self.before, prediction.files, float(prediction.bytes), prediction.seconds
        factor = self._state.corrections.get(kind, 1.0)
        if factor != 1.0 and 0 < prediction.bytes <= reads_before.bytes:
            size = min(reads_before.bytes, prediction.bytes * factor)
            files *= size / prediction.bytes
            if reads_before.bytes > prediction.bytes:  # The saved seconds follow the saved bytes.
                saved_s = reads_before.seconds - prediction.seconds
                saved_s *= (reads_before.bytes - size) / (reads_before.bytes - prediction.bytes)
                seconds = max(0.0, reads_before.seconds - saved_s)
        time_factor = self._state.time_corrections.get(kind, 1.0)
        if time_factor != 1.0 and seconds <= reads_before.seconds:
            seconds = min(reads_before.seconds, seconds * time_factor)
        return Reads(round(files, 2), int(size), round(seconds, 4))

    def _compute_net_seconds(self, proposal: Proposal) -> float:
        """Return the seconds that a proposal saves in `HORIZON_DAYS` days, minus the time to read its cost in bytes."""
        saved_s = (proposal.before.seconds - proposal.predicted.seconds) * self._state.statements_per_day
        return saved_s * HORIZON_DAYS - proposal.cost_bytes / SCAN_BYTES_PER_S

    def _get_column_name(self, column_id: int) -> str:
        return self._state.metadata.current_schema.index.by_id[column_id].name


def _keep_best_of_each_kind(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Return the first proposals of each kind, which are the best, so that not all are variants of one layout."""
    counts: defaultdict[str, int] = defaultdict(int)
    best_proposals = []
    for proposal in proposals:
        counts[proposal.kind] += 1
        if counts[proposal.kind] <= _PROPOSALS_PER_KIND_MAX:
            best_proposals.append(proposal)
    return best_proposals
