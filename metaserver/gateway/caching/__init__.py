"""The objects gateway's cache: ranges of immutable objects in memory and on the local disk."""
