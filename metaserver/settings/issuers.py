"""OIDC issuers, which the settings `oidc_…` and the file of `oidc_issuers_file` define."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seamark.formats.runtime.errors import ConfigError
from seamark.formats.runtime.repetitions import find_repeated
from seamark.metaserver.settings.settings import Settings

FIRST_ISSUER_NAME = "oidc"
"""The name of the issuer that the settings `oidc_issuer` and `oidc_audience` define."""
GROUP_SUFFIX = "-group"
"""The suffix of an issuer's name in the principals of its groups: `oidc-group:engineers`."""
RESERVED_NAMES = frozenset(
    {"anonymous", "cert", "cli", "group", "internal", "job", "role", "service", "statement", "table"}
)
ISSUERS_MAX = 32
_FILES_MAX = 8
"""The maximum number of issuer files whose content `_read_file` caches."""
_ISSUER_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


@dataclass(frozen=True, kw_only=True)
class IssuerSettings:
    """An issuer whose JWTs the server accepts.

    Each field is a key of a table `[[issuer]]` in the file of `oidc_issuers_file`.
    """

    name: str
    """The prefix of the issuer's principals: the subject `ann` of the issuer `corp` is the principal `corp:ann`."""
    url: str
    """The value of the claim `iss` in the issuer's tokens."""
    audience: str
    jwks_url: str = ""
    """The URL of the issuer's keys. If it is empty, the issuer's discovery document contains the URL."""
    principal_claim: str = "sub"
    roles_claim: str = ""
    groups_claim: str = ""
    ca_file: str = ""
    """A PEM file with the authorities that sign the certificate of the issuer.

    If it is empty, the authorities of the operating system are used.
    """
    token_file: str = ""
    """A file with a bearer token for requests to the issuer. Kubernetes requires one to read its keys."""

    @property
    def states_rights(self) -> bool:
        """Whether the issuer's tokens contain rights that are not in the database: roles or groups."""
        return bool(self.roles_claim or self.groups_claim)


def is_issuer_name(name: str) -> bool:
    """Return whether `name` is valid for an issuer and is not reserved for other kinds of principals."""
    return bool(_ISSUER_NAME.fullmatch(name)) and name not in RESERVED_NAMES and not name.endswith(GROUP_SUFFIX)


_KEYS = {field.name: field for field in dataclasses.fields(IssuerSettings)}


def read_issuers(settings: Settings) -> tuple[IssuerSettings, ...]:
    """Return the issuers that the settings and the file of `oidc_issuers_file` define.

    Raises:
        ConfigError: The file cannot be read, an issuer is invalid, or two issuers have the same name or URL.
    """
    issuers = []
    if settings.oidc_issuer:
        issuers.append(
            IssuerSettings(
                name=FIRST_ISSUER_NAME,
                url=settings.oidc_issuer,
                audience=settings.oidc_audience,
                jwks_url=settings.oidc_jwks_url,
                principal_claim=settings.oidc_principal_claim,
                roles_claim=settings.oidc_roles_claim,
                groups_claim=settings.oidc_groups_claim,
            )
        )
    if settings.oidc_issuers_file:
        path = Path(settings.oidc_issuers_file)
        issuers += _read_file(path, _identify_content(path))
    for attribute in ("name", "url"):
        if (value := find_repeated(getattr(issuer, attribute) for issuer in issuers)) is not None:
            raise ConfigError(f"Two OIDC issuers have the {attribute} {value!r}: remove one of them")
    return tuple(issuers)


def _identify_content(path: Path) -> tuple[int, int, int]:
    """Return the numbers that identify the file's content: they change when the file is replaced.

    If the file cannot be read, all numbers are 0.
    """
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


@lru_cache(maxsize=_FILES_MAX)
def _read_file(path: Path, content_id: tuple[int, int, int]) -> tuple[IssuerSettings, ...]:
    """Return the issuers of a file. The result is cached, because several components read the same file.

    Args:
        path: The file.
        content_id: The numbers of `_identify_content`; they are a part of the cache key.

    Raises:
        ConfigError: The file cannot be read, or an issuer is invalid.
    """
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"Cannot read the file {path} of oidc_issuers_file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file {path} of oidc_issuers_file is not valid TOML: {error}") from None
    tables = document.pop("issuer", None)
    if document or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"The file {path} of oidc_issuers_file must contain only tables [[issuer]]")
    if len(tables) > ISSUERS_MAX:
        raise ConfigError(f"The file {path} has {len(tables)} issuers; the server accepts at most {ISSUERS_MAX}")
    return tuple(_read_issuer(table, f"issuer {number} of {path}") for number, table in enumerate(tables, 1))


def _read_issuer(table: dict[str, Any], source: str) -> IssuerSettings:
    """Check a table `[[issuer]]`, and return the issuer.

    Raises:
        ConfigError: A key is unknown or missing, or a value is invalid.
    """
    for key, value in table.items():
        if key not in _KEYS:
            similar_keys = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {similar_keys[0]!r}?" if similar_keys else f"the keys are {', '.join(_KEYS)}"
            raise ConfigError(f"The key {key!r} of {source} is unknown; {hint}")
        if not isinstance(value, str) or not value.isprintable():
            raise ConfigError(f"The key {key!r} of {source} must be text without line breaks; {value!r} is not")
    for key in ("name", "url", "audience"):
        if not table.get(key):
            raise ConfigError(f"The key {key!r} of {source} is missing: set it")
    name = table["name"]
    if not is_issuer_name(name):
        raise ConfigError(
            f"The name of {source} must be 1 to 32 lowercase letters, digits and hyphens. It must begin with a letter, "
            f"must not end with {GROUP_SUFFIX}, and must not be one of {', '.join(sorted(RESERVED_NAMES))}; {name!r} "
            "is not valid"
        )
    for key in ("url", "jwks_url"):
        parts = urlsplit(table.get(key, ""))
        if table.get(key) and (parts.scheme not in ("https", "http") or not parts.hostname):
            raise ConfigError(f"The key {key!r} of {source} must be a URL of http or https; {table[key]!r} is not")
    if not table.get("principal_claim", "sub"):
        raise ConfigError(f"The key 'principal_claim' of {source} is empty: remove it to use sub")
    return IssuerSettings(**table)
