"""All errors that the server raises, in one tree, grouped by what a handler does about them.

    SeamarkError
    ├── RequestError            the client has to change the request; never a 5xx
    │   ├── BadRequest              400  malformed or impossible
    │   │   └── InvalidArgument              Java clients raise IllegalArgumentException
    │   ├── Unauthenticated         401  no identity, or invalid credentials
    │   ├── Forbidden               403  authenticated, but not permitted
    │   ├── NotFound                404
    │   │   ├── NoSuchNamespace
    │   │   ├── NoSuchTable
    │   │   ├── NoSuchView
    │   │   ├── NoSuchFunction
    │   │   ├── NoSuchWarehouse
    │   │   ├── NoSuchPlanId
    │   │   ├── NoSuchPlanTask
    │   │   ├── StreamRemoved            the table's rows in the log were removed with the table
    │   │   └── OffsetOutOfRange         the log no longer has, or does not have yet, the row at an offset
    │   ├── NotAcceptable           406  the requested format cannot represent the answer
    │   ├── ReadOnlyServer          406  this server only reads: another server takes the request
    │   ├── AlreadyExists           409
    │   ├── NamespaceNotEmpty       409
    │   ├── ProducerFenced          409  a later session of the same producer writes
    │   ├── SequenceGap             409  an append does not follow the last append of its producer
    │   ├── RequestTimeout          408  the body took too long to arrive
    │   ├── TooLarge                413
    │   ├── UnsupportedMediaType    415  the server does not support the body's Content-Encoding
    │   ├── Unprocessable           422  well formed, but contradicts itself or an earlier request
    │   └── ClientGone              499  disconnected during its request; only in metrics and logs
    ├── CommitConflict          409  another commit was first: refresh and retry
    ├── CommitUnknown           500  unknown outcome: do not retry blindly, do not clean up
    ├── RetryLater              503  a limit is reached or a component is unavailable; retry later
    │   ├── TooManyRequests         429  a limit of this client is reached
    │   ├── StorageFull                  a disk or database is full; only an operator can free space
    │   │   └── LogFull                  the disk of the log is full
    │   ├── LogUnavailable               the log is closed or has failed
    │   └── CacheDamaged                 a file of the local cache is damaged, and was removed
    ├── StorageError            500  object storage failed, and the client cannot fix it
    │   ├── ObjectMissing                no object exists at the location
    │   └── ObjectExists                 a conditional write found an object
    ├── Corrupt                 500  a stored object is damaged
    └── ConfigError             –    the operator has to change a setting; the server stops

`kind` is stable and part of the API; `code` and `type` are fields of the Iceberg REST error model.
Messages are sent to clients: they state the problem and the solution, and never contain a secret.
"""

from __future__ import annotations

from typing import ClassVar


class SeamarkError(Exception):
    """The base class of all errors.

    Attributes:
        kind: The stable name of the error in the API.
        code: The HTTP status.
        type: The name of the Iceberg exception in the answer.
    """

    kind: ClassVar[str] = "internal"
    code: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(SeamarkError):
    kind = "request"
    code = 400
    type = "BadRequestException"


class BadRequest(RequestError):
    kind = "bad_request"


class InvalidArgument(BadRequest):
    kind = "invalid_argument"
    type = "IllegalArgumentException"


class Unauthenticated(RequestError):
    kind = "unauthenticated"
    code = 401
    type = "NotAuthorizedException"


class Forbidden(RequestError):
    kind = "forbidden"
    code = 403
    type = "ForbiddenException"


class NotFound(RequestError):
    kind = "not_found"
    code = 404
    type = "NotFoundException"


class NoSuchNamespace(NotFound):
    kind = "no_such_namespace"
    type = "NoSuchNamespaceException"


class NoSuchTable(NotFound):
    kind = "no_such_table"
    type = "NoSuchTableException"


class NoSuchView(NotFound):
    kind = "no_such_view"
    type = "NoSuchViewException"


class NoSuchFunction(NotFound):
    kind = "no_such_function"
    type = "NoSuchFunctionException"


