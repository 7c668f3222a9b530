"""Rules that map the names in a client certificate to a principal, its groups and its roles.

A rule has a pattern for one kind of name, such as `spiffe://lake.example/ns/{namespace}/sa/{account}` for a URI. A part
in braces matches one or more characters up to the next separator of this kind of name (`/` in a URI, `.` in a DNS name,
`@` in an e-mail address). A pattern matches only a whole name. So a name that continues after the pattern never
matches, as it could with a regular expression.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seamark.formats.protocol.wire import check_name
from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.metaserver.access.principal import (
    CERTIFICATE_GROUP_PREFIX,
    CERTIFICATE_PREFIX,
    ROLE_PREFIX,
    check_grantable_role,
    parse_role,
    show_path,
)
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.port import GROUPS_MAX

RULES_MAX = 1000
_SEPARATORS = {"uri": "/", "dns": ".", "email": "@", "cn": ""}
"""The separator at which a part in braces ends, by kind of name."""
_VARIABLE = re.compile(r"\{([a-z_]+)\}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class CertificateRule(msgspec.Struct, frozen=True):
    """A rule. In the file, it is a table `[[rule]]`. The kind of name is the key of its pattern.

    Attributes:
        kind: The kind of the names in certificates to which the rule applies, such as `dns`.
        pattern: The pattern that a name must match. Its variables are parts of the name.
        principal: The template of the principal's name, in which variables of the pattern are replaced.
        groups: The templates of the groups.
        roles: The templates of the roles.
    """

    kind: str
    pattern: re.Pattern[str]
    principal: str
    groups: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    authorities: frozenset[str] = frozenset()
    """The hexadecimal SHA-256 digests of the authorities whose certificates the rule accepts. Empty means all."""

    @property
    def has_rights_outside_database(self) -> bool:
        """Whether the rule gives groups or roles. They are in the configuration, but not in the database."""
        return bool(self.groups or self.roles)

    def name_principal(self, parts: Mapping[str, str]) -> str:
        """Return the name of the principal.

        Args:
            parts: The values of the pattern's variables, by name.

        Raises:
            BadRequest: The name is invalid for a principal.
        """
        return CERTIFICATE_PREFIX + check_name(_fill_template(self.principal, parts), "name of a certificate")

    def list_group_principals(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the principals for the rule's groups.

        Args:
            variables: The parts of the certificate's name that the pattern of the rule matched, by variable.
        """
        names = (check_name(_fill_template(group, variables), "group") for group in self.groups)
        return tuple(dict.fromkeys(CERTIFICATE_GROUP_PREFIX + name for name in names))

    def list_grants(self, principal_name: str, variables: Mapping[str, str]) -> tuple[Grant, ...]:
        """Return the grants by which the principal has the roles of the rule.

        Args:
            principal_name: The principal of the certificate.
            variables: The parts of the certificate's name that the pattern of the rule matched, by variable.
        """
        escaped_variables = {name: show_path((value,)) for name, value in variables.items()}
        return tuple(_parse_grant(principal_name, _fill_template(role, escaped_variables)) for role in self.roles)


def _fill_template(template: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables[match[1]], template)


def _parse_grant(principal_name: str, text: str) -> Grant:
    if text.startswith(ROLE_PREFIX):
        return Grant(principal_name, check_grantable_role(text))
    role, path = parse_role(text)
    return Grant(principal_name, role.value, path)


def compile_pattern(kind: str, text: str) -> re.Pattern[str]:
    """Compile the pattern of a rule for names of a kind.

    Raises:
        ValueError: A variable occurs twice, or a brace belongs to no variable.
    """
    # A variable matches one part of a name, between the separators of its kind.
    separator = _SEPARATORS[kind]
    part = f"[^{re.escape(separator)}]+" if separator else ".+"
    pieces, position = [], 0
    for match in _VARIABLE.finditer(text):
        pieces += [re.escape(text[position : match.start()]), f"(?P<{match[1]}>{part})"]
        position = match.end()
    pieces.append(re.escape(text[position:]))
    if "{" in _VARIABLE.sub("", text) or "}" in _VARIABLE.sub("", text):
        raise ValueError("a brace belongs to no variable such as {name}")
    try:
        return re.compile("".join(pieces), re.IGNORECASE if kind == "dns" else 0)
    except re.error as error:
        raise ValueError(str(error)) from None


