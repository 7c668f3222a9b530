"""Index files: read, registered, opened, cleaned; and index definitions."""
