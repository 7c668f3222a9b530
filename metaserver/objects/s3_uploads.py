"""Lists and aborts unfinished multipart uploads of S3, which obstore does not support.

This module uses botocore in threads. The requests are rare, so the client and its library are loaded at their first
use. If a store does not support or permit the listing of uploads (`s3:ListBucketMultipartUploads`), StorageError
is raised. MinIO lists uploads only for a complete key, not for a prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import structlog

from seamark.formats.runtime.errors import RetryLater, SeamarkError, StorageError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.credentials import load_server_keys
from seamark.metaserver.objects.port import Upload
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from botocore import config as aws_config
    from botocore import exceptions as aws_errors
    from botocore import session as aws
else:
    aws, aws_config = LazyModule("botocore.session"), LazyModule("botocore.config")
    aws_errors = LazyModule("botocore.exceptions")

_log = structlog.get_logger("seamark.objects")
_UPLOADS_PER_PAGE = 1000
_NO_SUCH_UPLOAD = "NoSuchUpload"
_SERVER_ERROR_STATUS_MIN = 500
"""The lowest HTTP status of errors that may be temporary."""


async def list_uploads(folder: Location, settings: Settings) -> AsyncIterator[Upload]:
    """Yield the unfinished uploads of objects below a folder.

    Raises:
        RetryLater: The store does not answer now.
        StorageError: The store refuses the request.
    """
    with closing(await asyncio.to_thread(_open_client, settings)) as client:
        marker: dict[str, str] = {}
        while True:
            prefix = f"{folder.path}/" if folder.path else ""
            options = {"Bucket": folder.bucket, "Prefix": prefix, "MaxUploads": _UPLOADS_PER_PAGE, **marker}
            page = await asyncio.to_thread(_call_s3, client.list_multipart_uploads, str(folder), **options)
            for upload in page.get("Uploads", ()):
                begun_ms = int(upload["Initiated"].timestamp() * 1000)
                yield Upload(f"{folder.root()}/{upload['Key']}", upload["UploadId"], begun_ms)
            # Omit the marker of the upload, because some servers refuse it. If the last key of a page has several
            # uploads, a later listing shows the others after the uploads of this page are aborted.
            next_marker = {"KeyMarker": page.get("NextKeyMarker") or ""}
            if not page.get("IsTruncated") or next_marker in (marker, {"KeyMarker": ""}):
                return
            marker = next_marker


async def abort_s3_uploads(uploads: Sequence[tuple[Upload, Location]], settings: Settings) -> int:
    """Abort the uploads, and return the number of uploads that no longer exist.

    The function logs failures. After a failure that may be temporary, it does not try the other uploads, because each
    could take as long as all retries.
    """

    def run() -> int:
        aborted_count = 0
        with closing(_open_client(settings)) as client:
            for upload, location in uploads:
                options = {"Bucket": location.bucket, "Key": location.path, "UploadId": upload.id}
                try:
                    _call_s3(client.abort_multipart_upload, upload.location, **options)
                except SeamarkError as error:
                    _log.warning("upload not aborted", location=upload.location, reason=error.message)
                    if isinstance(error, RetryLater):
                        break
                else:
                    aborted_count += 1
        return aborted_count

    return await asyncio.to_thread(run)


def _open_client(settings: Settings) -> Any:
    """Return a client of S3. It waits at most 5 s for a connection, even if an answer may take longer.

    Raises:
        StorageError: The settings or the environment of the client are invalid.
    """
    explicit_keys = {}
    if settings.s3_access_key_id:  # Otherwise, the client gets keys from AWS's chain, and refreshes them.
        keys = load_server_keys(settings)
        explicit_keys = {"aws_access_key_id": keys.access_key_id, "aws_secret_access_key": keys.secret_access_key}
    timeout_s = settings.storage_timeout_s
    try:
        return aws.Session().create_client(
            "s3",
            region_name=settings.s3_region,
            endpoint_url=settings.s3_endpoint or None,
            **explicit_keys,
            config=aws_config.Config(
                s3={"addressing_style": "path" if settings.s3_path_style else "virtual"},
                connect_timeout=min(timeout_s, 5.0),
                read_timeout=timeout_s,
                retries={"total_max_attempts": settings.storage_retries + 1},
                user_agent="seamark",
            ),
        )
    except aws_errors.BotoCoreError as error:  # For example, the environment names an unknown profile.
        raise StorageError(f"The client for unfinished uploads cannot be created: {error}") from error


def _call_s3(request: Any, location: str, **options: Any) -> dict[str, Any]:
    """Send a request to S3, and return the answer.

    The answer is empty if the upload no longer exists, because another client has completed or aborted it.

    Raises:
        StorageError: S3 refuses the request.
        RetryLater: S3 cannot answer now.
    """
    try:
        answer: dict[str, Any] = request(**options)
    except aws_errors.ClientError as error:
        code, status = error.response["Error"].get("Code"), error.response["ResponseMetadata"]["HTTPStatusCode"]
        if code == _NO_SUCH_UPLOAD:
            return {}
        raise _make_error(
            location, f"{code} (status {status})", is_temporary=status >= _SERVER_ERROR_STATUS_MIN
        ) from error
    except aws_errors.BotoCoreError as error:
        raise _make_error(location, type(error).__name__, is_temporary=True) from error
    return answer


def _make_error(location: str, reason: str, *, is_temporary: bool) -> SeamarkError:
    if is_temporary:
        return RetryLater(f"S3 did not answer for the uploads of {location!r}, try again later: {reason}")
    return StorageError(f"S3 refused the uploads of {location!r}: {reason}")
