"""Check properties before a command sets them.

The commands refuse a name or a value that table services cannot read. The server accepts every property, because
engines set their own properties, and ignores unknown properties.
"""

from __future__ import annotations

import click

from seamark.metaserver.services.policy import check_policy, is_policy_property


def check_properties(properties: dict[str, str]) -> dict[str, str]:
    """Check the properties, and return them unchanged.

    Raises:
        UsageError: A property of the table services is unknown, or its value is invalid.
    """
    problems = check_policy({name: value for name, value in properties.items() if is_policy_property(name)})
    if problems is not None:
        raise click.UsageError(problems)
    return properties
