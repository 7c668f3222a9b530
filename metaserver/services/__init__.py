"""Table services: housekeeping of the catalog, and jobs that maintain tables."""
