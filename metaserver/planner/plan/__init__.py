"""Planning: from a scan request to a `ScanPlan`, and to the files of a plan table."""
