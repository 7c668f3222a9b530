"""Rules of style that `make lint` checks: the layout of files, names, and the words of texts."""
