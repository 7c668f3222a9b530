"""The backend of the gateway for clouds that are not S3: Azure, and Google Cloud Storage."""
