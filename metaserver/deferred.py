"""Modules that are imported when something of them is first used.

Most of what starting a server or a command costs is imports, and some large libraries serve one rare request each:
AWS's keys, SQL predicates, JWTs, PostgreSQL. The rule: they are named here alone, by whoever uses them, so that the
import stands at the head of a module as any other does, for readers, mypy and import-linter:

    if TYPE_CHECKING:
        import pyarrow.compute as pc
    else:
        pc = Deferred("pyarrow.compute")

Not `importlib.util.LazyLoader`, whose modules other threads could see half made.
"""

from __future__ import annotations

import importlib
from typing import Any


class Deferred:
    """Stands for the module of this name. Also for a module of ours that needs such a library from its first line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by who copies, pickles or inspects, not for what is in the module
            raise AttributeError(attribute)
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # the next to ask does not come here
        return found
