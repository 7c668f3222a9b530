"""Names, limits and encodings that both ends of the HTTP interface share."""
