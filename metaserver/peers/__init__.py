"""The peer tier: replicas read immutable files from the storage once for all of them."""
