"""HDFS as a storage of the server."""
