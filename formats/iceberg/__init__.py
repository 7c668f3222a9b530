"""Iceberg's own objects, pure: metadata of tables and views, update actions and requirements. No I/O."""
