"""Planning: from a scan request to a `Scan`, and to the files of a plan table."""
