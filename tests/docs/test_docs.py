"""The pages are correct: their commands run, their links lead somewhere, their settings exist."""

from __future__ import annotations

import re
import shlex
from codeop import CommandCompiler
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bench.connect import format_trino as trino_snippet
from seamark.commands.main import cli
from seamark.connector.client.engines import EXTENSIONS, NO_HIVE, build_catalog_conf
from seamark.formats.runtime import errors
from seamark.formats.runtime.tls import CA_VARIABLE
from seamark.metaserver.access.certificates.rules import read_rules
from seamark.metaserver.api.http.observability.metrics import ServerMetrics
from seamark.metaserver.settings.issuers import read_issuers
from seamark.metaserver.settings.settings import FIELDS, Settings, make_variable_name
from seamark.metaserver.settings.sources import CONFIG_VARIABLE, resolve_settings
from tests.docs.commands import list_subcommands
from tests.docs.pages import REPO, Block, Page, read_all_pages
from tests.docs.runner import EXECUTED_PAGES, check_output, read_spark_conf
from tests.services.process import DEPLOY

PAGES = read_all_pages()
PAGES_OF_FIELDS = {
    "settings.md",
    "bad-inputs.md",
    "timeline.md",
    "database-schema.md",
    "glossary.md",
}
"""Pages with names of fields and columns, which look like settings. Other tests check these pages."""
SETTING_LIKE = re.compile(r"([a-z0-9]+(?:_[a-z0-9]+)+)(?: = .*)?$")
NOT_SETTINGS = {
    *("client_id", "client_secret", "error_description"),  # OAuth
    *("max_connections", "synchronous_commit", "pg_dump"),  # PostgreSQL
    *("drop_table", "purge_table", "remove_orphan_files", "expire_snapshots", "rewrite_data_files"),  # engines
    *("compute_table_stats", "total_record_count"),
    "overwrite_partitions",  # seamark.connector.write.appends
    *("merge_files", "read_environment_keys"),  # seamark.spark.write, seamark.connector.parquet.encryption.keys
    "file_keys",  # seamark.connector.write.upserts
    *("file_path", "delete_files"),  # seamark.connector.client.row_answers
    *(
        "can_browse",
        "can_plan",
        "can_list",
        "deny_browse",
        "deny_plan",
        "manage_grants",
        "higher_consistency",
    ),  # OpenFGA
    *("add_files", "current_user", "current_date"),  # PyIceberg, Trino
    *("approx_distinct", "approx_count_distinct"),  # Trino, Spark and DuckDB
    *(
        "allow_unsigned_extensions",
        "default_collation",
        "old_implicit_casting",
        "read_parquet",
        "list_contains",
    ),  # DuckDB
    *("timeout_s", "size_bytes"),  # examples of names
    *("memory_eviction", "memory_rejection", "disk_eviction", "disk_damage"),  # Values of a metric's label.
    *("disk_write_dropped", "served_bytes", "preloaded_file", "preloaded_byte", "hedged_read"),
    *("bytes_wasted", "wasted_by"),  # Totals of a job.
    *("wrap_key", "unwrap_key"),  # pyarrow's KmsClient
}
"""Words in inline code that look like settings but are not."""


def test_python_block_can_be_pasted_into_an_interactive_interpreter() -> None:
    """Before Python 3.13, an empty line ends a loop in the interpreter.

    So an empty line must follow each loop, and no loop may contain an empty line.
    """
    blocks = [(page, block) for page in PAGES for block in page.blocks if block.language == "python"]
    assert len(blocks) > 50  # With a broken search for blocks, the test would check nothing.
    for page, block in blocks:
        pasted_lines: list[str] = []
        compiler = CommandCompiler()
        for number, line in enumerate([*block.text.splitlines(), ""], block.line + 1):
            pasted_lines.append(line)
            try:
                if compiler("\n".join(pasted_lines), symbol="single") is not None:
                    pasted_lines = []
            except SyntaxError as error:
                pytest.fail(f"{page}:{number}: {error.msg}; put an empty line before it")
        assert not any(pasted_lines), f"{page}:{block.line}: the last statement is incomplete"


def test_page_that_creates_shop_tables_tells_the_reader_to_use_a_new_folder() -> None:
    """Two pages in the same folder would both create `shop.orders`."""
    for page in EXECUTED_PAGES:
        starts_server = any(block.mark == "run: server" and "./seamark-home" in block.text for block in page.blocks)
        creates_table = any("shop" in block.text for block in page.blocks if block.mark)
        if starts_server and creates_table and page.path.name != "README.md":
            text_above, warning_text, _ = page.text.partition("Use a new folder for this page")
            assert warning_text, page
            assert text_above.count("\n") < min(block.line for block in page.blocks if block.mark), page


