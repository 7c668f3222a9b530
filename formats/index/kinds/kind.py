"""An index kind: one object with everything that the other modules need to know about a kind of index.

A kind is a module of this folder and an entry in `kinds.py`. Definitions, builders, index files, the planner, audits,
the HTTP interface and the command line call the object and contain no names of kinds, except the advice of explain
(`term_effects.py`, which recommends bloom and bitmap indexes) and what needs more than an `IndexQuery`: rows within
files by bitmaps, and lookups by record indexes. A kind must build, encode, merge and open a blob, and turn predicates
into queries. The rest has defaults: no parameters, one column of any type, no remote reads, and an audit of checksums
only.

A kind has no state. Its methods are pure, except `open_remote`, which reads through its `BlobReader`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import Bound, Op
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import KeyRanges, Keys
from seamark.formats.index.kinds.queries import KEYS_MAX, Flags, IndexQuery
from seamark.formats.index.kinds.sparse import Range

Mask = npt.NDArray[np.bool_]

REMOTE_KEYS_MAX = 16
"""Maximum keys that are looked up by hash in a remote index; for more keys, the whole file is fetched."""


class IndexParameter(NamedTuple):
    """A numeric parameter of an index definition."""

    name: str
    """Lower-case letters, as in `bloom(c, fpp=0.001)` and `--fpp`. Kinds may share a name only with the same
    meaning."""
    meaning: str
    default: float
    minimum: float
    maximum: float


class OpenedBlob(Protocol):
    """A blob in memory or memory-mapped.

    Thread-safe.
    """

    @property
    def files(self) -> int:
        """The number of data files; a file is identified by its number."""
        ...

    def verify(self) -> None:
        """Read the whole blob.

        Raises:
            ValueError: If anything differs from what was written.
        """
        ...


class BlobReader(Protocol):
    """Reads a remote blob by byte ranges.

    ValueError for a range beyond its end; errors of the storage.
    """

    @property
    def length(self) -> int:
        """Size of the blob in bytes."""
        ...

    async def read(self, start: int, length: int) -> bytes: ...

    async def read_all(self, ranges: Sequence[Range]) -> list[bytes] | None:
        """Return all ranges, concurrently; None if there are too many reads or too many bytes."""
        ...

    async def read_head(self, size_of: Callable[[bytes], int]) -> bytes:
        """Return the start of the blob.

        `size_of` returns the required size, given the first bytes.
        """
        ...

    async def read_tail(self, size_of: Callable[[bytes], int]) -> bytes:
        """Return the end of the blob.

        `size_of` returns the required size, given the last bytes.
        """
        ...


class RemoteIndex(Protocol):
    """A remote blob whose directory has been read."""

    @property
    def data_files(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """Memory; may grow with queries."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether its cache has reached about its limit; reopening the blob empties the cache."""
        ...

    async def probe(self, query: Any) -> Flags | None:
        """Return the same answer as `query.of` for a local blob; None if it would take too many reads.

        Raises:
            ValueError: For damage; errors of the storage.
        """
        ...


Entry = TypeVar("Entry")
"""The index entry of one data file, before it is encoded; picklable."""
Opened = TypeVar("Opened", bound=OpenedBlob)


class IndexKind(ABC, Generic[Entry, Opened]):
    name: str
    """Lower-case letters; used in definitions, in the registry, in the blob's type and as a stage name of plans."""
    version: int = 1
    """Version of the blob format. A blob of another version is not damaged, but cannot be used."""
    alignment: int = 64
    """The blob's offset in its file is a multiple of this number of bytes."""
    columns_max: int = 1
    """Maximum terms of a definition."""
    parameters: tuple[IndexParameter, ...] = ()
    remote_values_max: int = REMOTE_KEYS_MAX
    """Maximum values of a plan's predicates that are looked up in a remote index."""
    answers_rows: bool = False
    """Whether the index selects rows within files. Requires that `open` returns a `Bitmap`."""
    answers_keys: bool = False
    """Whether the index looks up rows by key. Requires that `open` returns a `Record`."""

    def supports_type(self, type_name: str) -> bool:
        """Return whether terms of this type can be indexed."""
        return True

    # Build and codec

    @abstractmethod
    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> Entry:
        """Return the index entry of one data file, from its keys for each term.

        Raises:
            ValueError: If the file cannot be indexed.
        """

    @abstractmethod
    def encode(self, entries: Sequence[Entry]) -> Iterable[Any]:
        """Return the buffers of a blob of these data files, in order."""

    @abstractmethod
    def merge(self, parts: Sequence[tuple[Opened, Mask]]) -> Iterable[Any]:
        """Merge opened blobs; bool[files] selects the files that are kept.

        Raises:
            ValueError: For damage.
        """

    @abstractmethod
    def open(self, blob: memoryview) -> Opened:
        """Open a blob and keep it alive.

        Raises:
            ValueError: If it is damaged.
        """

    async def open_remote(self, blob: BlobReader) -> RemoteIndex:
        """ValueError if the blob is damaged or the kind does not support remote reads."""
        raise ValueError(f"{self.name} indexes are not read by range")

    # Queries

    def supports(self, predicate: Bound) -> bool:
        """Return whether `query` may return a query for the predicate.

        By default, for a limited number of equalities.
        """
        return predicate.op in (Op.EQ, Op.IN) and len(predicate.values) <= KEYS_MAX

    @abstractmethod
    def query(self, ranges: Sequence[KeyRanges]) -> IndexQuery | None:
        """Select files with a row whose keys are in these ranges, one for each term.

        None if the index cannot prune.
        """

    @abstractmethod
    def query_of_keys(self, keys: KeySet) -> IndexQuery | None:
        """Select files with a row that has one of the keys of a join.

        None if the index would not prune.
        """

    # Audit

    def check_rows(self, index: Opened, rows: int) -> str | None:
        """Describe a wrong number of entries for data files of `rows` rows; None if it is right."""
        return None

    def compare(self, index: Opened, number: int, columns: Sequence[Keys], sampled: Sequence[int]) -> Iterator[str]:
        """Compare the index with the keys of a data file, read again; yield a description of each difference.

        Args:
            sampled: Rows whose first key is neither null nor NaN, for kinds that compare single keys.
        """
        return iter(())
