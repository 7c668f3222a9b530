"""Rules of style, which `make lint` checks: the shape of files, names, and the words of texts."""
