"""The parameters of a request: the names in its path, pages, snapshots, and the audience of its plans."""
