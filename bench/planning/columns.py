"""The columns of the generated tables and the statistics of their files.

Twenty columns of mixed types resemble an event table: `ts` is ordered over the files, and `event_id` and `updated_at`
are loosely clustered. The ranges of the other columns overlap at random, narrowly or widely. If a table has more
columns, the third to twentieth repeat. The statistics of a file depend only on the random generator of the batch, so a
table can be generated again with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.planning.ragged import (
    Cells,
    Ints,
    Mask,
    choose_words,
    encode_little_endian,
    encode_unscaled_decimal,
    fill_cells,
    join_cells,
)

DAY_US = 86_400_000_000
START_DAY = 19_723
"""2024-01-01, the day of the first file, in days since the epoch."""
BUCKETS = 16

SPAN = 1_000_000_000
"""Random columns have values from 0 to SPAN, scaled to their type.

A filter's fraction of SPAN is therefore the fraction of the values that match.
"""

COUNTRIES = sorted(
    b"AT AU BE BR CA CH CN CZ DE DK EE ES FI FR GB GR HU IE IN IT JP KR LT LV MX NL NO NZ PL PT SE US".split()
)
DEVICES = [b"desktop", b"phone", b"tablet", b"television", b"watch"]


@dataclass(frozen=True)
class FileBatch:
    """Files whose statistics are drawn together.

    Attributes:
        numbers: int64[files], the numbers of the files in the table.
        records: int64[files], the number of rows of each file.
        rng: The random generator of the batch.
    """

    numbers: Ints
    total: int
    files_per_day: int
    records: Ints
    rng: np.random.Generator

    @property
    def rows(self) -> int:
        return len(self.numbers)

    @property
    def bucket(self) -> Ints:
        return self.numbers % BUCKETS

    @property
    def day(self) -> Ints:
        """The day of each file, in days since the epoch."""
        return START_DAY + self.numbers // self.files_per_day

    def draw_numbers(self, high: int) -> Ints:
        """Return uniform random numbers in 0 … high - 1."""
        return self.rng.integers(0, high, self.rows, dtype=np.int64)


@dataclass(frozen=True)
class Stats:
    """The statistics of one column in each file.

    Attributes:
        lower, upper: The serialised bounds.
        nans: The number of NaNs, or None if the type has no NaN.
        present: False for files that contain only nulls and have no bounds.
    """

    lower: Cells
    upper: Cells
    nulls: Ints
    nans: Ints | None = None
    present: Mask | None = None


Maker = Callable[[FileBatch], Stats]


@dataclass(frozen=True)
class StatisticsColumn:
    id: int
    name: str
    type: str
    make: Maker
    required: bool = False

    def to_field(self) -> dict[str, object]:
        """Return the field of a schema in Iceberg's JSON."""
        return {"id": self.id, "name": self.name, "required": self.required, "type": self.type}


def build_columns(count: int) -> tuple[StatisticsColumn, ...]:
    """Return the first `count` columns of the table.

    The 21st and later columns repeat the third to twentieth with a suffix.
    """
    fixed_columns = len(_KINDS)
    results = []
    for number in range(count):
        group, position = (0, number) if number < fixed_columns else divmod(number - 2, fixed_columns - 2)
        name, type_, make = _KINDS[position if group == 0 else position + 2]
        results.append(
            StatisticsColumn(number + 1, f"{name}_{group + 1}" if group else name, type_, make, required=number < 2)
        )
    return tuple(results)