def _find_wrong_links(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.path if not path else (page.path.parent / path).resolve()
        if not target.exists() or REPO not in (target, *target.parents):
            yield f"{page}: {link}: no such file"
        elif anchor and anchor not in pages.setdefault(target, Page(target)).anchors:
            yield f"{page}: {link}: no such heading"


def test_relative_links_lead_to_a_file_and_a_heading() -> None:
    pages = {page.path: page for page in PAGES}
    assert [wrong_link for page in PAGES for wrong_link in _find_wrong_links(page, pages)] == []


def test_every_page_is_linked_from_the_readme() -> None:
    paths: set[Path] = set()
    waiting_pages = [REPO / "README.md"]
    while waiting_pages:
        path = waiting_pages.pop()
        if path in paths or path.suffix != ".md":
            continue
        paths.add(path)
        waiting_pages += [
            (path.parent / link.partition("#")[0]).resolve() for link in Page(path).links if ":" not in link
        ]
    assert {page.path for page in PAGES} - paths == set()


def test_cells_of_other_catalogs_are_unknown_or_name_the_source_of_a_release() -> None:
    text = (REPO / "docs" / "explanation" / "comparison.md").read_text()
    rows = [line.strip("|").split("|") for line in text.partition("\n## Features\n")[2].splitlines() if line[:1] == "|"]
    source = re.compile(
        r"\]\(https://github\.com/[\w.-]+/[\w.-]+/blob/(?:v\d[\w.]*|[\w-]+-\d[\w.]*|[0-9a-f]{40})/[^)]+\)"
    )
    cells = [(row[0].strip(), cell.strip()) for row in rows[2:] for cell in row[2:]]
    assert len(cells) > 100
    assert [cell for cell in cells if cell[1] != "unknown" and not source.search(cell[1])] == []


def test_environment_variables_of_the_pages_are_settings() -> None:
    known_environment_names = {make_variable_name(name) for name in FIELDS} | {
        CONFIG_VARIABLE,
        CA_VARIABLE,
        "SEAMARK_TOKEN",
        "SEAMARK_URL",
    }
    # Variables of seamark sql.
    known_environment_names |= {
        "SEAMARK_SQL_TRINO",
        "SEAMARK_SQL_SPARK",
        "SEAMARK_TRINO_PASSWORD",
    }
    # Variables of Seamark's clients.
    known_environment_names |= {"SEAMARK_CLIENT_CERT", "SEAMARK_CLIENT_KEY"}
    # A variable of seamark import and seamark export.
    known_environment_names |= {"SEAMARK_CATALOG_TOKEN"}
    # Variables of seamark trino-proxy and of deploy/trino/run.sh.
    known_environment_names |= {"SEAMARK_PLANS", "SEAMARK_URI"}
    names = {(str(page), name) for page in PAGES for name in re.findall(r"\bSEAMARK_[A-Z0-9_]+\b", page.text)}
    assert {(page, name) for page, name in names if name not in known_environment_names} == set()


def test_names_in_the_documentation_with_the_form_of_settings_are_settings() -> None:
    kinds = {kind.kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "kind")}
    known_names = FIELDS.keys() | kinds | NOT_SETTINGS
    names_with_pages = {
        (str(page), match[1])
        for page in PAGES
        for code in page.inline_code
        if (match := re.match(r"([a-z0-9]+(?:_[a-z0-9]+)+)(?: = .*)?$", code))
        if page.path.name not in PAGES_OF_FIELDS
    }
    assert {
        (page, name) for page, name in names_with_pages if name not in known_names and not name.startswith("seamark_")
    } == set()


def _list_toml_blocks() -> list[tuple[Page, Block]]:
    return [(page, block) for page in PAGES for block in page.blocks if block.language == "toml"]


TOML = [pytest.param(page, block, id=f"{page}:{block.line}") for page, block in _list_toml_blocks()]


@pytest.mark.parametrize(("page", "block"), TOML)
def test_settings_file_in_the_pages_is_accepted(page: Page, block: Block, tmp_path: Path) -> None:
    file = tmp_path / "seamark.toml"
    file.write_text(block.text)
    if block.text.startswith("[[issuer]]"):
        assert read_issuers(Settings(oidc_issuers_file=str(file)))
    elif block.text.startswith("[[rule]]"):
        assert read_rules(Settings(tls_client_rules_file=str(file)))
    else:
        resolve_settings({}, {}, file)


