"""Checks where a further warehouse can be: only where the operator allows it, and apart from everything else.

With `s3_backend`, the objects of an `s3://` location are in a cloud. So a location can have two places: the place that
clients see, and the place in the cloud. Two warehouses may share neither of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.formats.storage.locations import Location, make_location_key, parse_location
from seamark.metaserver.objects.clouds.backed import CLOUDS, UPLOADS, Backing
from seamark.metaserver.runtime.home import find_sqlite_file, is_in_home
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import StoredWarehouse


def find_place(location: Location, backend: str) -> Location:
    """Return the place where the objects of a location are stored, such as `gs://…` for an `s3://` location.

    Without a cloud behind the `s3://` location, the place is the location itself.

    Args:
        location: The location that clients see.
        backend: The setting `s3_backend` of the warehouse.

    Raises:
        BadRequest: The bucket or the path is not valid in the cloud.
    """
    if location.scheme != "s3" or not backend:
        return location
    try:
        return Backing(backend).map_to_cloud(location)
    except ConfigError as error:
        raise BadRequest(error.message) from None


def check_location(text: str, settings: Settings, backend: str, server_roots: Sequence[Location]) -> Location:
    """Return the normalised location of a new warehouse.

    Args:
        text: The location.
        settings: The settings of the server.
        backend: The setting `s3_backend` of the warehouse.
        server_roots: The location of the server's own warehouse, and the allowed locations of the server.

    Raises:
        BadRequest: The operator does not allow the location, or it overlaps a location of the server.
    """
    location = parse_location(text, "The location of the warehouse")
    if backend != settings.s3_backend and backend and location.scheme != "s3":
        raise BadRequest(
            f"A warehouse with its own s3_backend has a location with s3://, not {str(location)!r}; write "
            "s3://bucket/path, or omit s3_backend"
        )
    roots = [parse_location(root, "A root of warehouses") for root in settings.warehouse_roots]
    if not roots:
        raise BadRequest(
            "This server has no place for further warehouses; have the operator start it with --warehouse-roots URI, "
            "below which they can be created, such as file:///srv/warehouses"
        )
    # The place is the URI in the cloud where the objects of the location are stored. For a warehouse in the store of
    # the server, a root may contain the location that clients see, or the place.
    place = find_place(location, backend)
    places = {location, place} if backend == settings.s3_backend else {place}
    if not any(root.holds(candidate) and _stays_below(candidate, root) for root in roots for candidate in places):
        shown_roots = ", ".join(str(root) for root in roots)
        shown_place = "" if place == location else f", which is {str(place)!r} with this s3_backend,"
        raise BadRequest(
            f"The location {str(location)!r}{shown_place} is outside the places for warehouses, which are "
            f"{shown_roots}; choose one below them, or have the operator add a URI by --warehouse-roots"
        )
    uploads = Location(place.scheme, place.bucket, UPLOADS)
    if place.scheme in CLOUDS and _is_inside(make_location_key(place), make_location_key(uploads)):
        raise BadRequest(
            f"The location {str(location)!r} is in {str(uploads)!r}, the folder of unfinished uploads of other "
            "warehouses; choose another"
        )
    check_no_overlap_with_server(location, settings, backend, server_roots)
    return location


def check_no_overlap_with_server(
    location: Location, settings: Settings, backend: str, server_roots: Sequence[Location]
) -> None:
    """Check that a location overlaps neither a location of the server's own warehouse nor the server's own files.

    Raises:
        BadRequest: The location overlaps such a location.
    """
    keys = _list_keys(location, backend)
    for root in server_roots:
        if _do_any_overlap(keys, _list_keys(root, settings.s3_backend)):
            raise BadRequest(f"The location {str(location)!r} overlaps {str(root)!r} of the server; choose another")
    if location.is_local:
        database = find_sqlite_file(settings)
        own_files = [str(settings.home.absolute()), *([] if database is None else [str(database)])]
        folder = os.path.realpath(location.file_path)
        if is_in_home(settings, folder) or any(_is_inside(os.path.realpath(path), folder) for path in own_files):
            raise BadRequest(f"The location {str(location)!r} overlaps the files of the server itself; choose another")


def check_no_overlap_with_warehouses(
    location: Location, settings: Settings, backend: str, warehouses: Iterable[StoredWarehouse]
) -> None:
    """Check that the location of a new warehouse overlaps the location of no other warehouse.

    Raises:
        BadRequest: The location overlaps the location of another warehouse.
    """
    keys = _list_keys(location, backend)
    for other in warehouses:
        other_backend = str(other.settings.get("s3_backend", settings.s3_backend))
        other_keys = {other.location_key, *_list_keys(parse_location(other.location), other_backend)}
        if _do_any_overlap(keys, other_keys):
            raise BadRequest(
                f"The location {str(location)!r} overlaps the location {other.location!r} of the warehouse "
                f"{other.name!r}; choose another"
            )


def check_same_backend(warehouse: StoredWarehouse, own_settings: Mapping[str, Any]) -> None:
    """Check that a change does not set another `s3_backend`.

    Raises:
        BadRequest: The new settings have another `s3_backend`.
    """
    former_backend, new_backend = warehouse.settings.get("s3_backend"), own_settings.get("s3_backend")
    if former_backend != new_backend:
        raise BadRequest(
            f"The setting s3_backend of the warehouse {warehouse.name} cannot change from {former_backend!r} to "
            f"{new_backend!r}, because its objects would stay in the former store; create another warehouse"
        )


def is_place_unchanged(warehouse: StoredWarehouse, former_backend: str | None, backend: str) -> bool:
    """Return whether the objects of a warehouse stay where they are when its credentials change.

    A warehouse without its own keys of S3 uses the `s3_backend` of the server. So credentials can change its place.
    The result is False if the warehouse returns to the place for which it was created.

    Args:
        warehouse: The warehouse before the change.
        former_backend: The `s3_backend` before the change. If it is not known, this is None.
        backend: The `s3_backend` after the change.

    Raises:
        BadRequest: The objects would be at a place that is neither their former place nor the place for which the
            warehouse was created.
    """
    location = parse_location(warehouse.location)
    place = find_place(location, backend)
    if location.scheme != "s3" or (former_backend is not None and place == find_place(location, former_backend)):
        return True
    if make_location_key(place) != warehouse.location_key:
        raise BadRequest(
            f"With these credentials, the warehouse {warehouse.name} would be at {str(place)!r}, and its objects would "
            "stay in the former store; send credentials of the former store, or create another warehouse"
        )
    return False


def _list_keys(location: Location, backend: str) -> set[str]:
    """Return the keys of both places of a location, by which two warehouses are compared.

    With `backend`, the objects of an `s3://` location that clients see are at another location in a cloud.
    """
    return {make_location_key(location), make_location_key(find_place(location, backend))}


def _do_any_overlap(keys: Iterable[str], other_keys: Iterable[str]) -> bool:
    return any(do_overlap(key, other) for key in keys for other in other_keys)


def do_overlap(key: str, other: str) -> bool:
    """Return whether two keys of locations are equal, or one location contains the other."""
    return _is_inside(key, other) or _is_inside(other, key)


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _stays_below(location: Location, root: Location) -> bool:
    """Return whether the location is below the root after its symbolic links are resolved."""
    if not location.is_local:
        return True
    return _is_inside(os.path.realpath(location.file_path), os.path.realpath(root.file_path))
