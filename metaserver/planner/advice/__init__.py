"""Advice about how a scan would read fewer files, for people who read the explanation of its plan."""
