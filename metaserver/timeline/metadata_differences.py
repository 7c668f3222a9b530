"""Compute the updates (`TableUpdate` and `ViewUpdate` of the REST specification) between two metadata files.

The timeline records which metadata file each change has created, but not the updates of the request. If a consumer
applies the computed updates to the earlier metadata, it gets the later metadata, except for logs and times. The module
has no side effects, and works on JSON documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]
Update = dict[str, Any]


def list_table_updates(base: Document | None, new: Document) -> list[Update]:
    """Return the updates of the REST specification that turn the metadata `base` into `new`.

    If `base` is None, they create the table. Items are added before other updates refer to them, and removed last.
    """
    previous: Document = {} if base is None else base
    return [
        *_list_identity_updates(previous, new, "table-uuid"),
        *_list_additions(previous, new, "schemas", "schema-id", _add_schema),
        *_list_current_change(previous, new, "current-schema-id", "set-current-schema", "schema-id"),
        *_list_additions(
            previous, new, "partition-specs", "spec-id", lambda spec: {"action": "add-spec", "spec": spec}
        ),
        *_list_current_change(previous, new, "default-spec-id", "set-default-spec", "spec-id"),
        *_list_additions(
            previous, new, "sort-orders", "order-id", lambda order: {"action": "add-sort-order", "sort-order": order}
        ),
        *_list_current_change(previous, new, "default-sort-order-id", "set-default-sort-order", "sort-order-id"),
        *_list_property_updates(previous, new),
        *_list_additions(previous, new, "encryption-keys", "key-id", _add_encryption_key),
        *_list_snapshot_updates(previous, new),
        *_list_statistics_updates(previous, new, "statistics"),
        *_list_statistics_updates(previous, new, "partition-statistics"),
        *_list_removals(previous, new, "partition-specs", "spec-id", "remove-partition-specs", "spec-ids"),
        *_list_removals(previous, new, "schemas", "schema-id", "remove-schemas", "schema-ids"),
        *(
            {"action": "remove-encryption-key", "key-id": key}
            for key in _list_removed(previous, new, "encryption-keys", "key-id")
        ),
    ]


def list_view_updates(base: Document | None, new: Document) -> list[Update]:
    """Return the updates of the REST specification that turn the metadata `base` of a view into `new`.

    If `base` is None, they create the view.
    """
    previous: Document = {} if base is None else base
    return [
        *_list_identity_updates(previous, new, "view-uuid"),
        *_list_additions(previous, new, "schemas", "schema-id", _add_schema),
        *_list_property_updates(previous, new),
        *_list_additions(
            previous, new, "versions", "version-id", lambda item: {"action": "add-view-version", "view-version": item}
        ),
        *_list_current_change(previous, new, "current-version-id", "set-current-view-version", "view-version-id"),
    ]


def _add_schema(schema: Document) -> Update:
    return {"action": "add-schema", "schema": schema}


def _add_encryption_key(key: Document) -> Update:
    return {"action": "add-encryption-key", "encryption-key": key}


def _list_identity_updates(old_document: Document, new: Document, uuid_field: str) -> Iterator[Update]:
    if old_document.get(uuid_field) != new.get(uuid_field) and new.get(uuid_field):
        yield {"action": "assign-uuid", "uuid": new[uuid_field]}
    if old_document.get("format-version") != new["format-version"]:
        yield {"action": "upgrade-format-version", "format-version": new["format-version"]}
    if old_document.get("location") != new["location"]:
        yield {"action": "set-location", "location": new["location"]}


def _index_items(document: Document, list_name: str, key: str) -> dict[Any, Document]:
    """Return the items of the list `list_name` of a document, by their field `key`. A missing field counts as 0."""
    return {item.get(key, 0): item for item in document.get(list_name) or ()}


def _list_additions(
    old_document: Document, new: Document, list_name: str, key: str, make_update: Callable[[Document], Update]
) -> Iterator[Update]:
    """Yield an update for each item of a list that the old document does not have.

    Args:
        old_document: The old metadata.
        new: The new metadata.
        list_name: The field with the list, such as `schemas`.
        key: The field that identifies an item.
        make_update: A function that returns the update that adds an item.
    """
    old_items = _index_items(old_document, list_name, key)
    for item_id, item in _index_items(new, list_name, key).items():
        if item_id not in old_items:
            yield make_update(item)


def _list_removed(old_document: Document, new: Document, list_name: str, key: str) -> list[Any]:
    """Return the ids of the items of a list that the new document does not have."""
    new_items = _index_items(new, list_name, key)
    return [item_id for item_id in _index_items(old_document, list_name, key) if item_id not in new_items]


def _list_removals(
    old_document: Document, new: Document, list_name: str, key: str, action: str, field: str
) -> Iterator[Update]:
    """Yield the update that removes all items of a list that the new document does not have, if there are such items.

    Args:
        old_document: The old metadata.
        new: The new metadata.
        list_name: The field with the list, such as `schemas`.
        key: The field that identifies an item.
        action: The name of the update.
        field: The field of the update that lists the removed ids.
    """
    removed_ids = _list_removed(old_document, new, list_name, key)
    if removed_ids:
        yield {"action": action, field: removed_ids}


def _list_current_change(old_document: Document, new: Document, key: str, action: str, field: str) -> Iterator[Update]:
    if key in new and old_document.get(key) != new[key]:
        yield {"action": action, field: new[key]}


def _list_property_updates(old_document: Document, new: Document) -> Iterator[Update]:
    old_properties, new_properties = old_document.get("properties") or {}, new.get("properties") or {}
    changed_properties = {name: value for name, value in new_properties.items() if old_properties.get(name) != value}
    removed_names = [name for name in old_properties if name not in new_properties]
    if changed_properties:
        yield {"action": "set-properties", "updates": changed_properties}
    if removed_names:
        yield {"action": "remove-properties", "removals": removed_names}


def _list_snapshot_updates(old_document: Document, new: Document) -> Iterator[Update]:
    """Yield the updates of snapshots, and of the branches and tags that refer to them.

    Snapshots are added before references are set, and removed after references are removed.
    """
    snapshot_updates = list(
        _list_additions(old_document, new, "snapshots", "snapshot-id", lambda item: {"snapshot": item})
    )
    # In the order of sequence numbers, a snapshot follows its parent.
    for update in sorted(snapshot_updates, key=lambda update: update["snapshot"].get("sequence-number", 0)):
        yield {"action": "add-snapshot", **update}
    old_refs, new_refs = old_document.get("refs") or {}, new.get("refs") or {}
    for name, ref in new_refs.items():
        if old_refs.get(name) != ref:
            yield {"action": "set-snapshot-ref", "ref-name": name, **ref}
    for name in old_refs:
        if name not in new_refs:
            yield {"action": "remove-snapshot-ref", "ref-name": name}
    yield from _list_removals(old_document, new, "snapshots", "snapshot-id", "remove-snapshots", "snapshot-ids")


def _list_statistics_updates(old_document: Document, new: Document, list_name: str) -> Iterator[Update]:
    old_items = _index_items(old_document, list_name, "snapshot-id")
    new_items = _index_items(new, list_name, "snapshot-id")
    for snapshot_id, statistics in new_items.items():
        if old_items.get(snapshot_id) != statistics:
            yield {"action": f"set-{list_name}", list_name: statistics}
    for snapshot_id in old_items:
        if snapshot_id not in new_items:
            yield {"action": f"remove-{list_name}", "snapshot-id": snapshot_id}
