#!/bin/bash
# Starts Trino on this machine as a client of a Seamark server. It uses the jars that `make trino` fetched, and the files of deploy/trino/etc.
#
#   make trino                                        once: Trino from Maven Central
#   deploy/trino/run.sh                               over http://127.0.0.1:8181, at http://127.0.0.1:8081, until Ctrl-C
#   SEAMARK_URI=http://host:8181 SEAMARK_TOKEN=… TRINO_PORT=8090 deploy/trino/run.sh
#
# It needs a JDK 25, in the folder JAVA25 or below /usr/lib/jvm. TRINO_DATA is the folder of Trino's files, by default .cache/trino-data.
# The catalog is `seamark`. Tables on local files are read below TRINO_LOCAL_LOCATION, by default /; for S3, set S3_ENDPOINT, S3_REGION,
# S3_ACCESS_KEY and S3_SECRET_KEY.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
etc=$root/deploy/trino/etc
jars=$root/.cache/trino
data=${TRINO_DATA:-$root/.cache/trino-data}
fail() { echo "$1" >&2; exit 1; }

ls "$jars"/lib/trino-main-*.jar "$jars"/plugin/iceberg/trino-iceberg-*.jar >/dev/null 2>&1 || fail "No Trino in $jars: run make trino"
if [ -z "${JAVA25:-}" ]; then
  release=$(grep -lE '^JAVA_VERSION="(2[5-9]|[3-9][0-9])' /usr/lib/jvm/*/release 2>/dev/null | head -1 || true)
  JAVA25=${release%/release}
fi
[ -n "$JAVA25" ] && [ -x "$JAVA25/bin/java" ] || fail "Trino needs a JDK 25: install one below /usr/lib/jvm, or set JAVA25 to its home"
version=$(sed -n 's/^JAVA_VERSION="\([0-9]*\).*/\1/p' "$JAVA25/release" 2>/dev/null || true)
[ "${version:-25}" -ge 25 ] || fail "Trino needs a JDK 25, and JAVA25=$JAVA25 is version $version: set it to the home of a JDK 25"

export SEAMARK_URI=${SEAMARK_URI:-http://127.0.0.1:8181} SEAMARK_TOKEN=${SEAMARK_TOKEN:-unused} SEAMARK_PLANS=${SEAMARK_PLANS:-trino}
export TRINO_PORT=${TRINO_PORT:-8081} TRINO_LOCAL_LOCATION=${TRINO_LOCAL_LOCATION:-/}
export S3_ENDPOINT=${S3_ENDPOINT:-http://127.0.0.1:1} S3_REGION=${S3_REGION:-us-east-1}
export S3_ACCESS_KEY=${S3_ACCESS_KEY:-none} S3_SECRET_KEY=${S3_SECRET_KEY:-none}

# Trino finds a plugin by a service entry, which its archive adds to the jars.
mkdir -p "$data/plugin/iceberg"
ln -sf "$jars"/plugin/iceberg/*.jar "$data/plugin/iceberg/"
entry=$data/plugin/iceberg/seamark-service-entry.jar
rm -f "$entry"
python3 - "$entry" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1], "w") as jar:
    jar.writestr("META-INF/services/io.trino.spi.Plugin", "io.trino.plugin.iceberg.IcebergPlugin\n")
PYTHON

options=()
while IFS='=' read -r key value; do
  case $key in ''|'#'*) ;; *) options+=("-D$key=$value") ;; esac
done < "$etc/node.properties"
cd "$data"
exec "$JAVA25/bin/java" "@$etc/jvm.config" -cp "$jars/lib/*" "${options[@]}" \
  -Dnode.data-dir="$data" -Dnode.bind-ip=127.0.0.1 -Dnode.internal-address=127.0.0.1 -Dconfig="$etc/config.properties" \
  -Dlog.levels-file="$etc/log.properties" -Dlog.enable-console=true -Dcatalog.config-dir="$etc/catalog" \
  -Dplugin.dir="$data/plugin" "$root/deploy/trino/main/TrinoMain.java"
