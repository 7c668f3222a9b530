"""Every error the server raises on purpose, in one tree, grouped by what the one who catches it would do.

    SeamarkError
    ├── RequestError            the client's to mend: never retried unchanged, never a 5xx
    │   ├── BadRequest              400  malformed or impossible
    │   │   └── InvalidArgument              as Java clients expect to rethrow it: IllegalArgumentException
    │   ├── Unauthenticated         401  no identity, or one that is not believed
    │   ├── Forbidden               403  known, but not allowed
    │   ├── NotFound                404
    │   │   ├── NoSuchNamespace
    │   │   ├── NoSuchTable
    │   │   ├── NoSuchView
    │   │   ├── NoSuchFunction
    │   │   ├── NoSuchWarehouse
    │   │   ├── NoSuchPlanId
    │   │   └── NoSuchPlanTask
    │   ├── NotAcceptable           406  an answer in the asked form does not exist
    │   ├── AlreadyExists           409
    │   ├── NamespaceNotEmpty       409
    │   ├── RequestTimeout          408  the body took too long to arrive
    │   ├── TooLarge                413
    │   ├── UnsupportedMediaType    415  the body's Content-Encoding is none that is read here
    │   ├── Unprocessable           422  well formed, but contradicts itself or an earlier request
    │   └── ClientGone              499  left before its request had arrived; seen in metrics and logs only
    ├── CommitConflict          409  somebody else was first: refresh and retry
    ├── CommitUnknown           500  the outcome could not be learned: neither retry blindly nor clean up
    ├── RetryLater              503  a bound was met or a part is away: the same request may succeed later
    │   └── TooManyRequests         429  a bound of this client's own was met
    ├── StorageError            500  object storage failed in a way the client cannot mend
    │   ├── ObjectMissing                nothing is stored at that location
    │   └── ObjectExists                 a conditional write found something there
    ├── Corrupt                 500  something stored does not read back as what it should be
    └── ConfigError             –    the operator's to mend: the server does not start

`kind` is stable and part of the API; `code` and `type` are what the Iceberg REST error model carries.
Messages are shown to clients: they name what was wrong and what to do, and never carry a secret.
"""

from __future__ import annotations

from typing import ClassVar


class SeamarkError(Exception):
    """Base of the tree. `code` is the HTTP status, `type` the Iceberg exception name on the wire."""

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


class NotAcceptable(RequestError):
    kind = "not_acceptable"
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
    """`retry_after_s` becomes the Retry-After header, in whole seconds."""

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


class StorageError(SeamarkError):
    kind = "storage"
    type = "StorageException"


class ObjectMissing(StorageError):
    kind = "object_missing"


class ObjectExists(StorageError):
    kind = "object_exists"


class Corrupt(SeamarkError):
    kind = "corrupt"
    type = "CorruptMetadataException"


class ConfigError(SeamarkError):
    kind = "config"
    type = "ConfigurationException"