def compute_event_time_us(number: int, files_per_day: int) -> int:
    """Return the earliest `ts` that file `number` can contain, in µs since the epoch.

    Groups of 16 files have the same range of times.
    """
    groups = files_per_day // BUCKETS
    day, group = divmod(number // BUCKETS, groups)
    return (START_DAY + day) * DAY_US + group * (DAY_US // groups)


def return_zeros(batch: FileBatch) -> Ints:
    return np.zeros(batch.rows, np.int64)


def _make_timestamp_stats(batch: FileBatch) -> Stats:
    """Return the statistics of the event times.

    A day is split into slots of equal length. The `BUCKETS` files of a slot have times in that slot only, without up to
    5 % of it at each end.
    """
    groups = batch.files_per_day // BUCKETS
    slot = DAY_US // groups
    start = batch.day * DAY_US + batch.numbers // BUCKETS % groups * slot
    lower = start + batch.draw_numbers(slot // 20)
    upper = start + slot - 1 - batch.draw_numbers(slot // 20)
    return Stats(encode_little_endian(lower), encode_little_endian(upper), return_zeros(batch))


def _make_day(batch: FileBatch) -> Stats:
    value = encode_little_endian(batch.day.astype(np.int32))
    return Stats(value, value, return_zeros(batch))


def _draw_clustered_long(batch: FileBatch) -> Stats:
    """Return the statistics of values that grow with the files.

    Each file spans less than a fiftieth of the range, and is shifted upwards by less than a tenth of the range.
    """
    lower = batch.numbers * (SPAN // batch.total) + batch.draw_numbers(SPAN // 10)
    return Stats(
        encode_little_endian(lower), encode_little_endian(lower + batch.draw_numbers(SPAN // 50)), return_zeros(batch)
    )


def _draw_updated_at(batch: FileBatch) -> Stats:
    """Return the statistics of times up to three days after the event, in random order within the three days."""
    lower = batch.day * DAY_US + batch.draw_numbers(DAY_US)
    return Stats(
        encode_little_endian(lower), encode_little_endian(lower + batch.draw_numbers(3 * DAY_US)), return_zeros(batch)
    )


def _draw_overlapping_bounds(batch: FileBatch, spread: float) -> tuple[Ints, Ints]:
    """Return random lower and upper bounds in SPAN that are up to `spread` of SPAN apart.

    A point lies between the bounds of about spread / 2 of the files.
    """
    lower = batch.draw_numbers(SPAN)
    return lower, lower + batch.draw_numbers(max(1, round(SPAN * spread)))


def _build_number_maker(spread: float, dtype: type[np.generic], divisor: int = 1, *, nulls: bool = False) -> Maker:
    """Return a function that draws the statistics of a number column.

    Args:
        spread: The largest width of a file's values, as a share of SPAN.
        divisor: The values are divided by it.
        nulls: Whether up to 10 % of the rows of a file are null.
    """

    def make(batch: FileBatch) -> Stats:
        lower, upper = (bound // divisor for bound in _draw_overlapping_bounds(batch, spread))
        absent_count = batch.draw_numbers(1000) * batch.records // 10_000 if nulls else return_zeros(batch)
        return Stats(encode_little_endian(lower.astype(dtype)), encode_little_endian(upper.astype(dtype)), absent_count)

    return make


def _build_float_maker(spread: float, dtype: type[np.float32] | type[np.float64]) -> Maker:
    """Return a function that draws the statistics of a column of floats, in steps of a thousandth.

    About 5 % of the files have up to 99 NaNs.

    Args:
        spread: The largest width of a file's values, as a share of SPAN.
    """

    def make(batch: FileBatch) -> Stats:
        lower, upper = (bound / 1000 for bound in _draw_overlapping_bounds(batch, spread))
        nans: NDArray[np.int64] = np.where(batch.draw_numbers(20) == 0, batch.draw_numbers(100), 0)
        return Stats(
            encode_little_endian(lower.astype(dtype)),
            encode_little_endian(upper.astype(dtype)),
            return_zeros(batch),
            nans,
        )

    return make


def _build_decimal_maker(spread: float, *, negative: bool = False) -> Maker:
    """Return a function that draws the statistics of a decimal column. Up to 10 % of the rows of a file are null.

    Args:
        spread: The largest width of a file's values, as a share of SPAN.
        negative: Whether about half of the values are below 0.
    """

    def make(batch: FileBatch) -> Stats:
        shift = SPAN // 2 if negative else 0
        lower, upper = (bound - shift for bound in _draw_overlapping_bounds(batch, spread))
        nulls = batch.draw_numbers(100) * batch.records // 1000
        return Stats(encode_unscaled_decimal(lower), encode_unscaled_decimal(upper), nulls)

    return make


def _make_country(batch: FileBatch) -> Stats:
    """Return the statistics of a column with nearly every value in nearly every file."""
    low, high = batch.draw_numbers(6), len(COUNTRIES) - 1 - batch.draw_numbers(6)
    return Stats(choose_words(COUNTRIES, low), choose_words(COUNTRIES, high), return_zeros(batch))


def _make_device_stats(batch: FileBatch) -> Stats:
    """Return the statistics of a column with only one value in a third of the files."""
    first, second = batch.draw_numbers(len(DEVICES)), batch.draw_numbers(len(DEVICES))
    second = np.where(batch.draw_numbers(3) == 0, first, second)
    return Stats(
        choose_words(DEVICES, np.minimum(first, second)),
        choose_words(DEVICES, np.maximum(first, second)),
        return_zeros(batch),
    )


def _to_letters(values: Ints) -> Cells:
    """Return seven letters for each number below 26⁷. The texts sort like the numbers."""
    powers = 26 ** np.arange(6, -1, -1, dtype=np.int64)
    return Cells((values[:, None] // powers % 26 + ord("a")).astype(np.uint8))


def _draw_letters(batch: FileBatch, low: int, high: int) -> Cells:
    """Return a text of `low` to `high` random letters for each file."""
    matrix = batch.rng.integers(ord("a"), ord("z") + 1, (batch.rows, high), dtype=np.uint8)
    return Cells(matrix, np.arange(high) < (low + batch.draw_numbers(high - low + 1))[:, None])


def _make_email(batch: FileBatch) -> Stats:
    """Return the statistics of a column that is ordered by its first letters and has narrow ranges.

    Each bound is seven letters and one to nine random letters: at most 16 characters, because writers truncate bounds.
    A value is in the range of about one of 200 files.
    """
    lower, upper = _draw_overlapping_bounds(batch, 0.01)
    # + 26 raises the sixth letter, so the upper bound is above the lower bound with any random letters.
    first, last = (join_cells(_to_letters(bound), _draw_letters(batch, 1, 9)) for bound in (lower, upper + 26))
    return Stats(first, last, return_zeros(batch))


def _make_url(batch: FileBatch) -> Stats:
    """Return the statistics of URLs whose first 16 characters are equal.

    The lower bounds are equal, and the last letter of the upper bounds is one letter higher.
    """
    return Stats(
        fill_cells(b"https://shop.exa", batch.rows), fill_cells(b"https://shop.exb", batch.rows), return_zeros(batch)
    )


def _make_comment(batch: FileBatch) -> Stats:
    """Return the statistics of a mostly empty column.

    Three of a hundred files contain only nulls and have no bounds. In the others, three of four values are null. A
    value is in the range of about 15 % of the files. Bounds have the 16 characters to which writers truncate them.
    """
    lower, upper = _draw_overlapping_bounds(batch, 0.3)
    presence = batch.draw_numbers(100) >= 3
    nulls = np.where(presence, batch.records * 3 // 4, batch.records)
    # + 26 raises the sixth letter, so the upper bound is above the lower bound with any random letters.
    first, last = (join_cells(_to_letters(bound), _draw_letters(batch, 9, 9)) for bound in (lower, upper + 26))
    return Stats(first, last, nulls, present=presence)


_KINDS: tuple[tuple[str, str, Maker], ...] = (
    ("ts", "timestamptz", _make_timestamp_stats),
    ("day", "date", _make_day),
    ("event_id", "long", _draw_clustered_long),
    ("user_id", "long", _build_number_maker(1.0, np.int64)),
    ("session_id", "long", _build_number_maker(0.1, np.int64)),
    ("order_id", "long", _build_number_maker(0.01, np.int64)),
    ("quantity", "int", _build_number_maker(0.5, np.int32, 10_000_000, nulls=True)),
    ("status", "int", _build_number_maker(1.0, np.int32, 200_000_000)),
    ("store_id", "int", _build_number_maker(0.02, np.int32, 1000)),
    ("price", "double", _build_float_maker(0.1, np.float64)),
    ("score", "double", _build_float_maker(0.5, np.float64)),
    ("discount", "float", _build_float_maker(0.2, np.float32)),
    ("amount", "decimal(12, 2)", _build_decimal_maker(0.02)),
    ("balance", "decimal(12, 2)", _build_decimal_maker(0.3, negative=True)),
    ("updated_at", "timestamp", _draw_updated_at),
    ("country", "string", _make_country),
    ("device", "string", _make_device_stats),
    ("email", "string", _make_email),
    ("url", "string", _make_url),
    ("comment", "string", _make_comment),
)
