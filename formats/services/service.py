"""A table service: one object with everything that the other modules need from it.

A service is a `TableService` in `services.py`, and two behaviours that are registered by its name. The
server proposes its jobs and reports the problems that they correct (`metaserver/services/proposers.py`). A
client runs its jobs (`connector/jobs/jobs.py`). The server never imports a client, so the two behaviours are in
separate modules. Settings, policies, rights, launchers, commands and the documentation read the declaration and
contain no names of services.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

Requirement = Callable[[Mapping[str, str]], str | None]
"""A function that checks a property of a policy.

It returns a text that describes the valid values if the value of the property is invalid, otherwise None. It
receives the properties of the policy that are checked together. If the property has a parser, an invalid
value raises `BadRequest`.
"""


@dataclass(frozen=True)
class ServiceProperty:
    """A table property that a table service follows."""

    name: str
    default: str
    """The value if the property is not set. An empty value means no limit, or no columns."""
    requirement: Requirement
    empty: str = "no limit"
    """The meaning of an empty value, as `seamark policy` shows it."""


def is_whole_number(name: str) -> Requirement:
    """Return the requirement that the property `name` is a positive integer of 64 bits."""

    def require(properties: Mapping[str, str]) -> str | None:
        value = properties[name]
        is_valid = value.isdecimal() and len(value) <= 19 and 0 < int(value) < 1 << 63
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
    """A noun in lower case with hyphens, as in stored jobs, metrics and logs. It never changes."""
    command: str
    """The subcommand of `seamark run` that runs one job."""
    summary: str
    """The task of the service: a verb and its object, for the documentation and the help of the command."""
    condition: str = "the table's policy enables it"
    """The condition under which the service works on a table, for the documentation."""
    page: str = ""
    """The page of the documentation about the objects that the service maintains, from `docs/how-to/`."""
    priority: int = 5
    """The priority of jobs: jobs with a lower number run first.

    If the number is lower than the number of another service, the declaration states the reason.
    """

    enabled_by_default: bool | None = False
    """The default of the setting that enables the service for tables that do not have its property `switch`.

    None if the service has neither a switch nor a setting.
    """
    setting_help: str = ""
    """The description of the setting that enables the service."""
    properties: tuple[ServiceProperty, ...] = ()
    """The properties that the service follows, except its property `switch`."""
    prefixes: tuple[str, ...] = ()
    """The prefixes of the properties of the service. If it is empty, the prefix is `seamark.<name>.`."""
    is_inherited: bool = True
    """Whether the properties of a namespace apply to its tables."""
    steered_by: tuple[str, ...] = ()
    """The names of the other services whose properties also affect its jobs. The user who set these properties
    needs the right to change the table.
    """

    rewrites_files: bool = False
    """Whether a job rewrites data files. Only one such job of a table runs at a time, under the table's rewrite
    lease, because two jobs would rewrite the same files.
    """
    runs_on_spark: bool = False
    """Whether a job may run on Spark. If True, the job accepts the argument `runner`."""
    ignores_windows: bool = False
    """Whether jobs run at any time, also outside the table's windows."""
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
        """Return the properties of the service. The property `switch` is first.

        The setting in `setting` determines the default of this property.
        """
        if self.switch is None:
            return self.properties
        return (ServiceProperty(self.switch, "", is_boolean(self.switch)), *self.properties)
