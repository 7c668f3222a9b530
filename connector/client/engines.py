"""Generates the configuration of engines for a server, as values, and as text that can be used unchanged.

Tests, the demo and the docs use the same values, so users copy tested settings. With authentication, the texts read the
bearer token from the environment variable `SEAMARK_TOKEN`, so no file contains the token.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
CATALOG_CLASS = "org.apache.iceberg.spark.SparkCatalog"
RUNTIME = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
"""The Maven coordinates of Iceberg for Spark 4.1."""
NO_HIVE = {"spark.sql.catalogImplementation": "in-memory"}
"""The option that makes spark-sql work without a Hive metastore.

By default, spark-sql creates a Hive metastore in the current folder, and a second shell in the same folder fails.
"""
TOKEN = "SEAMARK_TOKEN"  # noqa: S105  the name of a variable
TRUST_STORE = "seamark-trust.jks"
"""The name of a trust store with Java's authorities and the server's authority, in the folder of the engine."""


def build_catalog_conf(
    name: str, uri: str, *, warehouse: str = "", token: str = "", extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the Spark settings that make `name` a catalog of the server at `uri` (http://host:port).

    Spark's table cache is off, so each query sees all earlier commits. Seamark answers with status 304 if a table has
    not changed. Seamark may return residuals that are weaker than the filter, because Spark filters rows again after
    Iceberg. With `rest-catalog-purge`, the catalog executes `DROP TABLE … PURGE`.

    Args:
        name: The name of the catalog in Spark.
        uri: The URL of the server.
        warehouse: The name of the warehouse, or "" for the default.
        token: A bearer token, or "" for a server without login.
        extra: Catalog properties without the prefix, such as `s3.endpoint`.
    """
    properties = {"type": "rest", "uri": uri, "cache-enabled": "false", "rest-catalog-purge": "true"}
    properties["header.X-Seamark-Residuals"] = "short"
    if warehouse:
        properties["warehouse"] = warehouse
    if token:
        properties |= {"token": token, "rest.auth.type": "oauth2", "oauth2-server-uri": f"{uri}/v1/oauth/tokens"}
    properties |= extra or {}
    prefix = f"spark.sql.catalog.{name}"
    return {prefix: CATALOG_CLASS} | {f"{prefix}.{key}": value for key, value in properties.items()}


def format_connection(
    engine: str, name: str, uri: str, *, has_token: bool, on_s3: bool = False, authority: str = ""
) -> str:
    """Return the configuration of an engine of `ENGINES` for the catalog `name`.

    Args:
        on_s3: Whether the tables are in S3.
        authority: A file (PEM) with the authority of the server's certificate, if the system does not know it.
    """
    configure = _configure_trino_on_s3 if engine == "trino" and on_s3 else _CONFIGURATIONS[engine]
    text = configure(name, uri, has_token)
    return _add_authority(engine, text, authority) if authority and uri.startswith("https:") else text


def _add_authority(engine: str, text: str, authority: str) -> str:
    """Return the configuration with further settings that make the engine trust the authority.

    Engines in Java need a copy of Java's trust store with the certificate, and an option with its path. DuckDB has no
    such setting.
    """
    if engine == "pyiceberg":
        text = text.replace('type="rest",', f'type="rest", ssl={{"cabundle": {authority!r}}},')
        return f"# With s3fs, which remote signing needs, set REQUESTS_CA_BUNDLE={authority}, too.\n{text}"
    if engine == "duckdb":
        return text
    file, option = shlex.quote(authority), f"-Djavax.net.ssl.trustStore={TRUST_STORE}"
    commands = (
        f'cp "$JAVA_HOME/lib/security/cacerts" {TRUST_STORE} && chmod u+w {TRUST_STORE}\n'
        f"keytool -importcert -noprompt -alias seamark -file {file} -keystore {TRUST_STORE} -storepass changeit\n"
    )
    if engine == "spark":
        options = " \\\n  ".join(
            f"--conf spark.{process}.extraJavaOptions={option}" for process in ("driver", "executor")
        )
        return f"{commands}{text} \\\n  {options}"
    comment_lines = "".join(f"# {line}\n" for line in commands.splitlines())
    if engine == "pyspark":
        lines = "".join(
            f"    .config('spark.{process}.extraJavaOptions', '{option}')\n" for process in ("driver", "executor")
        )
        return comment_lines + text.replace("    .getOrCreate()", f"{lines}    .getOrCreate()")
    return f"{comment_lines}# Add to etc/jvm.config, with the path of the file: {option}\n{text}"


def _configure_spark(name: str, uri: str, has_token: bool) -> str:
    token = f"${TOKEN}" if has_token else ""
    conf = {**NO_HIVE, "spark.sql.extensions": EXTENSIONS, **build_catalog_conf(name, uri, token=token)}
    # The setting with the token is in double quotes, so that the shell inserts the token.
    flags = [
        f'--conf "{key}={value}"' if value.startswith("$") else f"--conf {shlex.quote(f'{key}={value}')}"
        for key, value in conf.items()
    ]
    return " \\\n  ".join([f"spark-sql --packages {RUNTIME}", *flags])


