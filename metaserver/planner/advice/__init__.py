"""Advice on layouts and indexes with which a scan would read fewer files, for the explanation of its plan."""
