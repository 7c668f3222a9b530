"""The index kinds by name, in the order in which plans query them: the cheapest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamark.formats.index.kinds.bitmap import BITMAP
from seamark.formats.index.kinds.bloom import BLOOM
from seamark.formats.index.kinds.cube import CUBE
from seamark.formats.index.kinds.kind import IndexKind, IndexParameter
from seamark.formats.index.kinds.record import RECORD

KINDS: dict[str, IndexKind[Any, Any]] = {kind.name: kind for kind in (BLOOM, BITMAP, RECORD, CUBE)}


def list_parameters() -> Mapping[str, IndexParameter]:
    """Return the parameters of all kinds, by name."""
    return {parameter.name: parameter for kind in KINDS.values() for parameter in kind.parameters}


def list_kinds_with_parameter(parameter: str) -> list[str]:
    """Return the names of the kinds that have the parameter."""
    return [
        kind.name for kind in KINDS.values() if any(declaration.name == parameter for declaration in kind.parameters)
    ]
