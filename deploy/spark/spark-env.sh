#!/usr/bin/env bash
# The token reaches the driver as a Spark property, without standing in a file.
if [ -n "${SEAMARK_TOKEN:-}" ]; then
  export SPARK_SUBMIT_OPTS="${SPARK_SUBMIT_OPTS:-} -Dspark.sql.catalog.seamark.token=${SEAMARK_TOKEN}"
fi
