"""Iceberg's own objects: metadata of tables and views, update actions and requirements.

The functions have no side effects and do no I/O.
"""
