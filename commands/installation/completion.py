"""`seamark completion`: prints the script with which a shell completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_SEAMARK_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands in SHELL.

    \b
    For instance, for every new shell:
      seamark completion bash >> ~/.bashrc
      seamark completion zsh >> ~/.zshrc
      seamark completion fish > ~/.config/fish/completions/seamark.fish
    """
    script_class = get_completion_class(shell)
    assert script_class is not None  # click supports all of SHELLS.
    script = script_class(context.find_root().command, {}, "seamark", _VARIABLE)
    # For bash, `source()` would start a bash to compare versions, which the script alone does not need.
    click.echo(script.source_template % script.source_vars())
