"""Table metadata, its updates and requirements."""
