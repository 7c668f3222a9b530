"""A pointer store as plain dicts: the oracle of the state machine. It shares no code with the stores.

`apply` executes a transaction. It returns None, or the kind of the first error. After an error the model is unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from seamark.metaserver.store import model, operations
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind, NamespacePath


class ModelError(Exception):
    """The model refuses an operation. The argument is the kind of error that the store must raise."""


@dataclass
class Model:
    """The expected state of a store, changed by the same operations."""

    now_ms: int
    namespaces: dict[NamespacePath, tuple[dict[str, str], int]] = field(default_factory=dict)
    relations: dict[tuple[NamespacePath, str], Entry] = field(default_factory=dict)
    functions: dict[tuple[NamespacePath, str], Entry] = field(default_factory=dict)
    dropped: dict[str, DroppedEntry] = field(default_factory=dict)
    instants: dict[str, model.InstantState] = field(default_factory=dict)
    """The instants in the order in which a reader of the timeline reads them."""
    producers: dict[tuple[str, str], model.ProducerState] = field(default_factory=dict)
    """The producers by the table's UUID and the producer's id."""

    def apply(self, batch: Sequence[Any]) -> str | None:
        saved_state = copy.deepcopy(self.__dict__)
        try:
            for operation in batch:
                getattr(self, "do_" + type(operation).__name__)(operation)
        except ModelError as error:
            self.__dict__.update(saved_state)
            return str(error)
        return None

    def _get_names(self, kind: EntryKind) -> dict[tuple[NamespacePath, str], Entry]:
        return self.functions if kind == "function" else self.relations

    def _find(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry:
        entry = self._get_names(kind).get((namespace, name))
        if entry is None or entry.kind != kind:
            raise ModelError(f"no_such_{kind}")
        return entry

    def _add(self, entry: Entry) -> None:
        if entry.namespace not in self.namespaces:
            raise ModelError("no_such_namespace")
        names = self._get_names(entry.kind)
        if (entry.namespace, entry.name) in names:
            raise ModelError("already_exists")
        names[entry.namespace, entry.name] = entry

    def do_CreateNamespace(self, op: operations.CreateNamespace) -> None:  # noqa: N802  named after the operation
        if len(op.path) > 1 and op.path[:-1] not in self.namespaces:
            raise ModelError("no_such_namespace")
        if op.path in self.namespaces:
            raise ModelError("already_exists")
        self.namespaces[op.path] = (op.properties, 1)

    def do_ReplaceNamespaceProperties(self, op: operations.ReplaceNamespaceProperties) -> None:  # noqa: N802
        if op.path not in self.namespaces:
            raise ModelError("no_such_namespace")
        if self.namespaces[op.path][1] != op.expected_version:
            raise ModelError("commit_conflict")
        self.namespaces[op.path] = (op.properties, op.expected_version + 1)

    def do_DropNamespace(self, op: operations.DropNamespace) -> None:  # noqa: N802
        if op.path not in self.namespaces:
            raise ModelError("no_such_namespace")
        inner_paths = [path for path in self.namespaces if path[:-1] == op.path]
        inner_paths += [path for path, _ in [*self.relations, *self.functions] if path == op.path]
        if inner_paths:
            raise ModelError("namespace_not_empty")
        del self.namespaces[op.path]

    def do_CreateEntry(self, op: operations.CreateEntry) -> None:  # noqa: N802
        self._add(op.entry)

    def do_SwapPointer(self, op: operations.SwapPointer) -> None:  # noqa: N802
        entry = self._find(op.kind, op.namespace, op.name)
        if entry.uuid != op.uuid or entry.metadata_location != op.expected_location:
            raise ModelError("commit_conflict")
        self._get_names(op.kind)[op.namespace, op.name] = msgspec.structs.replace(
            entry,
            metadata_location=op.new_location,
            previous_location=entry.metadata_location,
            version=entry.version + 1,
            updated_ms=op.now_ms,
        )

    def do_RenameEntry(self, op: operations.RenameEntry) -> None:  # noqa: N802
        entry = self._find(op.kind, op.namespace, op.name)
        del self._get_names(op.kind)[op.namespace, op.name]
        self._add(msgspec.structs.replace(entry, namespace=op.to_namespace, name=op.to_name))

    def do_DropEntry(self, op: operations.DropEntry) -> None:  # noqa: N802
        entry = self._find(op.kind, op.namespace, op.name)
        if op.expected_location not in (None, entry.metadata_location):
            raise ModelError("commit_conflict")
        del self._get_names(op.kind)[op.namespace, op.name]
        if op.keep:
            self.dropped[op.keep.id] = msgspec.structs.replace(op.keep, entry=entry)
        self._forget_unnamed()

    def _list_live_uuids(self) -> set[str]:
        return {entry.uuid for entry in [*self.relations.values(), *self.functions.values()]}

    def _forget_unnamed(self) -> None:
        live_uuids = self._list_live_uuids() | {dropped_entry.entry.uuid for dropped_entry in self.dropped.values()}
        self.producers = {key: state for key, state in self.producers.items() if key[0] in live_uuids}

    def do_RestoreEntry(self, op: operations.RestoreEntry) -> None:  # noqa: N802
        dropped_entry = self.dropped.pop(op.dropped_id, None)
        if dropped_entry is None or dropped_entry.expires_ms <= self.now_ms:
            raise ModelError("not_found")
        self._add(msgspec.structs.replace(dropped_entry.entry, namespace=op.namespace, name=op.name))

    def do_ForgetDropped(self, op: operations.ForgetDropped) -> None:  # noqa: N802
        if self.dropped.pop(op.dropped_id, None) is None:
            raise ModelError("not_found")
        self._forget_unnamed()

    def do_AdvanceProducer(self, op: operations.AdvanceProducer) -> None:  # noqa: N802
        if op.uuid not in self._list_live_uuids():
            raise ModelError("no_such_table")
        last_state = self.producers.get((op.uuid, op.producer))
        if last_state is not None and last_state.sequence >= op.sequence:
            raise ModelError("commit_conflict")
        self.producers[op.uuid, op.producer] = model.ProducerState(op.sequence, op.snapshot_id, op.now_ms)

    def do_RecordInstant(self, op: operations.RecordInstant) -> None:  # noqa: N802
        if op.instant.id in self.instants:
            raise ModelError("already_exists")
        self.instants[op.instant.id] = op.instant.state

    def do_MoveInstant(self, op: operations.MoveInstant) -> None:  # noqa: N802
        if op.id not in self.instants:
            raise ModelError("not_found")
        if self.instants[op.id] != op.expected:
            raise ModelError("commit_conflict")
        del self.instants[op.id]
        self.instants[op.id] = op.state
