"""`format("seamark")`: the data source of PySpark."""
