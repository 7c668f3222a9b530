"""What worker processes may open: the folders of their tables, and what Python and the system need."""
