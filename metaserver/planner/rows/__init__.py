"""Row lookups by key and by predicate, and the deletes that apply to rows."""
