"""Keys of facts are found among the keys of a dimension table."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from seamark.connector.index.lookups import find_places
from tests.seeds import first_seed


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.string(), pa.date32()])
@pytest.mark.parametrize("spread", [1, 30, 1 << 24])
def test_keys_are_found_among_distinct_keys(kind: pa.DataType, spread: int) -> None:
    rng = random.Random(first_seed())
    numbers = [rng.randrange(-50, 50) * spread for _ in range(400)]
    least_value = {pa.int32(): -(1 << 31), pa.int64(): -(1 << 63)}.get(kind)
    values = [*numbers, None, *([] if least_value is None else [least_value, -least_value - 1])]
    distinct_values = list(dict.fromkeys(numbers[:60]))

    def to_array(values: list[int | None]) -> pa.Array:
        if kind == pa.string():
            return pa.array([None if value is None else str(value) for value in values], kind)
        return pa.array(values, pa.int32()).cast(kind) if kind == pa.date32() else pa.array(values, kind)

    for dimension_keys in (distinct_values, distinct_values[:1], []):
        keys = pa.chunked_array([to_array(values[:100]), to_array([]), to_array(values[100:])], kind)
        positions = find_places(keys, to_array(list(dimension_keys)))
        assert positions.to_pylist() == pc.index_in(keys, value_set=to_array(list(dimension_keys))).to_pylist()
