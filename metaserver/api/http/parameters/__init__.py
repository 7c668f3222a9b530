"""What a request names: the names in its path, pages, snapshots, the audience of its plans."""
