"""Tests of Iceberg's REST routes: namespaces, tables, views, functions, transactions."""
