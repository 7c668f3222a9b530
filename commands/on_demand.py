"""Command groups that import the module of a command only when it runs.

The server's modules take a second of CPU time to import, and neither `seamark --help` nor `seamark explain` needs them.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import click

_HELP_CHARACTERS_MAX = 100
"""The maximum length of the help of a command in the list of commands."""


@dataclass(frozen=True)
class DeferredCommand:
    """A command whose module is imported when it runs."""

    target: str
    """The `module:attribute` of the command."""
    help: str
    """The text in the list of commands: the first sentence of the command's own help."""
    extra: str | None = None
    """The extra of the Python package that the command needs, as in `pip install 'seamark[server]'`."""

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            UsageError: A library is not installed. The message names the extra that installs it.
        """
        module, _, attribute = self.target.partition(":")
        # The objects that an import creates stay in memory. Without garbage collections, the import is faster by a
        # sixth.
        is_gc_enabled = gc.isenabled()
        gc.disable()
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if self.extra is None or (error.name or "").startswith("seamark"):
                raise
            raise click.UsageError(
                f"this command needs the library {error.name}: pip install 'seamark[{self.extra}]'"
            ) from None
        finally:
            if is_gc_enabled:
                gc.enable()
        return command


class DeferredGroup(click.Group):
    """A group that imports its commands when they run: `click.group(cls=DeferredGroup, deferred_commands=…)`.

    Other commands can be added in the same way as to every group.
    """

    def __init__(self, *args: Any, deferred_commands: Mapping[str, DeferredCommand], **options: Any) -> None:
        super().__init__(*args, **options)
        self._commands_by_name = dict(deferred_commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._commands_by_name.keys() | self.commands.keys())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self._commands_by_name:
            self.commands[cmd_name] = self._commands_by_name[cmd_name].load()
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command with the name in `args`, or raise an error that suggests a similar name.

        Click compares the name only with loaded commands. This method compares it with all commands.
        """
        if args and not args[0].startswith("-") and args[0] not in (names := self.list_commands(ctx)):
            similar_names = get_close_matches(args[0], names, 1)
            hint = f" Did you mean {similar_names[0]}?" if similar_names else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (
                name,
                self._commands_by_name[name].help
                if name in self._commands_by_name
                else self.commands[name].get_short_help_str(_HELP_CHARACTERS_MAX),
            )
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
