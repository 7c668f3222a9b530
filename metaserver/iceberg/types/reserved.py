"""Field ids that the format keeps for itself, in no schema (Iceberg spec, "Reserved Field IDs")."""

DELETED_PATH = 2147483546
"""`file_path` of position delete files: the data file that has the row."""
DELETED_POSITION = 2147483545
"""`pos` of position delete files: the row's number in it, from 0."""
ROW_ID = 2147483540
"""`_row_id`: which row it is, whatever file it is in."""
LAST_UPDATED_SEQUENCE_NUMBER = 2147483539
"""`_last_updated_sequence_number`: that of the commit that added the row or changed it last."""
