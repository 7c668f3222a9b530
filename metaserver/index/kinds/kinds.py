"""The index kinds, by name, cheapest to ask first: in this order plans ask them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamark.metaserver.index.kinds.bitmap import BITMAP
from seamark.metaserver.index.kinds.bloom import BLOOM
from seamark.metaserver.index.kinds.kind import IndexKind, Parameter
from seamark.metaserver.index.kinds.record import RECORD

KINDS: dict[str, IndexKind[Any, Any]] = {kind.name: kind for kind in (BLOOM, BITMAP, RECORD)}


def parameters() -> Mapping[str, Parameter]:
    """By name, those of all kinds."""
    return {one.name: one for kind in KINDS.values() for one in kind.parameters}


def takers(parameter: str) -> list[str]:
    """The kinds that may be given it."""
    return [kind.name for kind in KINDS.values() if any(one.name == parameter for one in kind.parameters)]