class NoSuchWarehouse(NotFound):
    kind = "no_such_warehouse"
    type = "NoSuchWarehouseException"


class NoSuchPlanId(NotFound):
    kind = "no_such_plan_id"
    type = "NoSuchPlanIdException"


class NoSuchPlanTask(NotFound):
    kind = "no_such_plan_task"
    type = "NoSuchPlanTaskException"


class StreamRemoved(NotFound):
    kind = "stream_removed"
    type = "StreamRemovedException"


class OffsetOutOfRange(NotFound):
    kind = "offset_out_of_range"
    type = "OffsetOutOfRangeException"


class NotAcceptable(RequestError):
    kind = "not_acceptable"
    code = 406
    type = "UnsupportedOperationException"


class ReadOnlyServer(RequestError):
    kind = "read_only_server"
    code = 406
    type = "UnsupportedOperationException"


class AlreadyExists(RequestError):
    kind = "already_exists"
    code = 409
    type = "AlreadyExistsException"


class NamespaceNotEmpty(RequestError):
    kind = "namespace_not_empty"
    code = 409
    type = "NamespaceNotEmptyException"


class ProducerFenced(RequestError):
    kind = "producer_fenced"
    code = 409
    type = "ProducerFencedException"


class SequenceGap(RequestError):
    kind = "sequence_gap"
    code = 409
    type = "OutOfOrderSequenceException"


class RequestTimeout(RequestError):
    kind = "request_timeout"
    code = 408
    type = "RequestTimeoutException"


class ClientGone(RequestError):
    kind = "client_gone"
    code = 499
    type = "ClientClosedRequestException"


class TooLarge(RequestError):
    kind = "too_large"
    code = 413
    type = "PayloadTooLargeException"


class UnsupportedMediaType(RequestError):
    kind = "unsupported_media_type"
    code = 415
    type = "UnsupportedMediaTypeException"


class Unprocessable(RequestError):
    kind = "unprocessable"
    code = 422
    type = "UnprocessableEntityException"


class CommitConflict(SeamarkError):
    kind = "commit_conflict"
    code = 409
    type = "CommitFailedException"


class CommitUnknown(SeamarkError):
    kind = "commit_unknown"
    code = 500
    type = "CommitStateUnknownException"


class RetryLater(SeamarkError):
    """A limit is reached, or a component is unavailable.

    Attributes:
        retry_after_s: The value of the Retry-After header, in whole seconds.
    """

    kind = "retry_later"
    code = 503
    type = "ServiceUnavailableException"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyRequests(RetryLater):
    kind = "too_many_requests"
    code = 429
    type = "TooManyRequestsException"


class StorageFull(RetryLater):
    """A disk or database is full.

    Seamark's clients do not repeat the request, because only an operator can free space. Other clients receive a
    temporary error with a time after which they may repeat it.
    """

    kind = "storage_full"
    type = "StorageFullException"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=10)


class LogFull(StorageFull):
    kind = "log_full"


class LogUnavailable(RetryLater):
    kind = "log_unavailable"


class CacheDamaged(RetryLater):
    """A file of the local cache is damaged. The server repeats the read itself."""

    kind = "cache_damaged"


class StorageError(SeamarkError):
    kind = "storage"
    type = "StorageException"


class ObjectMissing(StorageError):
    kind = "object_missing"


class ObjectExists(StorageError):
    kind = "object_exists"


class Corrupt(SeamarkError):
    """A stored object is damaged."""

    kind = "corrupt"
    type = "CorruptMetadataException"

    @classmethod
    def missing(cls, subject: str, location: str) -> Corrupt:
        """Return the error for a file that is not in the storage.

        The message mentions a likely cause: an engine on another machine writes local files to its own disk.

        Args:
            subject: The kind of the file, such as a manifest.
            location: The location of the file.
        """
        hint = "; engines that write file:// locations must run on the server's machine"
        return cls(f"The {subject} {location} is not in the storage{hint if location.startswith('file:') else ''}")


class ConfigError(SeamarkError):
    kind = "config"
    type = "ConfigurationException"
