"""The data source `format("seamark")` of PySpark."""
