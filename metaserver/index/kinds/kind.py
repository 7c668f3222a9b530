"""An index kind: everything that the rest of the program has to know of one, in one object.

A kind is a module of this folder and an entry of `kinds.py`. Definitions, builders, index files, the planner, audits,
the HTTP interface and the command line ask the object and name no kind. What is required: to build, encode, merge and
open a blob, and to make questions of predicates. The rest has defaults: no parameters, one column of any type, no
reads by range, nothing to compare but checksums.

A kind holds no state. Its methods are pure, apart from `open_remote`, which reads through the `BlobReader` it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from seamark.metaserver.iceberg.expressions.expression import Bound, Op
from seamark.metaserver.index.keys.key_set import KeySet
from seamark.metaserver.index.keys.keys import KeyRanges, Keys
from seamark.metaserver.index.kinds.questions import KEYS_MAX, Flags, Question
from seamark.metaserver.index.kinds.sparse import Range

Mask = npt.NDArray[np.bool_]

REMOTE_KEYS_MAX = 16
"""Keys that are looked for by hash in an index file that is read by range; for more the whole file is waited for."""


class Parameter(NamedTuple):
    """A number that a definition may give its kind."""

    name: str
    """Of lower-case letters, as in `bloom(c, fpp=0.001)` and `--fpp`; kinds that share a name share its meaning."""
    meaning: str
    default: float
    least: float
    most: float


class OpenedBlob(Protocol):
    """A blob in memory or mapped. Any number of threads may ask it."""

    @property
    def files(self) -> int:
        """Data files, which are named by their number."""
        ...

    def verify(self) -> None:
        """Reads everything. ValueError where anything is not as it was written."""
        ...


class BlobReader(Protocol):
    """Reads a blob that is not here, by range. ValueError for a range beyond it; errors of the storage."""

    @property
    def length(self) -> int:
        """Of the blob, in bytes."""
        ...

    async def read(self, start: int, length: int) -> bytes: ...

    async def read_all(self, ranges: Sequence[Range]) -> list[bytes] | None:
        """At once; None where that would take too many reads, or too many bytes."""
        ...

    async def read_head(self, size_of: Callable[[bytes], int]) -> bytes:
        """The blob's start, of at least the size that `size_of` reads from its first bytes."""
        ...

    async def read_tail(self, size_of: Callable[[bytes], int]) -> bytes:
        """The blob's end, of at least the size that `size_of` reads from its last bytes."""
        ...


class RemoteIndex(Protocol):
    """A blob that is not here, of which the directory was read."""

    @property
    def data_files(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """In memory; may grow with what it is asked."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether it has read about as much as it may keep; one that is opened anew has room."""
        ...

    async def ask(self, question: Any) -> Flags | None:
        """As the question is answered by a blob that is here; None where that would take too many reads. ValueError for
        damage; errors of the storage."""
        ...


Built = TypeVar("Built")
"""What is known of one data file; picklable."""
Opened = TypeVar("Opened", bound=OpenedBlob)


class IndexKind(ABC, Generic[Built, Opened]):
    name: str
    """Of lower-case letters: in definitions, in the registry, in the type of the blob, and as a stage of plans."""
    version: int = 1
    """Of the blob that is written and read; another is nobody's damage, but unknown."""
    alignment: int = 64
    """What the blob's offset in its file is a multiple of."""
    columns_max: int = 1
    """Terms of one definition."""
    parameters: tuple[Parameter, ...] = ()
    remote_values_max: int = REMOTE_KEYS_MAX
    """Values of a plan's predicates that are looked for by range."""
    answers_rows: bool = False
    """Whether rows within files are chosen by it. True only where `open` returns a `Bitmap`."""
    answers_keys: bool = False
    """Whether rows are looked up in it by key. True only where `open` returns a `Record`."""

    def takes(self, kind: str) -> bool:
        """Whether terms of this type can be indexed."""
        return True

    # Build and codec

    @abstractmethod
    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> Built:
        """Of one data file, whose keys these are, term by term. ValueError where it cannot be indexed."""

    @abstractmethod
    def encode(self, builts: Sequence[Built]) -> Iterable[Any]:
        """The buffers of a blob of these data files, in this order."""

    @abstractmethod
    def merge(self, parts: Sequence[tuple[Opened, Mask]]) -> Iterable[Any]:
        """The same of opened blobs, and bool[files] of those that are kept, each. ValueError for damage."""

    @abstractmethod
    def open(self, blob: memoryview) -> Opened:
        """The blob is kept alive. ValueError for one that is damaged."""

    async def open_remote(self, blob: BlobReader) -> RemoteIndex:
        """ValueError for a blob that is damaged, and for a kind that is not read by range."""
        raise ValueError(f"{self.name} indexes are not read by range")

    # Questions

    def supports(self, predicate: Bound) -> bool:
        """Whether `question` may make something of a predicate. By default of few equalities."""
        return predicate.op in (Op.EQ, Op.IN) and len(predicate.values) <= KEYS_MAX

    @abstractmethod
    def question(self, asked: Sequence[KeyRanges]) -> Question | None:
        """Whether there is a row with keys in these ranges, of each term in turn. None where the index cannot know."""

    @abstractmethod
    def question_of_keys(self, keys: KeySet) -> Question | None:
        """Whether there is a row with one of the keys of a join. None where the index would prove nothing."""

    # Audit

    def check_rows(self, index: Opened, rows: int) -> str | None:
        """What is wrong with its number of entries, for data files of so many rows."""
        return None

    def compare(self, index: Opened, number: int, columns: Sequence[Keys], sampled: Sequence[int]) -> Iterator[str]:
        """What is wrong with what it knows of a data file, whose keys these are, read again. `sampled`: rows whose
        first key is neither null nor NaN, for kinds that are compared key by key."""
        return iter(())
