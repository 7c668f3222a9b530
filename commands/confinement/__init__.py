"""Restricts the files that worker processes may open.

They may open the folders of their tables, and files for Python and the system.
"""
