"""Routes and wire formats only: Iceberg REST and our own /api/v1."""