def _list_commands() -> list[tuple[str, list[str]]]:
    """Return the place and the words of every `seamark …` command in the bash blocks."""
    places_and_words = []
    for page in PAGES:
        for block in page.blocks:
            if block.language != "bash":
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                for arguments in re.findall(r"(?:^|[\s(])(?:\S*/)?seamark((?: (?:\"[^\"]*\"|[^|&;#)])*)?)", line):
                    words = shlex.split(arguments)
                    if words and not line.lstrip().startswith(("#", "docker", "helm", "kubectl")):
                        places_and_words.append((f"{page}:{block.line}", words))
    return places_and_words


def test_seamark_commands_of_the_pages_exist_with_their_flags() -> None:
    commands = _list_commands()
    assert len(commands) > 5
    for place, words in commands:
        command: click.Command = cli
        offset = 0
        while isinstance(command, click.Group):
            assert words[offset : offset + 1], f"{place}: {words} is an incomplete command"
            assert words[offset] in list_subcommands(command), f"{place}: no such command: {words}"
            command, offset = list_subcommands(command)[words[offset]], offset + 1
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
        for word in words[offset:]:
            if word.startswith("--"):
                assert word.partition("=")[0] in flags, f"{place}: {' '.join(words[:offset])} has no option {word}"


def test_spark_configurations_of_the_page_the_tests_and_the_demo_are_equal() -> None:
    page = Page(REPO / "docs" / "how-to" / "connect-spark.md")
    catalog_block = next(block for block in page.blocks if block.mark == "run: spark-catalog")
    purge = {"spark.sql.catalog.sea.rest-catalog-purge": "true"}  # The option has no effect before Iceberg 1.12.
    expected = {
        **NO_HIVE,
        "spark.sql.extensions": EXTENSIONS,
        **build_catalog_conf("sea", "http://127.0.0.1:8181"),
        **purge,
    }
    assert read_spark_conf(catalog_block.text) == expected
    pom = (DEPLOY / "jars" / "pom.xml").read_text()
    version = re.search(r"<iceberg.version>(.*)</", pom)
    assert version is not None
    for page in PAGES:
        for artifact, runtime_version in re.findall(r"org\.apache\.iceberg:([\w.-]+):([\w.]+)", page.text):
            assert artifact in pom, f"{page}: {artifact}"
            assert runtime_version == version[1], f"{page}: {artifact} {runtime_version}"


def test_statements_of_a_page_suit_the_shell_that_it_opens() -> None:
    """`spark-sql` requires a semicolon. `pyspark` accepts Python, so a page with it must mention `spark.sql(…)`."""
    for page in PAGES:
        shell = ""
        for block in page.blocks:
            if block.mark == "run: spark-catalog":
                shell = block.text.split()[0]
            elif block.mark == "run: spark" and shell == "spark-sql":
                assert block.text.rstrip().endswith(";"), f"{page}:{block.line}: a semicolon is missing"
            elif block.mark == "run: spark":
                assert "by `spark.sql(" in page.text, (
                    f"{page}:{block.line}: the shell expects Python, and the page must name `spark.sql(…)`"
                )


def test_trino_properties_of_the_page_equal_the_properties_of_the_tests() -> None:
    page = Page(REPO / "docs" / "how-to" / "connect-trino.md")
    tested_text = (DEPLOY / "trino" / "etc" / "catalog" / "seamark.properties").read_text() + trino_snippet("", "t")
    tested_names = {line.partition("=")[0] for line in tested_text.splitlines() if "=" in line}
    documented_names = {
        line.partition("=")[0]
        for block in page.blocks
        if block.language == "properties"
        for line in block.text.splitlines()
        if line and not line.startswith("#")
    }
    gateway_properties = {"iceberg.rest-catalog.vended-credentials-enabled"}  # tests/gateway/test_engines.py
    assert documented_names - tested_names - gateway_properties == {"iceberg.rest-catalog.oauth2.credential"}


def test_operators_page_names_every_metric() -> None:
    text = (REPO / "docs" / "how-to" / "operate.md").read_text()
    exposed_names = {
        family.name + ("_total" if family.type == "counter" else "") for family in ServerMetrics().registry.collect()
    }
    assert {name for name in exposed_names if f"`{name}`" not in text} == set()
    assert set(re.findall(r"`(seamark_\w+)`", text)) - exposed_names == set()


def test_check_output_detects_a_difference() -> None:
    check_output("a\nb 12 c\n", "a\nb … c")
    check_output("a\nx\ny\nz\n", "a\n…\nz")
    for output in ("a\nb 12 d\n", "b 1 c\n", "a\nb 1 c\nd\n"):
        with pytest.raises(AssertionError):
            check_output(output, "a\nb … c")


def test_page_lists_its_links_and_anchors(tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md")
    page.path.write_text("# One two\n[a](#one-two) [b](gone.md)\n```bash\n[c](not-a-link)\n```\n")
    assert page.links == ["#one-two", "gone.md"]
    assert page.anchors == {"one-two"}
