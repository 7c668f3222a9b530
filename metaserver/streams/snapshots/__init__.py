"""Fresh snapshots that requests name by their id, created by this process or by other processes on the same storage."""
