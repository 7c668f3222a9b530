"""Copies column chunks of Parquet files into other files, without decoding them."""
