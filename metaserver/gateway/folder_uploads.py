"""Multipart uploads to a local folder. Each upload is a folder of parts next to the buckets, which all workers share.

The name of an upload's folder contains two hashes. The hash of the object's location makes an upload id invalid for
other keys. The hash of the principal that created the upload is used to count the uploads of each principal. The names
of a further warehouse also end with a hash of its name, so that each warehouse has its own limit. Uploads
that are neither completed nor aborted are deleted after a time without changes. The functions block, and are called in
threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import msgspec
from aiohttp import web

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import RetryLater, TooManyRequests
from seamark.formats.runtime.root_folder import FOLDER_FLAGS, READ_FLAGS
from seamark.metaserver.gateway.answers import (
    build_xml_element,
    format_timestamp,
    make_document,
    make_xml_response,
    name_object,
)
from seamark.metaserver.gateway.backend import S3Call
from seamark.metaserver.gateway.folder_files import FileInfo, Staging, copy_bytes, make_etag
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.objects.folder import UPLOADS
from seamark.metaserver.objects.local import LocalPlace

PARTS_MAX = 10_000
PART_BYTES_MIN = 5 << 20
"""The minimum size of each part except the last, as in S3."""
_TAGS_MAX = 20 * PARTS_MAX
"""The maximum number of tags in the XML that lists the parts.

An element has two tags, and a part has elements for its number, its ETag and checksums.
"""
_LOCATION_DIGITS, _NAME_DIGITS = 32, 16
"""The numbers of digits of the hashes of a location, and of the name of a principal or warehouse."""
_UPLOAD_ID = re.compile("[0-9a-f]{48}")
"""Matches an upload id: 32 random digits, and 16 digits of the creator's hash."""
_UPLOAD_NAME = re.compile("[0-9a-f]{32}-[0-9a-f]{48}(?P<warehouse>(?:-[0-9a-f]{16})?)")
_PART_NUMBER = re.compile("[0-9]{1,9}")
_HEADERS_NAME = "headers"
_PARTS_PER_PAGE_MAX = 1000
_MARKER_DIGITS_MAX = 10
_MAX_PARTS_DIGITS = 9
"""The number of digits that are read of `max-parts`. A longer number is above `_PARTS_PER_PAGE_MAX` in any case."""
_XMLNS = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True, slots=True)
class Part:
    number: int
    name: str
    size: int
    modified_ns: int
    etag: str


