"""A table service: one object with everything that other modules need from it.

A service is a `TableService` in `services.py`, and two behaviours that are registered under its name. The server
proposes the jobs of the service and reports the problems that they correct (`metaserver/services/proposers.py`). A
client runs its jobs (`connector/jobs/jobs.py`). The server never imports a client, so the two behaviours are in
separate modules. Settings, policies, rights, launchers, commands and the documentation read the declaration and contain
no names of services.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

_LONG_MAX, _LONG_DIGITS_MAX = (1 << 63) - 1, 19
Requirement = Callable[[Mapping[str, str]], str | None]
"""A function that checks a property of a policy.

If the value of the property is invalid, the function returns a text that describes the valid values, otherwise None. It
receives the properties of the policy that are checked together. If the property has a parser, an invalid value raises
`BadRequest`.
"""


@dataclass(frozen=True)
class ServiceProperty:
    """A table property that a table service follows."""

    name: str
    default: str
    """The value if the property is not set. An empty value means no limit, or no columns."""
    requirement: Requirement
    empty: str = "no limit"
    """The meaning of an empty value in the output of `seamark policy`."""


def require_whole_number(name: str) -> Requirement:
    """Return the requirement that the property `name` is a positive integer of at most 64 bits."""

    def require(properties: Mapping[str, str]) -> str | None:
        value = properties[name]
        is_valid = value.isdecimal() and len(value) <= _LONG_DIGITS_MAX and 0 < int(value) <= _LONG_MAX
        return None if is_valid else "a whole number above 0"

    return require


def is_boolean(name: str) -> Requirement:
    """Return the requirement that the property `name` is true or false."""

    def require(properties: Mapping[str, str]) -> str | None:
        return None if properties[name] in ("true", "false") else "true or false"

    return require


def require_parsed_by(parse: Callable[[Mapping[str, str]], object]) -> Requirement:
    """Return the requirement that `parse` accepts the properties.

    `parse` raises `BadRequest` for invalid properties.
    """

    def require(properties: Mapping[str, str]) -> None:
        parse(properties)

    return require


@dataclass(frozen=True, kw_only=True)
class TableService:
    """The declaration of a table service, which the server and the clients share."""

    name: str
    """The name: a noun in lower case with hyphens, as in stored jobs, metrics and logs. It never changes."""
    command: str
    """The subcommand of `seamark run` that runs one job."""
    summary: str
    """The task of the service in the documentation and the help of the command: a verb and its object."""
    condition: str = "the table's policy enables it"
    """The condition under which the service works on a table, for the documentation."""
    page: str = ""
    """The page in `docs/how-to/` about the objects that the service maintains."""
    priority: int = 5
    """The priority of jobs. Jobs with a lower number run first.

    If the number is lower than that of another service, the declaration states the reason.
    """

    enabled_by_default: bool | None = False
    """The default of the setting that enables the service for tables without its property `switch`.

    It is None if the service has neither a switch nor a setting.
    """
    setting_help: str = ""
    """The description of the setting that enables the service."""
    properties: tuple[ServiceProperty, ...] = ()
    """The properties that the service follows, except its property `switch`."""
    prefixes: tuple[str, ...] = ()
    """The prefixes of the properties of the service. If it is empty, the prefix is `seamark.<name>.`."""
    is_inherited: bool = True
    """Whether the properties of a namespace apply to its tables."""
    affected_by: tuple[str, ...] = ()
    """The names of the other services whose properties also affect the jobs of this service.

    The user who set these properties needs the right to change the table.
    """

    rewrites_files: bool = False
    """Whether a job rewrites data files.

    Two such jobs would rewrite the same files, so only one of them runs on a table at a time, under the table's rewrite
    lease.
    """
    runs_on_spark: bool = False
    """Whether a job may run on Spark. If True, the job accepts the argument `runner`."""
    ignores_windows: bool = False
    """Whether jobs run at any time, not only in the table's windows."""
    reads_joined_tables: bool = False
    """Whether a job reads the tables that `seamark.clustering.joins` names."""

    @cached_property
    def switch(self) -> str | None:
        """The table property that enables or disables the service, if it has one."""
        return None if self.enabled_by_default is None else f"seamark.{self.name}.enabled"

    @cached_property
    def setting(self) -> str | None:
        """The setting that enables the service for tables without the property `switch`, if the service has one."""
        return None if self.enabled_by_default is None else f"services_{self.name.replace('-', '_')}"

    @cached_property
    def property_prefixes(self) -> tuple[str, ...]:
        """The prefixes of all properties of the service."""
        return self.prefixes or (f"seamark.{self.name}.",)

    def list_policy_properties(self) -> tuple[ServiceProperty, ...]:
        """Return the properties of the service. The property that enables or disables it (`switch`) is first.

        Its default is empty here, because a setting of the server (`setting`) determines it.
        """
        if self.switch is None:
            return self.properties
        return (ServiceProperty(self.switch, "", is_boolean(self.switch)), *self.properties)
