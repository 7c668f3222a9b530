"""Commands that are imported when they run: importing the server takes a second of CPU, which `seamark explain` does
not need."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping, MutableMapping

import click


class OnDemand(MutableMapping[str, click.Command]):
    """For `click.Group(commands=…)`. `places` maps names of commands to `module:attribute`."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        command = self._loaded.get(name)
        if command is None:
            module, _, attribute = self._places[name].partition(":")
            command = self._loaded[name] = _imported(module, attribute)
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        self._loaded.pop(name, None)
        self._places.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places.keys() | self._loaded.keys())

    def __len__(self) -> int:
        return len(self._places.keys() | self._loaded.keys())


def _imported(module: str, attribute: str) -> click.Command:
    # Imported objects are not garbage; repeated collections would take a sixth of the import time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        command: click.Command = getattr(importlib.import_module(module), attribute)
    finally:
        if collecting:
            gc.enable()
    return command
