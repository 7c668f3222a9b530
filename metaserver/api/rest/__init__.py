"""Routes of the Iceberg REST specification, except scan planning."""
