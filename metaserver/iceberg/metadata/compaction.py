"""What a compaction considers worth a rewrite: the server that proposes it and the client that does it agree."""

from __future__ import annotations

ENABLED = "seamark.compaction.enabled"
MIN_FILES, MIN_FILES_DEFAULT = "seamark.compaction.min-files", 5
"""The number of small files of a partition from which on they are merged."""
SMALL = 0.75
"""A file below this part of the target size is small."""
DELETED = 0.1
"""Part of the rows: a file, or a table, of which so many are deleted is worth a rewrite."""
