"""Routes and wire formats of the HTTP API: Iceberg REST under /v1, and Seamark's API under /api/v1."""
