"""What would make a scan read fewer files, for people who read the explanation of its plan."""
