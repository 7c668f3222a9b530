"""Seamark from PySpark: sessions, readers, writers and jobs. `seamark.spark` is its interface."""

from seamark.connector.spark.archives import install_archive_finders

install_archive_finders()  # Python workers of Spark import this package before any other module of Seamark.
