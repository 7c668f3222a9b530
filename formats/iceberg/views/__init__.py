"""View metadata and its updates."""
