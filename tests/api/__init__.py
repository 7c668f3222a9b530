"""The Iceberg REST routes over a real store and real files, held against the specification."""
