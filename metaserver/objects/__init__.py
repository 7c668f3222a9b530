"""Object storage: a port with implementations for local files and S3, and the access of clients."""
