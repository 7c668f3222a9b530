"""Tests of the Iceberg REST routes with a real store and real files, compared with the specification."""
