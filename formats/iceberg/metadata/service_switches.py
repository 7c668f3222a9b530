"""The properties of tables and namespaces that switch table services on or off."""

from __future__ import annotations

BUCKET_SPLITTING_ENABLED = "seamark.bucket-splitting.enabled"
CLUSTERING_ENABLED = "seamark.clustering.enabled"
COLUMN_TTL_ENABLED = "seamark.column-ttl.enabled"
COMPACTION_ENABLED = "seamark.compaction.enabled"
EXPIRATION_ENABLED = "seamark.expiration.enabled"
MANIFESTS_ENABLED = "seamark.manifests.enabled"
ORPHAN_FILES_ENABLED = "seamark.orphan-files.enabled"
STATISTICS_ENABLED = "seamark.statistics.enabled"
