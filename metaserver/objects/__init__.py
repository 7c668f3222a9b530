"""Object storage: one port with implementations for local files and S3, and what clients need to access it
themselves.
"""
