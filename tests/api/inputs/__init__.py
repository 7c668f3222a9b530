"""Invalid inputs, grouped by the routes that reject them (`tests/api/bad_inputs.py`)."""
