"""Routes of stream tables."""
