"""What is extracted from Trino statements, and how they are rewritten."""
