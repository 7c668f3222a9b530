"""The objects gateway: an S3 endpoint in front of the object storage, whose keys are each for one table."""
