"""Object stores of clouds through obstore: what they share, Azure Data Lake Storage, and Google Cloud Storage."""
