"""Contains the routes of the Iceberg REST specification, except scan planning."""
