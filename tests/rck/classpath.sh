#!/usr/bin/env bash
# Prints the classpath of the compliance kit, resolved once by Maven into .cache/rck/classpath.txt (again when pom.xml changes or a jar went away).
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../../.cache/rck/classpath.txt
first=$(cut -d: -f1 "$out" 2>/dev/null)
if [ ! -s "$out" ] || [ "$here/pom.xml" -nt "$out" ] || [ ! -e "$first" ]; then
  mkdir -p "$(dirname "$out")"
  mvn -q -B -f "$here/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:build-classpath -Dmdep.outputFile="$out" >&2 || exit 1
fi
cat "$out"
