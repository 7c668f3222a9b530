"""Restrict the files that worker processes can open.

They can open the folders of their tables, and files of Python and the system.
"""
