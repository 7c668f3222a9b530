"""An additional file in plans, so that Spark does not choose a metadata delete that Iceberg's library then refuses.

Spark deletes whole files by metadata if all rows of each planned file match (Java: `SparkTable.canDeleteWhere`). This
condition is also true for a plan without files. The library then examines the files of the table again, on the client,
only by partition values and column statistics (`ManifestFilterManager`). The library refuses the delete if some rows of
a file may match: "Cannot delete file where some, but not all, rows match". An index can prune a file that these
statistics keep.

To prevent this, the plan gets one additional file that these statistics keep. Not all rows of this file match, so Spark
deletes rows instead of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, replace_predicates
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.metaserver.planner.pruning.file_pruning import IN_VALUES_MAX, narrow_by_partition, narrow_by_stats
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import Expired, FileSelection

_NEGATIVE = frozenset({Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH})
_EXAMINED_FILES_MAX = 10_000
"""The maximum number of files that are examined.

If all rows of these files match, other files are not examined, and the plan may get a file that it does not need.
"""


def weaken_to_java_pruning(expression: Expression) -> Expression:
    """Return a weaker expression, which prunes by column statistics at most the files that Java prunes.

    Predicates that Java may not evaluate become TRUE. Java does not evaluate lists longer than `IN_VALUES_MAX`
    (`InclusiveMetricsEvaluator`). Its releases differ in how they evaluate negations and transforms.
    """
    return replace_predicates(expression, lambda predicate: predicate if _is_simple(predicate) else TRUE)


def find_file_against_metadata_delete(
    scan: ScanPlan, expression: Expression, by_spec: Mapping[int, Expression], is_expired: Expired
) -> int | None:
    """Return the entry id of a file that prevents the client from deleting by metadata.

    Spark deletes whole files by metadata if the plan has only files whose rows all match. Iceberg's library then fails
    if it finds a file that the plan has left out, but of which only some rows may match. With such a file in the plan,
    Spark rewrites files instead.

    Args:
        scan: The plan, without this file.
        expression: The filter in the form of `weaken_to_java_pruning`.
        by_spec: The condition on partition values by spec id, as in `narrow_by_partition`.
        is_expired: A function that returns whether the time budget of the plan is exhausted.

    Returns:
        None if Spark does not choose a metadata delete, or if Iceberg's library accepts it.
    """
    if not _do_partitions_decide_all_files(scan):
        return None
    selection = FileSelection.select_all(scan.view)
    narrow_by_partition(selection, by_spec, is_expired)
    narrow_by_stats(selection, expression, is_expired)
    removed_ids = np.setdiff1d(selection.list_entry_ids(), scan.entry_ids, assume_unique=True)
    return next(
        (entry_id for entry_id in removed_ids.tolist() if scan.compute_residual(entry_id) not in (TRUE, FALSE)), None
    )


def _is_simple(predicate: Bound) -> bool:
    """Return whether all releases of Iceberg's Java library evaluate the predicate with equal results."""
    return predicate.transform == IDENTITY and predicate.op not in _NEGATIVE and len(predicate.values) <= IN_VALUES_MAX


def _do_partitions_decide_all_files(scan: ScanPlan) -> bool:
    """Return whether partition values prove for each file of the plan that either all rows match or no row matches.

    Only the first `_EXAMINED_FILES_MAX` files are examined. Column statistics are not considered, because the answer
    to Spark does not contain them. It also does not contain files whose residual is FALSE.
    """
    examined_ids = islice(scan.entry_ids.tolist(), _EXAMINED_FILES_MAX)
    return all(scan.compute_residual(entry_id) in (TRUE, FALSE) for entry_id in examined_ids)
