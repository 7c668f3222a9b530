"""The index kinds. Each module builds, encodes, merges and queries the indexes of a kind."""
