"""Routes of indexes, bitmaps and lookups."""
