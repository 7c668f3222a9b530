"""Random histories of tables with columns of all types, and a model of their rows."""
