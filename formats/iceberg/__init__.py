"""Iceberg's own objects: metadata of tables and views, update actions and requirements.

All are pure, without I/O.
"""
