"""Small files and requests that would take much memory: each is rejected or answered within a limit."""
