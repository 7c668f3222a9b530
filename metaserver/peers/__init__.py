"""The peer tier, in which each immutable file is read from the storage once and shared by all replicas."""
