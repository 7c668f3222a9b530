"""Loads the server's own S3 keys from the settings, or else from AWS's default credential chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from seamark.formats.runtime.errors import StorageError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from botocore import exceptions as aws_errors
    from botocore import session as aws
else:
    aws = LazyModule("botocore.session")
    aws_errors = LazyModule("botocore.exceptions")


@dataclass(frozen=True, slots=True)
class S3Keys:
    """The keys of an S3 client.

    `token` is a session token, or empty for keys without a session. The secrets are not part of repr, so logs and
    tracebacks do not contain them.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class VendedKeys(S3Keys):
    """The keys with which a client uses the objects gateway."""

    expires_ms: int = 0


def load_server_keys(settings: Settings) -> S3Keys:
    """Return the current keys for signing.

    Keys of AWS's chain are refreshed over HTTP when they expire. So call this function in a thread if the settings
    have no keys.

    Raises:
        StorageError: The server has no keys.
    """
    if settings.s3_access_key_id:
        return S3Keys(settings.s3_access_key_id, settings.s3_secret_access_key)
    credentials = _make_chain()
    if credentials is None:
        raise StorageError(
            "The server has no S3 keys: set s3_access_key_id and s3_secret_access_key, or AWS's environment variables"
        )
    current_credentials = credentials.get_frozen_credentials()
    return S3Keys(current_credentials.access_key, current_credentials.secret_key, current_credentials.token or "")


def build_key_properties(settings: Settings) -> dict[str, str]:
    """Return the server's keys as properties of a FileIO, for processes that the server starts.

    Call this function in a thread, because keys of AWS's chain are refreshed over HTTP.

    Raises:
        StorageError: The server has no keys, or AWS's credential chain fails.
    """
    try:
        keys = load_server_keys(settings)
    except aws_errors.BotoCoreError as error:
        raise StorageError(f"AWS's credential chain gives the server no S3 keys: {error}") from None
    properties = {"s3.access-key-id": keys.access_key_id, "s3.secret-access-key": keys.secret_access_key}
    return {**properties, "s3.session-token": keys.token} if keys.token else properties


@cache
def _make_chain() -> Any:
    return aws.Session().get_credentials()
