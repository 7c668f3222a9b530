"""The declaration of a toy table service, in the form of `formats/services/services.py`."""

from __future__ import annotations

from seamark.formats.services.service import ServiceProperty, TableService, require_whole_number

MIN_FILES = "seamark.labelling.min-files"
LABEL = "toy.data-files"
"""The table property that the service writes."""

LABELLING_SERVICE = TableService(
    name="labelling",
    command="label",
    summary="writes the number of data files into a table property",
    priority=4,
    setting_help="Label tables without the property seamark.labelling.enabled.",
    properties=(ServiceProperty(MIN_FILES, "2", require_whole_number(MIN_FILES)),),
)
