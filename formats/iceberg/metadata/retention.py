"""The table properties that decide how long snapshots and orphan files are kept."""

from __future__ import annotations

MAX_SNAPSHOT_AGE, MAX_SNAPSHOT_AGE_DEFAULT_MS = "history.expire.max-snapshot-age-ms", 5 * 24 * 3_600_000
MIN_SNAPSHOTS = "history.expire.min-snapshots-to-keep"
MAX_REF_AGE = "history.expire.max-ref-age-ms"
MIN_ORPHAN_AGE, MIN_ORPHAN_AGE_DEFAULT_MS = "seamark.orphan-files.min-age-ms", 3 * 24 * 3_600_000
