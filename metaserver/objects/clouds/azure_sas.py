"""Issues shared access signatures (SAS) of Azure for the folder of one table.

A user-delegation SAS is signed with a key that Azure issues to the server's application or identity. The server
requests that key once a day for each account, and then signs each SAS without a request. With an account key in the
settings, the SAS is a service SAS, which is signed with the account key. The requests and the signatures are made by
Microsoft's libraries, which the extra `azure` installs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater, StorageError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.storage.azure import split_bucket
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.clouds.azure import get_blob_endpoint
from seamark.metaserver.objects.clouds.issued_keys import IssuedKeys
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from azure import identity
    from azure.core import exceptions as azure_errors
    from azure.core.credentials import TokenCredential
    from azure.storage import filedatalake
else:
    identity = LazyModule("azure.identity")
    azure_errors = LazyModule("azure.core.exceptions")
    filedatalake = LazyModule("azure.storage.filedatalake")

DELEGATION_KEY_S = 86_400
"""The lifetime of a user-delegation key. Azure's limit is seven days."""
_READER, _WRITER = "rl", "racwdl"
"""Permissions in Azure's order: read, add, create, write, delete, list."""
_CONNECT_TIMEOUT_S = 5.0
_BACKOFF_S = 1
_CLOCK_DIFFERENCE_S = 300
"""The number of seconds before its issue from which a SAS is valid.

The clocks of the server and of Azure may differ by this time.
"""


@dataclass(frozen=True, slots=True)
class _DelegationKey:
    key: filedatalake.UserDelegationKey = field(repr=False)
    expires_ms: int


class SasIssuer:
    """Issues shared access signatures. Its methods may block, so call them in threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delegation_keys: dict[tuple[str, str, str], _DelegationKey] = {}
        self._lock = threading.Lock()

    def issue(self, settings: Settings, table: Location, *, writable: bool) -> IssuedKeys:
        """Return a shared access signature (SAS) for the objects below a location, as properties of a FileIO.

        Raises:
            StorageError: Azure refuses the server's application or identity, or a library is not installed.
            RetryLater: Azure does not answer.
        """
        container, account, host = split_bucket(table.bucket)
        now_ms = self._clock.now_ms()
        expires_ms = compute_expiry_ms(settings, now_ms)
        with _explain_errors(account):
            # The validity begins earlier than now, because Azure's clock may be behind the clock of the server.
            sas = filedatalake.generate_directory_sas(
                account,
                container,
                table.path,
                credential=settings.azure_account_key or self._find_delegation_key(settings, table, expires_ms),
                permission=_WRITER if writable else _READER,
                start=_make_time(now_ms - _CLOCK_DIFFERENCE_S * 1000),
                expiry=_make_time(expires_ms),
                protocol="https,http" if settings.azure_endpoint.startswith("http:") else "https",
            )
        properties = {
            # Java looks for the name with the host, and PyIceberg for the name without it.
            f"adls.sas-token.{host}": sas,
            f"adls.sas-token-expires-at-ms.{host}": str(expires_ms),
            "adls.sas-token": sas,
        }
        return IssuedKeys(properties, expires_ms)

    def _find_delegation_key(
        self, settings: Settings, table: Location, needed_ms: int
    ) -> filedatalake.UserDelegationKey:
        """Return a user-delegation key that is valid until `needed_ms` or longer.

        Raises:
            RetryLater: Another thread still waits for a key.
            AzureError: Azure refuses the key, or does not answer.
        """
        endpoint = get_blob_endpoint(table.bucket, settings)
        cache_key = endpoint, settings.azure_tenant_id, settings.azure_client_id
        # Another thread holds the lock while it waits for Azure.
        if not self._lock.acquire(timeout=settings.storage_timeout_s):
            raise RetryLater("The server still waits for a user-delegation key of Azure; try again later")
        try:
            current = self._delegation_keys.get(cache_key)
            if current is None or current.expires_ms < needed_ms:
                now_ms = self._clock.now_ms()
                expires_ms = max(needed_ms, now_ms + DELEGATION_KEY_S * 1000)
                starts_ms = now_ms - _CLOCK_DIFFERENCE_S * 1000
                # Azure's default waits for more than a minute in total, and a client that loads a table would wait too.
                retries = filedatalake.LinearRetry(
                    backoff=_BACKOFF_S, retry_total=settings.storage_retries, random_jitter_range=_BACKOFF_S
                )
                with filedatalake.DataLakeServiceClient(
                    endpoint,
                    credential=open_credential(settings),
                    retry_policy=retries,
                    connection_timeout=min(settings.storage_timeout_s, _CONNECT_TIMEOUT_S),
                    read_timeout=settings.storage_timeout_s,
                ) as client:
                    delegation_key = client.get_user_delegation_key(_make_time(starts_ms), _make_time(expires_ms))
                current = self._delegation_keys[cache_key] = _DelegationKey(delegation_key, expires_ms)
            return current.key
        finally:
            self._lock.release()


def open_credential(settings: Settings) -> TokenCredential:
    """Return the credential of the application in the settings, or else Azure's default credential.

    Azure's default credential comes from environment variables or from the identity of the machine.
    """
    if settings.azure_client_id:
        return identity.ClientSecretCredential(
            settings.azure_tenant_id, settings.azure_client_id, settings.azure_client_secret
        )
    return identity.DefaultAzureCredential()


def compute_expiry_ms(settings: Settings, now_ms: int) -> int:
    """Return the time at which a SAS that is issued now expires.

    This time is a multiple of half of the lifetime. So all answers of the same period have the same SAS, and a SAS is
    valid for at least half of the lifetime.
    """
    half_lifetime_ms = settings.cloud_keys_s * 1000 // 2
    return (now_ms // half_lifetime_ms + 2) * half_lifetime_ms


def _make_time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds // 1000, UTC)


@contextmanager
def _explain_errors(account: str) -> Iterator[None]:
    """Translate errors of Azure's libraries. The messages omit the errors' texts, which may quote requests.

    Raises:
        StorageError: The libraries or the account key are missing or invalid, or Azure refuses the request.
        RetryLater: Azure does not answer, or issues no keys now.
    """
    try:
        yield
    except ImportError:
        raise StorageError("The server lacks Azure's libraries: install seamark[azure]") from None
    except azure_errors.ClientAuthenticationError:
        raise StorageError(
            f"Azure refused the server's application or identity for the account {account!r}: check azure_tenant_id, "
            "azure_client_id and azure_client_secret, or the identity of the machine"
        ) from None
    except azure_errors.HttpResponseError as error:
        if error.status_code in (401, 403):
            raise StorageError(
                f"Azure issues the server no user-delegation key of the account {account!r}: give it the role Storage "
                "Blob Delegator or Storage Blob Data Contributor on the account"
            ) from None
        if error.status_code in (429, 500, 502, 503, 504):
            raise RetryLater(f"The Azure account {account!r} issues no keys now; try again later") from None
        raise StorageError(
            f"Azure refused a user-delegation key of the account {account!r} with the status {error.status_code}"
        ) from None
    except azure_errors.AzureError:
        raise RetryLater(f"Azure did not answer for the account {account!r}; try again later") from None
    except ValueError:
        raise StorageError(f"azure_account_key is not a key of the account {account!r}: copy it again") from None
