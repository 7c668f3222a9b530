"""Tests of the writers: appends, upserts, deletes, buckets, clustering."""
