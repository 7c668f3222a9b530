"""The objects gateway: an S3 endpoint in front of the object storage, with keys of the catalog for one table each."""
