"""Modules that are imported on first use.

Imports take most of the start-up time of a server or a command. Only rare requests need some large
libraries: AWS's keys, SQL predicates, JWTs, PostgreSQL. A module that uses such a library defers the
import at its head, in a form that mypy and import-linter support:

    if TYPE_CHECKING:
        import pyarrow.compute as pc
    else:
        pc = LazyModule("pyarrow.compute")

`importlib.util.LazyLoader` is not used: other threads can see its modules before they are initialised.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class LazyModule:
    """A proxy of a module, which is imported when one of its attributes is first read.

    It defers the import of a large library, or of a module of this project that imports a large library.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_loaded = False

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Only copy, pickle or inspection reads such a name.
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # Later accesses bypass __getattr__.
        return value


async def load_modules(*modules: object) -> None:
    """Import, in a thread, those of the given modules that are lazy and not imported yet.

    The import of an SQL parser takes a tenth of a second, in which the event loop could not serve clients.
    """
    for module in modules:
        if isinstance(module, LazyModule) and not module._is_loaded:
            await asyncio.to_thread(importlib.import_module, module._name)
            module._is_loaded = True


def make_lazy_getattr(
    package: str, names: Mapping[str, Sequence[str]], *, extra: str | None = None
) -> Callable[[str], object]:
    """Return the `__getattr__` (PEP 562) of a package that offers names of other modules.

    A module is imported when one of its names is first used. If a library is missing, the message of the
    ModuleNotFoundError has the command that installs it.

    Args:
        package: The name of the package.
        names: The names that each module offers, by module.
        extra: The extra of the Python package that installs the libraries of these modules. With None, the error of
            the import is not changed.
    """
    modules = {name: module for module, module_names in names.items() for name in module_names}

    def get_name(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            if extra is None or error.name is None or error.name.startswith("seamark"):
                raise
            library = error.name.partition(".")[0]
            message = f"{package} needs the library {library}: pip install 'seamark[{extra}]'"
            raise ModuleNotFoundError(message, name=error.name, path=error.path) from None

    return get_name
