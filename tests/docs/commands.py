"""The subcommands of the command `seamark`."""

from __future__ import annotations

import click


def list_subcommands(command: click.Command) -> dict[str, click.Command]:
    """Return the visible subcommands by name, in the order of the help.

    The result is empty for a command that is not a group.
    """
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    loaded_commands = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: command for name, command in loaded_commands.items() if command is not None and not command.hidden}
