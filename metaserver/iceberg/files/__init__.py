"""Parquet and Puffin, as far as their metadata is read here."""
