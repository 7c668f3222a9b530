"""Rules of style that `make lint` checks: the shape of files, names, and the words of texts."""
