from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING: int
OPS: dict[str, int]

class Program:
    names: tuple[str, ...]
    columns: tuple[str, ...]
    groups: tuple[tuple[bool, int, int, int], ...]
    status: int
    least: int
    def __init__(
        self,
        nodes: list[tuple[str, int, int, list[int]]],
        names: Iterable[str],
        columns: Iterable[str],
        groups: Iterable[tuple[bool, int, int, int]],
        status: int,
        least: int,
    ) -> None: ...

def execute(
    program: Program, heap: NDArray[np.uint8], edges: NDArray[np.int64], counts: NDArray[np.int64], location: str
) -> tuple[
    int,
    list[tuple[NDArray[np.int64] | None, NDArray[np.int32] | None]],
    list[Any],
]: ...
