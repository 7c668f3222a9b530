"""The objects gateway: an S3 endpoint in front of the object storage. Each of its keys gives access to one table."""
