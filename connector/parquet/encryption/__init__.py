"""Encrypts and decrypts Parquet files (parquet-format: Encryption.md), with keys of parquet-java's crypto.keytools."""
