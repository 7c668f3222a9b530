"""Functions (UDFs): metadata documents of the Iceberg UDF specification, format version 1.

The REST specification has routes for reading functions. The routes for writing and dropping them are Seamark's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from seamark.formats.iceberg.metadata.properties import check_client_properties
from seamark.formats.protocol.wire import check_name, encode_json, format_path
from seamark.formats.runtime.decoding import convert_values
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import choose_file_suffix
from seamark.metaserver.catalog.ownership.claims import claim_folder
from seamark.metaserver.catalog.pointers import build_pointer_swap, make_entry
from seamark.metaserver.catalog.values import Caller, LoadedFunction, Page
from seamark.metaserver.store.model import EntryKind, NamespacePath
from seamark.metaserver.store.operations import DropEntry, Operation


class _Definition(msgspec.Struct, rename="kebab"):
    definition_id: str
    parameters: list[dict[str, Any]]
    return_type: str | dict[str, Any]
    versions: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    current_version_id: int
    function_type: Literal["udf", "udtf"]


class _Document(msgspec.Struct, rename="kebab"):
    """The fields of a function document that the server checks. Other fields are stored unchanged."""

    function_uuid: Annotated[
        str,
        # In Python, `$` also matches before a line break at the end, so the length is limited, too.
        msgspec.Meta(
            pattern="^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$", max_length=36
        ),
    ]
    format_version: Literal[1]
    definitions: Annotated[list[_Definition], msgspec.Meta(min_length=1)]
    definition_log: list[dict[str, Any]]
    properties: dict[str, str] = {}


class Functions:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context

    async def list(self, namespace: NamespacePath, page_token: str | None, page_size: int | None) -> Page[str]:
        return await self._context.list_names(EntryKind.FUNCTION, namespace, page_token, page_size)

    async def load(self, namespace: NamespacePath, name: str) -> LoadedFunction:
        entry = await self._context.require_entry(EntryKind.FUNCTION, namespace, name)
        return LoadedFunction(entry=entry, document=await self._context.documents.read_raw(entry.metadata_location))

    async def put(
        self, caller: Caller, namespace: NamespacePath, name: str, document: dict[str, Any]
    ) -> LoadedFunction:
        """Create or replace a function.

        Raises:
            BadRequest: The document is invalid, or changes the UUID.
        """
        requested_ms = self._context.clock.now_ms()
        check_name(name, "function name")
        try:
            function_document = convert_values(document, _Document)
        except msgspec.ValidationError as error:
            raise BadRequest(f"The function metadata is malformed: {error}") from None
        check_client_properties(function_document.properties, "A function")
        current = await self._context.store.load_entry(EntryKind.FUNCTION, namespace, name)
        if current is not None and current.uuid != function_document.function_uuid:
            raise BadRequest(
                f"{format_path(namespace, name)} has function-uuid {current.uuid}; drop it before you put another "
                f"function"
            )
        folder = await self._context.choose_location(
            caller, EntryKind.FUNCTION, namespace, name, function_document.function_uuid, None
        )
        if current is None and await self._context.store.count_names(function_document.function_uuid):
            # The UUID identifies the history of an entry, and it decides whether a table's files may be deleted.
            raise BadRequest(f"The function-uuid {function_document.function_uuid} is in use; choose another")
        body = encode_json(document)
        location = f"{folder}/metadata/{self._context.clock.uuid7()}{choose_file_suffix(body, '.function.json')}"
        entry = make_entry(namespace, name, function_document.function_uuid, location, requested_ms, EntryKind.FUNCTION)
        change: list[Operation] = self._context.make_create_operations(caller, entry)
        if current is not None:
            change = [build_pointer_swap(current, location, requested_ms)]
        action = "create" if current is None else "replace"
        claim = await claim_folder(self._context, entry, folder, is_new_uuid=current is None)
        instant = self._context.make_instant(caller, entry, action, requested_ms=requested_ms)
        await self._context.create_and_transact(location, body, [claim, *change, instant])
        return LoadedFunction(entry=entry, document=body)

    async def drop(self, caller: Caller, namespace: NamespacePath, name: str) -> None:
        """Drop a function.

        A dropped function cannot be restored, because a function is one small document that can be stored again.

        Raises:
            NoSuchFunction: The function does not exist.
            CommitConflict: Another request has replaced the function meanwhile.
        """
        requested_ms = self._context.clock.now_ms()
        entry = await self._context.require_entry(EntryKind.FUNCTION, namespace, name)
        drop = DropEntry(
            kind=EntryKind.FUNCTION, namespace=namespace, name=name, expected_location=entry.metadata_location
        )
        try:
            await self._context.transact(
                [drop, self._context.make_instant(caller, entry, "drop", requested_ms=requested_ms)]
            )
        except CommitConflict:
            raise CommitConflict(
                f"{format_path(namespace, name)} was replaced in the meantime; drop it again if you still want to"
            ) from None
