"""The peer tier: each immutable file is read from the storage once, and shared by all replicas."""
