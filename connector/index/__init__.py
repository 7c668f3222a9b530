"""Index files: built from data files, merged, verified and audited."""
