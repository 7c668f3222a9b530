"""Delete files: which apply to which data files, and what they delete."""
