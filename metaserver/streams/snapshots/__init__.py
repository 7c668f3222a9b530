"""Fresh snapshots that requests name: snapshots of this process, and of the other processes on the same storage."""
