"""Plan tables for whole queries, of whichever engine: which are worth asking for, and the questions of one query."""
