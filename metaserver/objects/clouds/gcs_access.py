"""Builds the properties of Iceberg's FileIO with which clients and jobs use Google Cloud Storage.

A client gets an access token that Google restricts to the folder of one table (Credential Access Boundary). The
requests are sent by Google's library google-auth, which the extra `gcs` installs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from seamark.formats.runtime.errors import ConfigError, RetryLater, StorageError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.clouds.issued_keys import IssuedKeys
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    import google.auth as google_auth
    from google.auth import downscoped
    from google.auth import exceptions as google_errors
    from google.auth.credentials import Credentials
    from google.auth.transport import requests as google_requests
    from google.oauth2 import service_account
else:
    google_auth = LazyModule("google.auth")
    downscoped = LazyModule("google.auth.downscoped")
    google_errors = LazyModule("google.auth.exceptions")
    google_requests = LazyModule("google.auth.transport.requests")
    service_account = LazyModule("google.oauth2.service_account")

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_READER, _WRITER = "inRole:roles/storage.objectViewer", "inRole:roles/storage.objectUser"


def build_service_properties(settings: Settings) -> dict[str, str]:
    """Return the address of the service for clients, as properties of a FileIO."""
    config = {}
    if settings.gcs_endpoint:
        config["gcs.service.host"] = settings.gcs_endpoint.rstrip("/")
    if is_anonymous(settings):
        config["gcs.no-auth"] = "true"
    return config


def is_anonymous(settings: Settings) -> bool:
    """Return whether the key in the settings is for an emulator, which needs no tokens."""
    return bool(settings.gcs_service_account_key and _parse_key(settings).get("disable_oauth"))


def check_key(settings: Settings) -> None:
    """Check that the key in the settings is a JSON object.

    Raises:
        ConfigError: The key is not a JSON object. The message does not contain the key.
    """
    if settings.gcs_service_account_key:
        _parse_key(settings)


def build_key_properties(settings: Settings) -> dict[str, str]:
    """Return an access token of the server as properties of a FileIO, for processes that the server starts.

    The function may send requests to Google, so call it in a thread. Without a key in the settings, the result is
    empty, and the server and these processes use Google's application default credentials. It is also empty for an
    emulator, which needs no tokens.

    Raises:
        StorageError: Google refuses the token.
        RetryLater: Google does not answer.
    """
    if is_anonymous(settings) or not (settings.gcs_service_account_key or settings.gcs_service_account_file):
        return {}
    with _explain_errors("the server's service account"):
        source = _open_credentials(settings)
        source.refresh(_make_request(settings))
        return _describe_token(source).properties


def restrict_token(settings: Settings, table: Location, *, writable: bool) -> IssuedKeys:
    """Request a token that gives access to the objects below the location of a table, and to no others.

    Call this function in a thread.

    Raises:
        StorageError: Google refuses the token.
        RetryLater: Google does not answer.
    """
    with _explain_errors(f"the table at {str(table)!r}"):
        restricted_credentials = downscoped.Credentials(
            source_credentials=_open_credentials(settings),
            credential_access_boundary=_make_boundary(table, writable=writable),
        )
        # This also refreshes the server's own token, because the restricted token expires with it.
        restricted_credentials.refresh(_make_request(settings))
        return _describe_token(restricted_credentials)


def _make_boundary(table: Location, *, writable: bool) -> downscoped.CredentialAccessBoundary:
    """Return the boundary of a token for one table.

    The condition covers the names of objects, and the prefix of listings. Both end with a slash, so that the token of
    the table `t1` gives no access to `t10`.
    """
    # Strings of Google's condition language (CEL) are escaped in the same way as in JSON.
    objects = json.dumps(f"projects/_/buckets/{table.bucket}/objects/{table.path}/")
    prefix = json.dumps(f"{table.path}/")
    list_prefix = "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
    rule = downscoped.AccessBoundaryRule(
        available_resource=f"//storage.googleapis.com/projects/_/buckets/{table.bucket}",
        available_permissions=[_WRITER if writable else _READER],
        availability_condition=downscoped.AvailabilityCondition(
            f"resource.name.startsWith({objects}) || {list_prefix}.startsWith({prefix})"
        ),
    )
    return downscoped.CredentialAccessBoundary(rules=[rule])


def _make_request(settings: Settings) -> Any:
    return partial(google_requests.Request(), timeout=settings.storage_timeout_s)


def _open_credentials(settings: Settings) -> Any:
    if settings.gcs_service_account_key:
        return service_account.Credentials.from_service_account_info(_parse_key(settings), scopes=_SCOPES)
    if settings.gcs_service_account_file:
        return service_account.Credentials.from_service_account_file(settings.gcs_service_account_file, scopes=_SCOPES)
    return _find_default_credentials()


@lru_cache(maxsize=1)
def _find_default_credentials() -> Any:
    return google_auth.default(scopes=_SCOPES)[0]


def _parse_key(settings: Settings) -> dict[str, Any]:
    try:
        key = json.loads(settings.gcs_service_account_key)
    except ValueError:
        key = None
    if not isinstance(key, dict):
        raise ConfigError("gcs_service_account_key is not a JSON object: set the content of the key's file")
    return key


def _describe_token(credentials: Credentials) -> IssuedKeys:
    """Return a new token as properties of a FileIO."""
    assert credentials.token is not None
    assert credentials.expiry is not None
    # google-auth's times are in UTC, but without a time zone.
    expires_ms = int(credentials.expiry.replace(tzinfo=UTC).timestamp() * 1000)
    properties = {"gcs.oauth2.token": credentials.token, "gcs.oauth2.token-expires-at": str(expires_ms)}
    return IssuedKeys(properties, expires_ms)


@contextmanager
def _explain_errors(subject: str) -> Iterator[None]:
    """Translate errors of google-auth. The messages omit the errors' texts, which may quote secrets.

    Raises:
        StorageError: The library or the credentials are missing or invalid, or Google refuses the token.
        RetryLater: Google does not answer, or issues no token now.
    """
    try:
        yield
    except ImportError:
        raise StorageError("The server lacks the library google-auth: install seamark[gcs]") from None
    except google_errors.TransportError:
        raise RetryLater(f"Google did not answer to the request for a token of {subject}; try again later") from None
    except google_errors.RefreshError as error:
        if error.retryable:
            raise RetryLater(f"Google issues no token for {subject} now; try again later") from None
        raise StorageError(
            f"Google refused a token for {subject}: check the server's service account, and that its key is valid"
        ) from None
    except (google_errors.GoogleAuthError, OSError, ValueError):
        raise StorageError(
            f"The server has no usable credentials of Google for {subject}: set gcs_service_account_file, or Google's "
            "application default credentials"
        ) from None
