"""Writers: appends, upserts, deletes, buckets, clustering."""
