"""Routes of changes, of the timeline and of dropped entries."""