def _configure_pyspark(name: str, uri: str, has_token: bool) -> str:
    conf = {
        "spark.jars.packages": RUNTIME,
        "spark.sql.extensions": EXTENSIONS,
        **build_catalog_conf(name, uri, token=TOKEN if has_token else ""),
    }
    lines = [
        f"    .config({key!r}, os.environ[{TOKEN!r}])" if value == TOKEN else f"    .config({key!r}, {value!r})"
        for key, value in conf.items()
    ]
    head = "import os\n\n" if has_token else ""
    head += "from pyspark.sql import SparkSession\n\nspark = (\n    SparkSession.builder\n"
    return head + "\n".join(lines) + f'\n    .getOrCreate()\n)\nspark.sql("SHOW NAMESPACES IN {name}").show()'


def _configure_pyiceberg(name: str, uri: str, has_token: bool) -> str:
    head = "import os\n\n" if has_token else ""
    token = f', token=os.environ["{TOKEN}"]' if has_token else ""
    return (
        f"{head}from pyiceberg.catalog import load_catalog\n\n"
        f'catalog = load_catalog("{name}", type="rest", uri="{uri}"{token})\n'
        "print(catalog.list_namespaces())"
    )


def _configure_trino(name: str, uri: str, has_token: bool) -> str:
    """Return the configuration of Trino for tables in local files. Trino must run on the server's machine."""
    return _format_properties(
        name, build_trino_properties(uri, has_token) | {"fs.native-local.enabled": "true", "local.location": "/"}
    )


def _configure_trino_on_s3(name: str, uri: str, has_token: bool) -> str:
    """Return the configuration of Trino for tables in S3. Trino reads and writes S3 with its own keys."""
    return _format_properties(
        name,
        build_trino_properties(uri, has_token)
        | {
            "fs.native-s3.enabled": "true",
            "s3.endpoint": "${ENV:S3_ENDPOINT}",
            "s3.region": "${ENV:S3_REGION}",
            "s3.path-style-access": "true",
            "s3.aws-access-key": "${ENV:S3_ACCESS_KEY}",
            "s3.aws-secret-key": "${ENV:S3_SECRET_KEY}",
        },
    )


def build_trino_properties(uri: str, has_token: bool) -> dict[str, str]:
    """Return the properties of a Trino catalog, except those of its file system."""
    properties = {
        "connector.name": "iceberg",
        "iceberg.catalog.type": "rest",
        "iceberg.rest-catalog.uri": uri,
    }
    if has_token:
        properties["iceberg.rest-catalog.security"] = "OAUTH2"
        properties["iceberg.rest-catalog.oauth2.token"] = f"${{ENV:{TOKEN}}}"
    return properties | {
        "iceberg.rest-catalog.nested-namespace-enabled": "true",
        "iceberg.rest-catalog.view-endpoints-enabled": "true",
    }


def _format_properties(name: str, properties: Mapping[str, str]) -> str:
    lines = "\n".join(f"{key}={value}" for key, value in properties.items())
    return f"# etc/catalog/{name}.properties\n{lines}"


def _configure_duckdb(name: str, uri: str, has_token: bool) -> str:
    """Return the configuration of DuckDB's shell, which is the only DuckDB client with `getenv`.

    INSTALL downloads the extension once.
    """
    options = f"TYPE iceberg, ENDPOINT '{uri}', ACCESS_DELEGATION_MODE 'none'"
    login = ""
    if has_token:
        login = "-- Only DuckDB's shell has getenv. In other clients, write the token itself in quotes.\n"
        login += f"CREATE SECRET (TYPE iceberg, TOKEN getenv('{TOKEN}'));\n"
    options += "" if has_token else ", AUTHORIZATION_TYPE 'none'"
    cache = "-- DuckDB 1.5.5 returns wrong rows of tables with deletion vectors if its cache of files is on.\n"
    cache += "SET GLOBAL enable_external_file_cache = false;\n"
    return f"INSTALL iceberg; LOAD iceberg;\n{cache}{login}ATTACH '' AS {name} ({options});\nSHOW ALL TABLES;"


_CONFIGURATIONS: dict[str, Callable[[str, str, bool], str]] = {
    "spark": _configure_spark,
    "pyspark": _configure_pyspark,
    "pyiceberg": _configure_pyiceberg,
    "trino": _configure_trino,
    "duckdb": _configure_duckdb,
}
"""The functions that return the output of `seamark connect`, by engine.

Their arguments are the name of the catalog, the URI, and whether there is a token.
"""
ENGINES = tuple(_CONFIGURATIONS)
