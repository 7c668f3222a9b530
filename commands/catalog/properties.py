"""Properties that a command is about to set: a name or value that no table service reads is refused.

The server takes any property, because engines set what they like, and then ignores it.
"""

from __future__ import annotations

import click

from seamark.metaserver.services.policy import check_policy, is_policy_property


def check_properties(properties: dict[str, str]) -> dict[str, str]:
    """Return the properties.

    UsageError if one of the table services is unknown, or has a value of another type.
    """
    wrong = check_policy({name: value for name, value in properties.items() if is_policy_property(name)})
    if wrong is not None:
        raise click.UsageError(wrong)
    return properties