class Uploads:
    def __init__(self, staging: Staging, *, limit: int, abandoned_s: float, warehouse_name: str = "") -> None:
        """Manage the uploads of a warehouse in a folder, which warehouses can share.

        Args:
            staging: The staged files of the folder.
            limit: The approximate maximum number of uploads of the warehouse.
            abandoned_s: The time without changes after which an upload is abandoned.
            warehouse_name: The name of a further warehouse, or an empty text for the server's own warehouse.
        """
        self._staging = staging
        self._limit = limit
        self._abandoned_s = abandoned_s
        self._suffix = (
            f"-{hashlib.sha256(warehouse_name.encode()).hexdigest()[:_NAME_DIGITS]}" if warehouse_name else ""
        )

    def create(
        self, location: str, secret: bytes, principal_name: str, share_divisor: int, headers: Mapping[str, str]
    ) -> str:
        """Create an upload, and return its id.

        Args:
            location: The location of the object.
            secret: Random bytes for the id.
            principal_name: The principal that creates the upload.
            share_divisor: One principal may have the maximum number of uploads, divided by this number.
            headers: The headers that reads of the object return.

        Raises:
            RetryLater: The warehouse has too many uploads.
            TooManyRequests: The principal has too many uploads.
        """
        owner = hashlib.sha256(principal_name.encode("utf-8", "surrogatepass")).hexdigest()[:_NAME_DIGITS]
        matches = (_UPLOAD_NAME.fullmatch(name) for name in self._list_names())
        names = [matched[0] for matched in matches if matched is not None and matched["warehouse"] == self._suffix]
        if len(names) >= self._limit:
            raise RetryLater(
                f"The store has {self._limit} unfinished uploads; complete or abort some", retry_after_s=60
            )
        principal_limit = self._limit // share_divisor
        if sum(name.endswith(owner + self._suffix) for name in names) >= max(1, principal_limit):
            raise TooManyRequests(
                f"{principal_name[:100]} has {principal_limit} unfinished uploads, the limit of a principal; complete "
                "or abort some"
            )
        upload_id = secret.hex() + owner
        name = self._make_name(location, upload_id)
        self._staging.make_folder(name)
        descriptor = self._open(f"{name}/{_HEADERS_NAME}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(dict(headers)))
        return upload_id

    def _open(self, name: str, flags: int) -> int:
        """Return a descriptor of a file or folder in the folder of staged files."""
        return self._staging.root.open(f"{UPLOADS}/{name}" if name else UPLOADS, flags)

    def _list_names(self) -> list[str]:
        try:
            with _close_after(self._open("", FOLDER_FLAGS)) as folder:
                return os.listdir(folder)
        except FileNotFoundError:
            return []

    def _delete_folder(self, name: str) -> None:
        with _close_after(self._open("", FOLDER_FLAGS)) as uploads:
            shutil.rmtree(name, ignore_errors=True, dir_fd=uploads)

    def check(self, location: str, upload_id: str) -> None:
        """Check that the upload exists.

        Raises:
            S3Error: NoSuchUpload if it does not exist.
        """
        os.close(self._open_existing(location, upload_id))

    def add_part(self, location: str, upload_id: str, number: int, staged_name: str) -> str:
        """Add the staged file to the upload as a part, and return its ETag.

        Raises:
            S3Error: NoSuchUpload if the upload does not exist.
        """
        name = f"{number:05d}"
        try:
            with (
                _close_after(self._open_existing(location, upload_id)) as folder,
                _close_after(self._open("", FOLDER_FLAGS)) as uploads,
            ):
                os.rename(staged_name, name, src_dir_fd=uploads, dst_dir_fd=folder)
                return make_etag(os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            raise _make_missing_error() from None

    def list_parts(self, location: str, upload_id: str) -> list[Part]:
        """Return the parts in the order of their numbers.

        Raises:
            S3Error: NoSuchUpload if the upload does not exist.
        """
        try:
            with _close_after(self._open_existing(location, upload_id)) as folder, os.scandir(folder) as entries:
                part_files = [
                    (entry.name, entry.stat(follow_symlinks=False)) for entry in entries if entry.name.isdigit()
                ]
        except FileNotFoundError:
            raise _make_missing_error() from None
        parts = [
            Part(int(name), name, status.st_size, status.st_mtime_ns, make_etag(status)) for name, status in part_files
        ]
        return sorted(parts, key=lambda part: part.number)

    def complete(
        self,
        location: str,
        upload_id: str,
        part_etags: list[tuple[int, str]],
        target: LocalPlace,
        conditions: Mapping[str, str],
    ) -> FileInfo:
        """Publish the object at `target`, which consists of the parts of an upload. Then delete the upload.

        Args:
            location: The location of the object.
            upload_id: The id of the upload.
            part_etags: The number and the ETag of each part.
            target: The place of the object in the folder.
            conditions: The headers of the request, which may contain conditions of the write.

        Raises:
            S3Error: NoSuchUpload if the upload does not exist, PreconditionFailed if a condition is false, or another
                error if the list of parts is invalid.
        """
        upload = self._make_name(location, upload_id)
        parts = choose_parts(part_etags, {part.number: part for part in self.list_parts(location, upload_id)})
        staged_name = f"{upload_id}-{os.getpid():x}-{os.urandom(8).hex()}"
        try:
            with _close_after(self._staging.open_new(staged_name)) as descriptor:
                for part in parts:
                    with _close_after(self._open(f"{upload}/{part.name}", READ_FLAGS)) as source:
                        copy_bytes(source, descriptor, 0, part.size)
                with open(self._open(f"{upload}/{_HEADERS_NAME}", READ_FLAGS), "rb") as file:
                    headers = convert_json(file.read(), dict[str, str])
                self._staging.store_headers_and_sync(descriptor, headers)
            published_file = self._staging.publish(staged_name, target, conditions)
        except FileNotFoundError:
            raise _make_missing_error() from None
        finally:
            self._staging.discard(staged_name)
        self._delete_folder(upload)
        return published_file

    def abort(self, location: str, upload_id: str) -> None:
        self.check(location, upload_id)
        self._delete_folder(self._make_name(location, upload_id))

    def delete_abandoned(self, now_s: float) -> None:
        """Delete uploads and staged files that have not changed for `abandoned_s`."""
        with contextlib.suppress(FileNotFoundError), _close_after(self._open("", FOLDER_FLAGS)) as uploads:
            for name in os.listdir(uploads):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=uploads, follow_symlinks=False)
                    # The file `lock` serialises the writers of all processes, and never changes.
                    if name != "lock" and now_s - status.st_mtime > self._abandoned_s:
                        if stat.S_ISDIR(status.st_mode):
                            shutil.rmtree(name, ignore_errors=True, dir_fd=uploads)
                        else:
                            os.unlink(name, dir_fd=uploads)

    def _open_existing(self, location: str, upload_id: str) -> int:
        """Return an open descriptor of the upload's folder.

        Raises:
            S3Error: NoSuchUpload if the upload does not exist.
        """
        try:
            return self._open(self._make_name(location, upload_id), FOLDER_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise _make_missing_error() from None

    def _make_name(self, location: str, upload_id: str) -> str:
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise _make_missing_error()
        location_hash = hashlib.sha256(location.encode("utf-8", "surrogatepass")).hexdigest()[:_LOCATION_DIGITS]
        return f"{location_hash}-{upload_id}{self._suffix}"


def read_part_number(text: str | None) -> int:
    if text is None or not _PART_NUMBER.fullmatch(text) or not 1 <= int(text) <= PARTS_MAX:
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {PARTS_MAX}, inclusive")
    return int(text)


def parse_complete_multipart_upload(document: bytes) -> list[tuple[int, str]]:
    """Return the number and the ETag of each part in the XML of CompleteMultipartUpload.

    Raises:
        S3Error: MalformedXML if the XML is invalid, declares types or entities, or lists no parts or too many parts.
    """
    try:
        # Decode the document before searching for "<!", because the parser would use the encoding that the document
        # declares, in which these characters may have different bytes.
        text = document.decode("utf-8")
    except UnicodeDecodeError:
        raise S3Error("MalformedXML", "The XML is not UTF-8") from None
    if "<!" in text or "\x00" in text:
        raise S3Error("MalformedXML", "The XML must not declare types or entities")
    if text.count("<") > _TAGS_MAX:  # Parsing an element takes a microsecond and 200 bytes, on the event loop.
        raise S3Error("MalformedXML", f"The XML has more elements than {PARTS_MAX} parts need")
    try:
        root = ElementTree.fromstring(text)  # noqa: S314  without <! there are no entities to expand
        if root.tag.removeprefix(_XMLNS) != "CompleteMultipartUpload":
            raise ValueError
        parts = [{child.tag.removeprefix(_XMLNS): child.text or "" for child in part} for part in root]
        part_etags = [(int(part["PartNumber"]), part["ETag"].strip('"')) for part in parts]
    except (ElementTree.ParseError, ValueError, KeyError):
        raise S3Error("MalformedXML", "The XML you provided was not well-formed or did not validate") from None
    if not 0 < len(part_etags) <= PARTS_MAX:
        raise S3Error("MalformedXML", f"The XML must list 1 to {PARTS_MAX} parts")
    return part_etags


def choose_parts(part_etags: list[tuple[int, str]], parts_by_number: Mapping[int, Part]) -> list[Part]:
    numbers = [number for number, _ in part_etags]
    if numbers != sorted(set(numbers)):
        raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order")
    selected_parts = []
    for number, etag in part_etags:
        part = parts_by_number.get(number)
        if part is None or part.etag.strip('"') != etag:
            raise S3Error("InvalidPart", f"The part {number} was not uploaded, or has another ETag")
        selected_parts.append(part)
    if any(part.size < PART_BYTES_MIN for part in selected_parts[:-1]):
        raise S3Error("EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
    return selected_parts


def _make_missing_error() -> S3Error:
    return S3Error("NoSuchUpload", "The specified multipart upload does not exist")


@contextlib.contextmanager
def _close_after(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def answer_part_list(parts: Sequence[Part], call: S3Call) -> web.Response:
    """Return the answer to ListParts: the page of parts that the query of the request selects.

    Raises:
        S3Error: A number in the query is invalid.
    """
    query = call.address.query
    marker, max_parts = query.get("part-number-marker", "0"), query.get("max-parts", str(_PARTS_PER_PAGE_MAX))
    if (
        not (f"{marker}{max_parts}".isascii() and marker.isdigit() and max_parts.isdigit())
        or len(marker) > _MARKER_DIGITS_MAX
    ):
        raise S3Error("InvalidArgument", "max-parts and part-number-marker must be numbers")
    # Convert only the first digits of `max_parts`. A longer number exceeds the maximum of a page anyway.
    limit = min(int(max_parts[:_MAX_PARTS_DIGITS]), _PARTS_PER_PAGE_MAX)
    later_parts = [part for part in parts if part.number > int(marker)]
    page = later_parts[:limit]
    elements = [
        name_object(call),
        build_xml_element("UploadId", query["uploadId"]),
        build_xml_element("PartNumberMarker", marker),
        build_xml_element("NextPartNumberMarker", str(page[-1].number if page else 0)),
        build_xml_element("MaxParts", str(limit)),
        build_xml_element("IsTruncated", str(len(later_parts) > len(page)).lower()),
    ]
    for part in page:
        fields = [
            build_xml_element("PartNumber", str(part.number)),
            build_xml_element("LastModified", format_timestamp(part.modified_ns)),
            build_xml_element("ETag", part.etag),
            build_xml_element("Size", str(part.size)),
        ]
        elements.append(f"<Part>{''.join(fields)}</Part>")
    return make_xml_response(make_document("ListPartsResult", "".join(elements)), call)
