"""An index kind: one object with everything that other modules need from a kind of index.

A kind is a module of this folder and an entry in `kinds.py`. Definitions, builders, index files, the planner, audits,
the HTTP interface and the command line call the object and contain no names of kinds. There are two exceptions. The
advice of explain recommends bloom and bitmap indexes (`term_effects.py`). Some features need more than an `IndexQuery`:
bitmaps select rows within files, and record indexes look up keys.

A kind must build, encode, merge and open a blob, and convert predicates to queries. Everything else has defaults: no
parameters, one column of any type, no remote reads, and an audit of only the checksums.

A kind has no state. Its methods have no side effects, except `open_remote`, which reads through its `BlobReader`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.iceberg.expressions.expression import Bound, Op
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import KeyRanges, Keys
from seamark.formats.index.keys.measures import Measure
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.queries import KEYS_MAX, Flags, IndexQuery
from seamark.formats.index.kinds.sparse import Range

Mask = npt.NDArray[np.bool_]

REMOTE_KEYS_MAX = 16
"""The maximum number of keys that are looked up by hash in a remote index.

For more keys, the complete file is fetched.
"""


class UnknownVersion(ValueError):
    """A server of another version wrote the file. The file is valid but cannot be read, so plans do not use it."""


class IndexParameter(NamedTuple):
    """A numeric parameter of an index definition."""

    name: str
    """The name in lower-case letters, as in `bloom(c, fpp=0.001)` and `--fpp`.

    Two kinds can only use the same name for a parameter with the same meaning, because `list_parameters` has one
    parameter for each name.
    """
    meaning: str
    default: float
    minimum: float
    maximum: float


class OpenedBlob(Protocol):
    """A blob in memory, which can be memory-mapped. Several threads can use it."""

    @property
    def files(self) -> int:
        """The number of data files. A file is identified by its index, from 0."""
        ...

    def verify(self) -> None:
        """Read the complete blob.

        Raises:
            ValueError: Some bytes differ from the bytes that were written.
        """
        ...


class BlobReader(Protocol):
    """A reader of byte ranges of a remote blob. Its methods can also raise the errors of the storage.

    Raises:
        ValueError: A range is beyond the end of the blob.
    """

    @property
    def length(self) -> int:
        """The size of the blob in bytes."""
        ...

    async def read(self, start: int, length: int) -> bytes: ...

    async def read_all(self, ranges: Sequence[Range]) -> list[bytes] | None:
        """Read all ranges concurrently, or return None if there are too many ranges or too many bytes."""
        ...

    async def read_head(self, compute_size: Callable[[bytes], int]) -> bytes:
        """Return the start of the blob.

        Args:
            compute_size: A function that returns the required size from the first bytes.
        """
        ...

    async def read_tail(self, compute_size: Callable[[bytes], int]) -> bytes:
        """Return the end of the blob.

        Args:
            compute_size: A function that returns the required size from the last bytes.
        """
        ...


class RemoteIndex(Protocol):
    """A blob of an index file in the storage, whose directory is in memory. Other parts are read for each query."""

    @property
    def data_files(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """The memory of the index in bytes. Queries can increase it."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the cache has used more than half of its limit. Opening the blob again empties the cache."""
        ...

    async def probe(self, query: Any) -> Flags | None:
        """Return the result that `query.mark_files` returns for a local blob, or None if it needs too many reads.

        The method can also raise the errors of the storage.

        Raises:
            ValueError: The blob is damaged.
        """
        ...


Entry = TypeVar("Entry")
"""The index entry of a data file before it is encoded. It can be pickled."""
Opened = TypeVar("Opened", bound=OpenedBlob)


