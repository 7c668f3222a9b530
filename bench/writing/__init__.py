"""Writers and readers, measured beside Iceberg's, PyIceberg's and Hudi's own. One script a question."""
