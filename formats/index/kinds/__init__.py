"""The index kinds. The module of a kind builds, encodes, merges and queries its indexes."""
