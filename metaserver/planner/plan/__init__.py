"""The planner: from a request to a scan, and to the files of a plan table."""
