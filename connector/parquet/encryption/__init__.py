"""Modular encryption of Parquet files (parquet-format: Encryption.md), and its keys (parquet-java: crypto.keytools)."""
