"""Plan requests for the tables of a query, of any engine."""
