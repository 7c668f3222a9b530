"""Keys: the one form in which every index sees values."""
