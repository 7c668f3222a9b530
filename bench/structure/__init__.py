"""Count the files and functions that a request runs through."""
