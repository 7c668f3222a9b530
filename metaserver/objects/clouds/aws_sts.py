"""Requests temporary keys of AWS for one table.

The keys are those of a session of a role. The session has a policy for the table, and AWS grants only the permissions
that are in this policy and in the role's own policies.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

from seamark.formats.runtime.errors import RetryLater, StorageError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.clouds.issued_keys import IssuedKeys
from seamark.metaserver.objects.credentials import load_server_keys
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from botocore import config as aws_config
    from botocore import exceptions as aws_errors
    from botocore import session as aws
else:
    aws = LazyModule("botocore.session")
    aws_config = LazyModule("botocore.config")
    aws_errors = LazyModule("botocore.exceptions")

POLICY_CHARS_MAX = 2048
"""The maximum length of a session policy, which AWS defines."""
_DURATION_MIN_S = 900
"""The minimum duration of a session, which AWS defines."""
_READ = ("s3:GetObject",)
_WRITE = ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
_WILDCARDS = re.compile(r"[*?$]")
_THROTTLED = frozenset(("Throttling", "ThrottlingException", "RequestLimitExceeded", "ServiceUnavailable"))


def assume_role(settings: Settings, table: Location, *, writable: bool) -> IssuedKeys:
    """Request keys that give access to the objects below a table, and to no others.

    Call this function in a thread.

    Raises:
        StorageError: AWS refuses the role, or the location is too long for a policy.
        RetryLater: AWS does not answer.
    """
    policy = make_policy(settings.s3_sts_role, table, writable=writable)
    keys = load_server_keys(settings)
    arguments = {
        "RoleArn": settings.s3_sts_role,
        "RoleSessionName": "seamark",
        "Policy": policy,
        "DurationSeconds": max(_DURATION_MIN_S, settings.cloud_keys_s),
    }
    if settings.s3_sts_external_id:
        arguments["ExternalId"] = settings.s3_sts_external_id
    try:
        with closing(
            aws.Session().create_client(
                "sts",
                region_name=settings.s3_region,
                endpoint_url=settings.s3_sts_endpoint or None,
                aws_access_key_id=keys.access_key_id,
                aws_secret_access_key=keys.secret_access_key,
                aws_session_token=keys.token or None,
                config=aws_config.Config(
                    connect_timeout=min(settings.storage_timeout_s, 5.0),
                    read_timeout=settings.storage_timeout_s,
                    retries={"total_max_attempts": settings.storage_retries + 1, "mode": "standard"},
                ),
            )
        ) as client:
            issued_keys = client.assume_role(**arguments)["Credentials"]
    except aws_errors.ClientError as error:
        raise _explain_error(error, settings.s3_sts_role) from None
    except aws_errors.BotoCoreError:
        raise RetryLater("AWS STS did not answer; try again later") from None
    expires_ms = int(issued_keys["Expiration"].timestamp() * 1000)
    properties = {
        "s3.access-key-id": issued_keys["AccessKeyId"],
        "s3.secret-access-key": issued_keys["SecretAccessKey"],
        "s3.session-token": issued_keys["SessionToken"],
        "s3.session-token-expires-at-ms": str(expires_ms),
    }
    return IssuedKeys(properties, expires_ms)


def make_policy(role: str, table: Location, *, writable: bool) -> str:
    """Return the session policy for the objects below the location of a table.

    Raises:
        StorageError: The policy is too long.
    """
    partition = role.split(":")[1]  # In China and in GovCloud, names begin with another partition than aws.
    bucket = f"arn:{partition}:s3:::{table.bucket}"
    # A policy reads these characters as wildcards unless they are in a variable.
    folder = _WILDCARDS.sub(lambda match: f"${{{match[0]}}}", table.path)
    statements = [
        {"Effect": "Allow", "Action": [*_READ, *(_WRITE if writable else ())], "Resource": f"{bucket}/{folder}/*"},
        {
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": f"{folder}/*"}},
        },
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(policy) > POLICY_CHARS_MAX:
        raise StorageError(
            f"The location {str(table)[:200]!r}… is too long for a session policy of AWS: its policy has {len(policy)} "
            f"characters, and the limit is {POLICY_CHARS_MAX}; use a shorter location, or s3_client_access = gateway"
        )
    return policy


def _explain_error(error: Any, role: str) -> StorageError | RetryLater:
    code = error.response.get("Error", {}).get("Code", "")
    if code in _THROTTLED or error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return RetryLater("AWS STS issues no keys now; try again later")
    if code in ("AccessDenied", "AccessDeniedException"):
        return StorageError(
            f"AWS STS refused the role {role!r}: check that its trust policy names the server's principal, and that "
            "s3_sts_external_id is the external id of this policy"
        )
    if code in ("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "SignatureDoesNotMatch"):
        return StorageError("AWS STS refused the server's keys: they have expired or are wrong; replace them")
    return StorageError(f"AWS STS refused the role {role!r} with the code {code[:100]!r}")
