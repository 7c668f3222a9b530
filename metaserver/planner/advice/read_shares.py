"""The shares of a table's bytes and files that drawn statements read, by bounds, buckets and indexes together.

A file with a value has the value between its bounds, and in its bucket. So the bounds and an index on the same column
leave out the same files, and their shares must not be multiplied. For each conjunct, this module therefore computes
which part of the files that the bounds and buckets keep is also kept by the indexes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seamark.metaserver.planner.advice.replay import (
    DrawnCondition,
    DrawnStatement,
    Shares,
    SimulatedLayout,
    find_files_that_may_match,
)
from seamark.metaserver.planner.advice.row_samples import RowSample


@dataclass(frozen=True)
class ReplayedFiles:
    """The files of a present or proposed layout.

    Attributes:
        layout: The bounds of the files.
        files: The number of files before the change. The sampled files represent them.
        new_files: The number of files in the layout. It equals `files` if the change rewrites no files.
        buckets: The number of buckets by column id.
        indexes: The ids of the indexed columns, by the false-positive rate of their indexes. The rate is the share of
            the files without a matching value that an index keeps.
    """

    layout: SimulatedLayout
    files: int
    new_files: int
    buckets: Mapping[int, int]
    indexes: Mapping[float, frozenset[int]]


def compute_read_shares(
    replayed: ReplayedFiles, statements: Sequence[DrawnStatement], sample: RowSample, *, splits_buckets: bool = False
) -> tuple[Shares, Shares]:
    """Return the shares of the bytes and of the files that each statement reads, float64[statements] each.

    Args:
        replayed: The sampled files with their bounds, and the indexes and buckets of the table.
        statements: The statements.
        sample: The sampled rows.
        splits_buckets: Whether the change divides the files into buckets of a column. A statement then reads the new
            files of its buckets, although the sampled files are not divided.
    """
    layout = replayed.layout
    size_shares, file_shares = np.ones(len(statements)), np.ones(len(statements))
    for number, statement in enumerate(statements):
        is_read = np.ones(layout.files, dtype=np.bool_)
        kept_shares = []
        """The share of the files that the bounds and the bucket of each conjunct keep."""
        bucket_shares = [_compute_bucket_share(alternatives, replayed.buckets) for alternatives in statement.conditions]
        bucket_share = float(np.prod(bucket_shares))
        for alternatives, share in zip(statement.conditions, bucket_shares, strict=True):
            has_match = np.zeros(layout.files, dtype=np.bool_)
            for condition in alternatives:
                has_match |= find_files_that_may_match(layout, condition)
            is_read &= has_match
            # If the table has buckets already, they divide the sampled files. A conjunct on a bucketed column then
            # keeps only the files of the buckets of its values. New buckets do not divide the sampled files yet.
            kept_shares.append(float(has_match.mean() if layout.files else 0.0) * (1.0 if splits_buckets else share))
        new_files = replayed.new_files
        # New buckets divide the files, so the statement reads only the files of a single bucket. If several columns
        # have buckets, the largest number of buckets counts.
        if splits_buckets and bucket_share < 1:
            new_files = max(1, new_files // max(replayed.buckets.values()))
        # Of the indexes for several conjuncts, only the index that leaves out most files counts.
        factor = bucket_share * min(
            (
                _compute_index_factor(alternatives, kept_share, sample, replayed, new_files)
                for alternatives, kept_share in zip(statement.conditions, kept_shares, strict=True)
            ),
            default=1.0,
        )
        size_shares[number] = float(layout.weights[is_read].sum()) * factor
        file_shares[number] = (float(is_read.mean()) if layout.files else 0.0) * factor
    return size_shares, file_shares


def _compute_bucket_share(alternatives: Sequence[DrawnCondition], buckets: Mapping[int, int]) -> float:
    """Return the share of the buckets that a conjunct reads.

    Only a comparison of a bucketed column with values leaves out buckets. The hash puts each value into a random
    bucket, so the share is the probability that at least one of the values is in a given bucket.
    """
    condition = alternatives[0]
    if len(alternatives) != 1 or not condition.named_values or condition.column_id not in buckets:
        return 1.0
    return float(1 - (1 - 1 / buckets[condition.column_id]) ** condition.named_values)


def _compute_index_factor(
    alternatives: Sequence[DrawnCondition],
    kept_share: float,
    sample: RowSample,
    replayed: ReplayedFiles,
    new_files: int,
) -> float:
    """Return the share of the files kept by the bounds that the best index for a conjunct keeps, or 1 without an index.

    A conjunct is a disjunction of alternatives. An index keeps the files with a matching value, and by false positives
    some of the other files.

    Args:
        alternatives: The alternatives. An index serves them only if it covers the columns of all of them.
        kept_share: The share of all files that the bounds keep.
        sample: The sampled rows.
        replayed: The files and the indexes.
        new_files: The number of files after the change.
    """
    factor = 1.0
    for false_share, column_ids in replayed.indexes.items():
        is_served = all(condition.column_id in column_ids and condition.named_values for condition in alternatives)
        if kept_share and is_served:
            hit_share = compute_hit_share(alternatives, sample, replayed.files, new_files)
            hit_fraction = min(1.0, hit_share / kept_share)
            factor = min(factor, hit_fraction + false_share * (1 - hit_fraction))
    return factor


def compute_hit_share(alternatives: Sequence[DrawnCondition], sample: RowSample, files: int, new_files: int) -> float:
    """Return the share of the files that have a value which matches one of the conditions.

    The files of the sample represent all files. A drawn value certainly occurs in the file from which it was drawn, so
    the estimate for the other files excludes this file. A rewrite into `new_files` files puts the rows of
    `files / new_files` files into each new file. The estimate assumes that these files contain a value independently.

    Args:
        alternatives: The conditions, on sampled columns.
        sample: The sampled rows.
        files: The number of files of the table.
        new_files: The number of files after a rewrite. It equals `files` if no rewrite takes place.
    """
    merged_files = files / max(1, new_files)
    miss_probability = 1.0
    for condition in alternatives:
        counts = sample.columns[condition.column_id].file_counts[condition.matching]
        other_shares = np.maximum(counts - 1, 0) / max(1, sample.files - 1)
        new_shares = 1 - (1 - np.minimum(1.0, other_shares)) ** merged_files
        hit_shares = (1 + new_shares * (new_files - 1)) / max(1, new_files)
        miss_probability *= float(np.prod(1 - np.minimum(1.0, hit_shares)))
    return 1 - miss_probability
