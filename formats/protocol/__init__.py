"""Names, limits and encodings that both sides of the HTTP interface use."""
