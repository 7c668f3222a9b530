"""Field ids that the format reserves, which no schema contains (Iceberg spec, "Reserved Field IDs")."""

FILE_PATH = 2147483646
"""Field `_file`: the path of the data file that contains the row."""
DELETED_PATH = 2147483546
"""Field `file_path` of position delete files: the data file of the row."""
DELETED_POSITION = 2147483545
"""Field `pos` of position delete files: the row's position in the file, from 0."""
ROW_ID = 2147483540
"""Field `_row_id`: the row's id, which stays the same when the row moves to another file."""
LAST_UPDATED_SEQUENCE_NUMBER = 2147483539
"""Field `_last_updated_sequence_number`: the number of the commit that added or last changed the row."""
