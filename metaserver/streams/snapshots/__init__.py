"""Fresh snapshots that requests name: of this process, and of the other processes over the same storage."""
