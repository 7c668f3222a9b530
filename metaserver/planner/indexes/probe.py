"""Pruning by indexes: removal of files for which bloom filters, bitmaps or record keys prove that no row matches.

A file is removed only if an index that covers the file (by its identity, `hashing.compute_file_ids`) proves that no row
matches for any client (`semantics.py`). Files without an index stay. All files stay if an index is damaged, if it has
keys of another type, or if the time budget is exhausted. Indexes ignore deletes, because deletes only reduce the
matching rows. `index_predicates.py` decides which index evaluates which predicate.

Bitmaps identify the matching rows of a file. If each predicate of a conjunction matches some row of a file, but no row
matches all predicates, the file is removed. This step comes last, and checks each of the remaining files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Or, collect_predicates, join_by_and
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.key_set import KeySet, KeySpan, WantedKeys
from seamark.formats.index.keys.keys import Bits, has_codes
from seamark.formats.index.keys.ranks import Distinct
from seamark.formats.index.kinds.bitmap import Bitmap, BitmapQuery
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.queries import Flags, IndexQuery
from seamark.metaserver.index.files.indexes import OpenIndex
from seamark.metaserver.index.files.remote import RemoteIndexFile
from seamark.metaserver.planner.indexes.coverage import Coverage
from seamark.metaserver.planner.indexes.index_predicates import IndexPredicate, IndexProjection, KeySetPredicate
from seamark.metaserver.planner.indexes.row_intersection import Conjunct, has_row
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_expression, narrow_by_stats
from seamark.metaserver.planner.scan.scan_plan import IndexUse
from seamark.metaserver.planner.view.selection import Expired, FileSelection, narrow_to_any
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import RegisteredIndexFile


@dataclass
class Probe:
    """Prunes the files of one plan by indexes.

    Attributes:
        coverage: The covered files, by definition id.
        open_indexes: The index files in memory, by location. The probe ignores other index files.
        damaged: The reasons why index files are damaged, by location.
    """

    view: TableView
    projection: IndexProjection
    coverage: Mapping[str, Coverage]
    open_indexes: Mapping[str, OpenIndex]
    remote_hits: Mapping[object, Mapping[str, Flags]] = field(default_factory=dict)
    """The results of index files that are read remotely, by the key of the predicate and the location."""
    remote: Mapping[str, RemoteIndexFile] = field(default_factory=dict)
    """The remote index files, by location."""
    listed_files: Sequence[RegisteredIndexFile] = ()
    """All index files that the plan may use."""
    until_s: float = 0.0
    """The time until which the plan may wait for index files, in monotonic seconds."""
    is_late: bool = False
    """Whether an index file was not loaded in time."""
    damaged: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each definition id, the number of files that its index checked and the number that it removed.

    The numbers do not include pruning by rows.
    """
    missing_rows: dict[str, set[int]] = field(default_factory=dict)
    """The data files whose rows are in a bitmap index but not in memory, by location of the index file."""
    _counted_keys: set[object] = field(default_factory=set)
    _kept_flags: dict[object, Flags | None] = field(default_factory=dict)
    _queries: dict[object, IndexQuery | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the plan used all indexes, so that a later plan would not remove more files."""
        return not self.is_late and not self.damaged and not self.missing_rows

    def covers_all_files(self, definition: IndexDefinition) -> bool:
        """Return whether the index evaluates a predicate of the plan, and has an entry of each file of the view."""
        coverage = self.coverage.get(definition.id)
        return coverage is not None and not coverage.uncovered.any()

    def reset_counts(self) -> None:
        """Reset the counts before the plan runs again with more of the indexes loaded."""
        self.counts.clear()
        self.missing_rows.clear()
        self._counted_keys.clear()

    def list_steps(self, is_expired: Expired) -> Iterator[tuple[str, Callable[[FileSelection], None]]]:
        """Yield the steps that narrow a selection, with their names, in ascending order of cost.

        There is a step for each kind of index, then a step for disjunctions that also need statistics, and a step
        that combines bitmap indexes row by row.
        """
        used_kinds = {definition.kind for definition in self.projection.pruning_definitions}
        kinds: frozenset[str] = frozenset()
        for kind in KINDS:
            if kind in used_kinds:
                # Later steps also use the earlier kinds, because the children of a disjunction may need several kinds.
                kinds |= {kind}
                yield kind, partial(self.narrow, kinds=kinds, is_expired=is_expired)
        if self.projection.disjunctions:
            yield "disjunctions", partial(self.narrow_by_disjunctions, is_expired=is_expired)
        if self.can_prune_by_row:
            yield "bitmap_rows", partial(self.narrow_by_row, is_expired=is_expired)

    @property
    def used(self) -> tuple[IndexUse, ...]:
        """The numbers of files that each index has checked and removed until now."""
        by_id = {definition.id: definition for definition in self.projection.definitions}
        return tuple(
            IndexUse(by_id[key].name, by_id[key].kind, files_in, removed_files)
            for key, (files_in, removed_files) in self.counts.items()
        )

    def narrow(self, selection: FileSelection, kinds: frozenset[str], is_expired: Expired) -> None:
        """Leave out files of the selection by all indexes of these kinds.

        Args:
            selection: The files that may still match.
            kinds: Kinds of indexes, such as bloom filters. Each step of a plan adds a kind to those of the step before,
                because the children of a disjunction may need different kinds.
            is_expired: Returns whether the time of the plan has expired.
        """
        self._narrow_by_expression(selection, self.projection.expression, kinds, is_expired)
        for definition, equalities in self.projection.composite:
            if definition.kind in kinds and not is_expired():
                self._narrow_by_predicate(selection, IndexPredicate(definition, equalities), is_expired)
        for predicate in self.projection.key_set_predicates:
            if predicate.definition.kind in kinds and not is_expired():
                self._narrow_by_predicate(selection, predicate, is_expired)

    def _narrow_by_expression(
        self, selection: FileSelection, expression: Expression, kinds: frozenset[str], is_expired: Expired
    ) -> None:
        """Narrow the selection by the indexes of these kinds on single terms.

        A disjunction keeps the files that any child keeps. So it is skipped if a child has no index of these kinds.
        """
        match expression:
            case And(children):
                for child in children:
                    self._narrow_by_expression(selection, child, kinds, is_expired)
            case Or(children):
                if not all(self._can_prune(child, kinds) for child in children):
                    return
                alternatives = (
                    partial(self._narrow_by_expression, expression=child, kinds=kinds, is_expired=is_expired)
                    for child in children
                )
                narrow_to_any(selection, alternatives, is_expired)
            case Bound():
                definition = self.projection.by_field[expression.column_id]
                if definition.kind in kinds and not is_expired():
                    self._narrow_by_predicate(selection, IndexPredicate(definition, (expression,)), is_expired)

    def narrow_by_disjunctions(self, selection: FileSelection, is_expired: Expired) -> None:
        """Narrow the selection by disjunctions in which some predicates have an index and others only statistics."""
        narrow_by_predicate = partial(self._narrow_by_index_or_statistics, is_expired=is_expired)
        for disjunction in self.projection.disjunctions:
            narrow_by_expression(selection, disjunction, narrow_by_predicate, is_expired)

    def _narrow_by_index_or_statistics(self, selection: FileSelection, predicate: Bound, is_expired: Expired) -> None:
        definition = self.projection.by_field.get(predicate.column_id)
        if definition is None:
            narrow_by_stats(selection, predicate, is_expired)
        else:
            self._narrow_by_predicate(selection, IndexPredicate(definition, (predicate,)), is_expired)

    def _can_prune(self, expression: Expression, kinds: frozenset[str]) -> bool:
        """Return whether an index of these kinds evaluates a predicate of the expression."""
        return any(
            self.projection.by_field[predicate.column_id].kind in kinds for predicate in collect_predicates(expression)
        )

    def _narrow_by_predicate(
        self, selection: FileSelection, predicate: IndexPredicate | KeySetPredicate, is_expired: Expired
    ) -> None:
        """Keep the files that may match a predicate, and count the checked and removed files.

        The result of each predicate is computed once.
        """
        definition_id, key = predicate.definition.id, predicate.key
        if key not in self._kept_flags:
            self._kept_flags[key] = self._flag_kept_files(predicate, is_expired)
        kept_flags = self._kept_flags[key]
        is_first = key not in self._counted_keys
        self._counted_keys.add(key)
        if kept_flags is not None:
            files_before = selection.count()
            selection.intersect(kept_flags)
            files, removed_files = self.counts.get(definition_id, (0, 0))
            # A later step with more kinds of indexes applies the same result again. Its files are counted only once.
            self.counts[definition_id] = (
                files + files_before * is_first,
                removed_files + files_before - selection.count(),
            )

    def _flag_kept_files(self, predicate: IndexPredicate | KeySetPredicate, is_expired: Expired) -> Flags | None:
        """Return the files that the index keeps, uint8[files of the view], or None if it cannot evaluate the predicate.

        A file is kept if the index does not cover it, if a row may match, or if the time did not suffice to check it.
        """
        coverage, query = self.coverage.get(predicate.definition.id), self._make_query(predicate)
        if coverage is None or query is None:
            return None
        kept_flags = coverage.uncovered.copy()
        remote_hits = self.remote_hits.get(predicate.key, {})
        for part in coverage.parts:
            index = self.open_indexes.get(part.location)
            hits = remote_hits.get(part.location)
            if index is not None and part.location not in self.damaged and not is_expired():
                try:
                    hits = query.mark_files(index.index)
                except ValueError as error:
                    self.damaged[part.location] = str(error)
            positions = part.positions if hits is None else part.positions[np.flatnonzero(hits.view(np.bool_))]
            kept_flags[positions[positions >= 0]] = 1
        return kept_flags

    def _make_query(self, predicate: IndexPredicate | KeySetPredicate) -> IndexQuery | None:
        if predicate.key not in self._queries:
            self._queries[predicate.key] = predicate.query()
        return self._queries[predicate.key]

    # Pruning by rows

    @property
    def can_prune_by_row(self) -> bool:
        """Whether pruning by rows can remove more files, because a conjunction has predicates on two bitmap indexes.

        Each index alone may keep a file because different rows match the two predicates.
        """
        has_bitmap = any(map(self._is_bitmap, collect_predicates(self.projection.expression)))
        return has_bitmap + len(self._bitmap_key_sets) > 1 or _has_conjunction(
            self.projection.expression, self._is_bitmap
        )

    @property
    def _bitmap_key_sets(self) -> list[KeySetPredicate]:
        """The dynamic filters that a bitmap index evaluates."""
        return [
            predicate
            for predicate in self.projection.key_set_predicates
            if KINDS[predicate.definition.kind].answers_rows
        ]

    def _is_bitmap(self, predicate: Bound) -> bool:
        return KINDS[self.projection.by_field[predicate.column_id].kind].answers_rows

    def narrow_by_row(self, selection: FileSelection, is_expired: Expired) -> None:
        """Remove the files in which no single row satisfies the predicates of all bitmap indexes.

        If the time of the plan expires, the remaining files are kept.
        """
        kept_flags = np.ones(self.view.file_count, dtype=np.uint8)
        conjuncts, remainder = self._split_conjuncts()
        for position in selection.list_positions().tolist():
            if is_expired():
                break
            if not has_row(conjuncts, position, partial(self._find_rows, remainder, position)):
                kept_flags[position] = 0
        selection.intersect(kept_flags)

    def _split_conjuncts(self) -> tuple[list[Conjunct], Expression]:
        """Split the expression into conjuncts for bitmaps in memory, and an expression for the remaining parts.

        The conjuncts are in ascending order of the share of keys that they match, so that the first conjuncts exclude
        the most rows. A conjunct whose bitmaps are not all in memory is in both results.
        """
        expression = self.projection.expression
        children = expression.children if isinstance(expression, And) else (expression,)
        wanted_keys: list[tuple[IndexDefinition, WantedKeys]] = []
        remainder: list[Expression] = []
        for child in children:
            keys = self._find_wanted_keys(child) if isinstance(child, Bound) and self._is_bitmap(child) else None
            if keys is None or not isinstance(child, Bound):
                remainder.append(child)
            else:
                wanted_keys.append((self.projection.by_field[child.column_id], keys))
                if not self._is_in_memory(wanted_keys[-1][0]):  # `_find_rows` decides which rows to load.
                    remainder.append(child)
        wanted_keys += [(predicate.definition, predicate.dynamic_filter.keys) for predicate in self._bitmap_key_sets]
        conjuncts = [
            Conjunct(keys, self.coverage[definition.id], self.open_indexes, self.damaged)
            for definition, keys in wanted_keys
            if definition.id in self.coverage
        ]
        return sorted(
            (conjunct for conjunct in conjuncts if conjunct.can_prune), key=lambda conjunct: conjunct.share
        ), join_by_and(*remainder)

    def _is_in_memory(self, definition: IndexDefinition) -> bool:
        coverage = self.coverage.get(definition.id)
        return coverage is not None and all(part.location in self.open_indexes for part in coverage.parts)

    def _find_wanted_keys(self, predicate: Bound) -> WantedKeys | None:
        """Return the keys that match a predicate, as an interval of codes (`KeySpan`) or as a set of codes (`KeySet`).

        Returns:
            None if the predicate also matches nulls or NaNs, if the keys are not represented by integer codes, or if
            the codes are neither one interval nor a list of single values.
        """
        query = self._make_query(IndexPredicate(self.projection.by_field[predicate.column_id], (predicate,)))
        if not isinstance(query, BitmapQuery):
            return None
        ranges = query.ranges
        if ranges.nulls or ranges.nans or not has_codes(ranges.kind) or not ranges.closed:
            return None
        low, high = ranges.closed[0].low, ranges.closed[0].high
        if len(ranges.closed) == 1 and isinstance(low, int) and isinstance(high, int):
            return KeySpan(ranges.kind, low, high)
        points = ranges.points
        return None if points is None else KeySet(ranges.kind, Distinct(np.array(points, dtype=np.uint64)))

    def _find_rows(self, expression: Expression, position: int) -> Bits | None:
        """Return the rows that may match in the file at a position in the view, or None for all rows.

        A part without a bitmap index may match all rows. So AND ignores it, and an OR with it gives all rows.
        """
        match expression:
            case And(children):
                narrowest: Bits | None = None
                for child in children:
                    child_rows = self._find_rows(child, position)
                    if child_rows is not None:
                        narrowest = child_rows if narrowest is None else narrowest & child_rows
                        if not narrowest.any():
                            break
                return narrowest
            case Or(children):
                widest: Bits | None = None
                for child in children:
                    child_rows = self._find_rows(child, position)
                    if child_rows is None:
                        return None
                    widest = child_rows if widest is None else widest | child_rows
                return widest
            case Bound():
                return self._find_predicate_rows(expression, position) if self._is_bitmap(expression) else None
        return None

    def _find_predicate_rows(self, predicate: Bound, position: int) -> Bits | None:
        """Return the rows that may match a predicate in the file at a position, or None for all rows."""
        index_predicate = IndexPredicate(self.projection.by_field[predicate.column_id], (predicate,))
        query = self._make_query(index_predicate)
        if not isinstance(query, BitmapQuery):
            return None
        located_bitmap = self._find_bitmap(index_predicate, position)
        if located_bitmap is None:
            return None
        location, file, bitmap = located_bitmap
        try:
            return bitmap.find_rows(file, query.ranges)
        except ValueError as error:
            self.damaged[location] = str(error)
            return None

    def _find_bitmap(self, predicate: IndexPredicate, position: int) -> tuple[str, int, Bitmap] | None:
        """Return the index file that covers the file: its location, the file's number in it, and its bitmaps.

        Returns:
            None if no available index file covers the file, or if the index file is damaged. It is also damaged if the
            number of rows in the bitmaps is not that of the file. The damage is noted in `damaged`.
        """
        coverage = self.coverage.get(predicate.definition.id)
        location_and_file = None if coverage is None else coverage.find_index_file(position)
        bitmap = None if location_and_file is None else self._get_bitmap(*location_and_file)
        if location_and_file is None or bitmap is None:
            return None
        location, file = location_and_file
        records = (self.open_indexes.get(location) or self.remote[location]).files.records[file]
        try:
            if bitmap.open_section(file).rows != records:
                raise ValueError(f"file {file} has {records} rows, but its bitmap has {bitmap.open_section(file).rows}")
        except ValueError as error:
            self.damaged[location] = str(error)
            return None
        return location, file, bitmap

    def _get_bitmap(self, location: str, file: int) -> Bitmap | None:
        """Return the bitmaps that contain the rows of this data file, or None if they are not available.

        If a remote index file has not loaded these rows, they are noted in `missing_rows`, so that they can be loaded.
        """
        index, remote = self.open_indexes.get(location), self.remote.get(location)
        if location in self.damaged:
            return None
        if index is not None:
            assert isinstance(index.index, Bitmap)
            return index.index
        if remote is None:
            return None
        if remote.bitmap.has_rows(file):
            return remote.bitmap.bitmap
        self.missing_rows.setdefault(location, set()).add(file)
        return None


def _has_conjunction(expression: Expression, is_bitmap: Callable[[Bound], bool]) -> bool:
    """Return whether the expression contains a conjunction with predicates on bitmap indexes in two of its parts."""
    if isinstance(expression, And):
        bitmap_parts = [child for child in expression.children if any(map(is_bitmap, collect_predicates(child)))]
        return len(bitmap_parts) > 1 or any(_has_conjunction(child, is_bitmap) for child in bitmap_parts)
    return isinstance(expression, Or) and any(_has_conjunction(child, is_bitmap) for child in expression.children)
