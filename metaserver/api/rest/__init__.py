"""The routes of the Iceberg REST specification, but for scan planning."""
