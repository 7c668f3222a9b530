"""A tree of groups of data files in several levels, like the levels of an LSM tree.

A group of the lowest level ends after a file whose identity ends with a certain number of zero bits. For each higher
level, this number is larger. So the groups depend only on the identities and their order: if a commit adds or removes a
file, only the groups with this file change, one group in each level. All snapshots and branches share the unchanged
groups. The functions are pure.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint64]
"""uint64[files, 2]: the identities of data files (`hashing.compute_file_ids`)."""

GROUP_BITS = 5
"""The number of zero bits for one level. A group has 2^5 = 32 members on average: files, or groups of a lower level."""
_LEVELS_MAX = 8
_DIGEST_BYTES = 16


class FileGroup(NamedTuple):
    """Neighbouring files of a tree, from the number `first` up to and not including `end`.

    The tree divides the files of a table into groups by the ids of the files, so that a commit changes few groups.
    The members of a group of level 1 are files. The members of a higher group are groups of the next lower level.
    """

    level: int
    first: int
    end: int


class FileTree:
    """The groups of a sequence of data files, as a tree. An instance is immutable.

    The ids of the files decide where groups end. So an added or removed file changes only the groups around it.

    Args:
        ids: The identities of the files.
        sources: uint64[files], a hash of the index file that has the entry of each data file.
    """

    def __init__(self, ids: Ids, sources: npt.NDArray[np.uint64]) -> None:
        self.ids = ids
        self._sources = sources
        self._ends = _find_ends(ids)

    @property
    def root(self) -> FileGroup:
        """The group of all files."""
        return FileGroup(len(self._ends), 0, len(self.ids))

    def list_subgroups(self, group: FileGroup) -> list[FileGroup]:
        """Return the groups of the next lower level. A group of level 1 has none."""
        if group.level == 1:
            return []
        ends = self._ends[group.level - 2]
        first, last = np.searchsorted(ends, [group.first, group.end], side="right").tolist()
        starts = [group.first, *ends[first:last].tolist()]
        return [FileGroup(group.level - 1, start, end) for start, end in pairwise(starts)]

    def digest(self, group: FileGroup) -> str:
        """Return a text that identifies the files of the group, their order, and their index files."""
        files, sources = (
            np.ascontiguousarray(values[group.first : group.end], dtype="<u8").tobytes()
            for values in (self.ids, self._sources)
        )
        return blake2b(files + sources, digest_size=_DIGEST_BYTES).hexdigest()

    def is_closed(self, group: FileGroup) -> bool:
        """Return whether the group stays the same if files are added before and after the files of the tree.

        A tree divides files into groups, and these into larger groups of the next level. The id of a file decides
        whether the file ends a group.

        The first group may begin with an earlier file. The last group ends for certain only if its last file ends a
        group of this level.
        """
        if group.first == 0 or group.level > len(self._ends):
            return False
        return group.end < len(self.ids) or _find_group_ends(self.ids[-1:], group.level)[0].item()


def _find_ends(ids: Ids) -> list[npt.NDArray[np.int64]]:
    """Return the ends of the groups of each level, beginning with level 1. The highest level has one group."""
    levels = []
    for level in range(1, _LEVELS_MAX + 1):
        ends = np.flatnonzero(_find_group_ends(ids, level)) + 1
        if level == _LEVELS_MAX:  # The highest level has one group, which ends after the last file.
            ends = ends[:0]
        if not len(ends) or ends[-1] != len(ids):
            ends = np.append(ends, len(ids))
        levels.append(ends)
        if len(ends) == 1:
            break
    return levels


def _find_group_ends(ids: Ids, level: int) -> npt.NDArray[np.bool_]:
    """Return bool[files]: whether a group of the level ends after each file.

    It ends if the last bits of the file's id are zero, `GROUP_BITS` bits for each level. Ids are hashes, so this is
    random, but always the same for a file.
    """
    is_end: npt.NDArray[np.bool_] = (ids[:, 1] & np.uint64((1 << (GROUP_BITS * level)) - 1)) == 0
    return is_end