class IndexKind(ABC, Generic[Entry, Opened]):
    """The base class of the index kinds."""

    name: str
    """The name of the kind in lower case.

    Definitions, the registry, the type of the blob and the stages of plans contain it.
    """
    version: int = 1
    """The version of the blob's format. A blob of another version is not damaged, but cannot be used."""
    alignment: int = 64
    """The alignment in bytes: the blob's offset in its file is a multiple of it."""
    columns_max: int = 1
    """The maximum number of terms in a definition."""
    parameters: tuple[IndexParameter, ...] = ()
    remote_values_max: int = REMOTE_KEYS_MAX
    """The maximum number of values of a plan's predicates that are looked up in a remote index."""
    answers_rows: bool = False
    """Whether the index selects rows within files. If True, `open` must return a `Bitmap`."""
    answers_keys: bool = False
    """Whether the index looks up rows by key. If True, `open` must return a `Record`."""
    aggregates: bool = False
    """Whether entries contain aggregates of rows.

    If True, definitions have measures, entries are built by `build_entry_with_aggregates`, plans do not prune by the
    index, and `open` must return `CubeEntries`.
    """
    takes_attributes: bool = False
    """Whether a term can be an attribute of a dimension table (`lookups.py`)."""

    def supports_type(self, type_name: str) -> bool:
        """Return whether terms of this type can be indexed."""
        return True

    def find_term_problem(self, term: Term) -> str | None:
        """Return the reason why the kind does not support a term of a supported type, or None."""
        return None

    @abstractmethod
    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> Entry:
        """Build the index entry of a data file from the keys of each term.

        Raises:
            ValueError: The file cannot be indexed.
        """

    def build_entry_with_aggregates(
        self,
        terms: Sequence[Term],
        measures: Sequence[Measure],
        columns: Mapping[int, pa.ChunkedArray],
        parameters: Mapping[str, float],
        attributes: Mapping[Term, pa.ChunkedArray],
    ) -> Entry:
        """Build the index entry of a data file from its columns.

        Most kinds store no aggregates, so this method raises ValueError. A kind with aggregates overrides it.

        Args:
            terms: The dimensions.
            measures: The aggregates.
            columns: The columns of the data file by field id.
            parameters: The parameters of the index.
            attributes: For each term that is an attribute of a dimension table, the attribute's value for each row.

        Raises:
            ValueError: The file cannot be indexed.
        """
        raise ValueError(f"{self.name} indexes have no aggregates")

    @abstractmethod
    def encode(self, entries: Sequence[Entry]) -> Iterable[Any]:
        """Return the buffers of a blob that contains the index entries of some data files, in order."""

    @abstractmethod
    def merge(self, parts: Sequence[tuple[Opened, Mask]]) -> Iterable[Any]:
        """Merge opened blobs, and return the buffers of the result.

        Args:
            parts: The blobs, each with the files to keep as bool[files].

        Raises:
            ValueError: A blob is damaged.
        """

    @abstractmethod
    def open(self, blob: memoryview) -> Opened:
        """Open a blob. The result refers to the memory of the blob.

        Raises:
            ValueError: The blob is damaged.
        """

    async def open_remote(self, blob: BlobReader) -> RemoteIndex:
        """Open a blob that is read by byte ranges.

        Raises:
            ValueError: The blob is damaged, or the kind does not support remote reads.
        """
        raise ValueError(f"{self.name} indexes cannot be read by byte ranges")

    def supports(self, predicate: Bound) -> bool:
        """Return whether `query` may return a query for the predicate.

        By default, the result is True for a limited number of equalities.
        """
        return predicate.op in (Op.EQ, Op.IN) and len(predicate.values) <= KEYS_MAX

    @abstractmethod
    def query(self, ranges: Sequence[KeyRanges]) -> IndexQuery | None:
        """Return a query for files with a row whose keys are in some ranges, or None if the index cannot prune.

        Args:
            ranges: The ranges of keys that match, one item for each indexed term.
        """

    @abstractmethod
    def make_keys_query(self, keys: KeySet) -> IndexQuery | None:
        """Return a query for files with a row that has a key of a join, or None if the index would not prune."""

    def check_rows(self, index: Opened, rows: int) -> str | None:
        """Return a description of the problem if the number of entries is wrong for data files of `rows` rows,
        otherwise None.
        """
        return None

    def compare(
        self, index: Opened, number: int, columns: Sequence[Keys], sampled_rows: Sequence[int]
    ) -> Iterator[str]:
        """Compare the index with the keys of a data file, and yield a description of each difference.

        By default, nothing is compared. Kinds override this method.

        Args:
            index: The opened index.
            number: The index of the data file in the blob.
            columns: The keys, which were read from the data file again.
            sampled_rows: Rows whose first key is neither null nor NaN, for kinds that compare single keys.
        """
        return iter(())

    def compare_aggregates(self, index: Opened, number: int, expected: Entry) -> Iterator[str]:
        """Compare the aggregates of a data file's entry with a new entry. Yield a description of each difference.

        Most kinds store no aggregates, so this method yields nothing. A kind with aggregates overrides it.

        Args:
            index: The opened index.
            number: The index of the data file in the blob.
            expected: The entry that was built again from the data file.
        """
        return iter(())
