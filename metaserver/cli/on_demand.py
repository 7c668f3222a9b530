"""Commands whose modules are imported when one of them is asked for: that of the server takes a second of CPU, and
`seamark explain` needs none of it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping, MutableMapping

import click


class OnDemand(MutableMapping[str, click.Command]):
    """For `click.Group(commands=…)`. `places`: the command's name → `module:attribute`."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._found: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        found = self._found.get(name)
        if found is None:
            module, _, attribute = self._places[name].partition(":")
            found = self._found[name] = _imported(module, attribute)
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        self._found.pop(name, None)
        self._places.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places.keys() | self._found.keys())

    def __len__(self) -> int:
        return len(self._places.keys() | self._found.keys())


def _imported(module: str, attribute: str) -> click.Command:
    # What imports make stays; to look through all of it for garbage, again and again, takes a sixth of their time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        command: click.Command = getattr(importlib.import_module(module), attribute)
    finally:
        if collecting:
            gc.enable()
    return command
