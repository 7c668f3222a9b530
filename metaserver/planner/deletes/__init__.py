"""Delete files: which data files they apply to, and which rows they delete."""
