"""Random lives of tables of all types, with a model of their rows."""