def read_rules(settings: Settings) -> tuple[CertificateRule, ...]:
    """Return the rules of `tls_client_rules_file`, or the rule of `tls_client_name`.

    Raises:
        ConfigError: The file cannot be read, or one of its rules is invalid.
    """
    if not settings.tls_client_rules_file:
        return (CertificateRule(settings.tls_client_name, re.compile("(?P<name>.+)"), "{name}"),)
    path = Path(settings.tls_client_rules_file)
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"Cannot read the file {path} of tls_client_rules_file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file {path} of tls_client_rules_file is not valid TOML: {error}") from None
    tables = document.pop("rule", None)
    if document or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"The file {path} of tls_client_rules_file must have only tables [[rule]]")
    if len(tables) > RULES_MAX:
        raise ConfigError(f"The file {path} has {len(tables)} rules; the server accepts at most {RULES_MAX}")
    return tuple(_read_rule(table, f"rule {number} of {path}") for number, table in enumerate(tables, 1))


def _read_rule(table: dict[str, Any], source: str) -> CertificateRule:
    """Return the rule that a table of the file defines. `source` is the rule and the file for messages.

    Raises:
        ConfigError: The table has unknown or missing keys, or invalid values.
    """
    keys = (*_SEPARATORS, "principal", "groups", "roles", "authorities")
    for key, value in table.items():
        if key not in keys:
            similar = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"the keys are {', '.join(keys)}"
            raise ConfigError(f"The key {key!r} of {source} is unknown; {hint}")
        is_list = key in ("groups", "roles", "authorities")
        items = value if is_list else [value]
        is_valid = isinstance(items, list) and all(
            isinstance(item, str) and item and item.isprintable() for item in items
        )
        if not is_valid:
            expected = "a list of texts" if is_list else "text in one line"
            raise ConfigError(f"The key {key!r} of {source} must be {expected}; {value!r} is not")
    kinds = [kind for kind in _SEPARATORS if kind in table]
    if len(kinds) != 1 or "principal" not in table:
        raise ConfigError(f"Set principal and exactly one of {', '.join(_SEPARATORS)} in {source}")
    try:
        pattern = compile_pattern(kinds[0], table[kinds[0]])
    except ValueError as error:
        raise ConfigError(f"The pattern {table[kinds[0]]!r} of {source} is invalid: {error}") from None
    groups, roles = tuple(table.get("groups", ())), tuple(table.get("roles", ()))
    for text in (table["principal"], *groups, *roles):
        unknown_names = set(_VARIABLE.findall(text)) - set(pattern.groupindex)
        if unknown_names:
            raise ConfigError(f"{text!r} of {source} has a variable that the pattern lacks: {', '.join(unknown_names)}")
    if len(groups) > GROUPS_MAX:
        raise ConfigError(f"{source} has {len(groups)} groups; the server accepts at most {GROUPS_MAX}")
    authorities = [text.replace(":", "").lower() for text in table.get("authorities", ())]
    for text in authorities:
        if not _FINGERPRINT.fullmatch(text):
            raise ConfigError(
                f"The authority {text!r} of {source} is no SHA-256 digest of a certificate: write 64 hexadecimal digits"
            )
    rule = CertificateRule(kinds[0], pattern, table["principal"], groups, roles, frozenset(authorities))
    try:
        rule.list_grants("cert:example", dict.fromkeys(pattern.groupindex, "example"))
    except BadRequest as error:
        raise ConfigError(f"A role of {source} is invalid: {error.message}") from None
    return rule
