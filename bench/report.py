"""The results of a benchmark, as JSON for machines and a Markdown table for people, in `bench/results/`.

A row is one measurement of several servers. Ratios come first, because times depend on the machine and the day.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.measure import Sample, compute_median

RESULTS = Path(__file__).parent / "results"
OURS = "seamark"
BUSY_GENERATOR_SHARE = 0.9
"""The share of its core that the load generator uses, above which it may limit the measured rates."""
BUSY = 0.7
"""The load average before a run above which the report notes that other programs used the machine."""


class AnswersDiffer(Exception):
    """Two systems gave different answers to the same question, or a system gave a wrong answer.

    The benchmark reports no times then, because times of wrong answers mean nothing.
    """


@dataclass
class Row:
    """One measurement of several servers.

    Attributes:
        values: The measured value of each server, by its name, in `unit`.
        peer: The server with which the ratio compares Seamark.
        goal: The worst value that Seamark may have, or None without a goal.
    """

    case: str
    measure: str
    unit: str
    values: dict[str, float]
    lower_is_better: bool = True
    peer: str = "fixture"
    goal: float | None = None

    def compute_ratio(self) -> float | None:
        """Return how many times better Seamark is than the peer, for measures where low or high values are better."""
        seamark_value, peer_value = self.values.get(OURS), self.values.get(self.peer)
        if not seamark_value or not peer_value:
            return None
        return peer_value / seamark_value if self.lower_is_better else seamark_value / peer_value

    def is_goal_met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.values[OURS] <= self.goal if self.lower_is_better else self.values[OURS] >= self.goal


@dataclass
class Report:
    """The results of one benchmark.

    Attributes:
        bounds: The best values that are possible on the machine, measured in the same run.
        notes: Sentences that explain the results.
    """

    bench: str
    question: str
    rows: list[Row] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    peer: str = "Iceberg's Java REST fixture"
    """The peer of the ratios, as a phrase for readers."""

    def add(
        self,
        case: str,
        measure: str,
        unit: str,
        samples: dict[str, list[Sample]],
        value: Callable[[Sample], float],
        **options: Any,
    ) -> None:
        """Add a row of medians over the rounds.

        Args:
            samples: The measurements of all rounds, by the name of the server.
            value: Returns the measured value of a sample.
            options: Further fields of the row.
        """
        self.rows.append(Row(case, measure, unit, {n: compute_median(s, value) for n, s in samples.items()}, **options))

    def add_failures(self, case: str, samples: dict[str, list[Sample]]) -> None:
        """Add a note about failed requests, because the figures do not include them."""
        for name, rounds in samples.items():
            failed_count, total = sum(s.failed for s in rounds), sum(sum(s.statuses.values()) for s in rounds)
            if failed_count:
                example = next(f for s in rounds for f in s.failures)
                self.notes.append(f"{case}: {name} failed {failed_count} of {total} requests, such as {example}")

    def note_generator_limit(self, case: str, samples: dict[str, list[Sample]]) -> None:
        """Add a note if the load generator used nearly all of its core.

        In that case the servers may be faster than the figures show.
        """
        for name, rounds in samples.items():
            share = compute_median(rounds, lambda s: s.generator_cpu)
            if share > BUSY_GENERATOR_SHARE:
                self.notes.append(
                    f"{case}: the generator used {share:.0%} of its core against {name}; it may be the limit"
                )

    def save(self, folder: Path = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.machine = self.machine or describe_machine()
        (folder / f"{self.bench}.json").write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        (folder / f"{self.bench}.md").write_text(self.format_markdown())

    @staticmethod
    def load(bench: str, folder: Path = RESULTS) -> Report:
        raw_report = json.loads((folder / f"{bench}.json").read_text())
        return Report(**{**raw_report, "rows": [Row(**row) for row in raw_report["rows"]]})

    def list_servers(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def format_markdown(self) -> str:
        servers = self.list_servers()
        head = ["case", "measure", "ratio", *servers, "goal"]
        lines = [f"# {self.bench}", "", self.question, "", "| " + " | ".join(head) + " |"]
        lines.append("|---|---|" + "--:|" * (len(head) - 2))
        lines += ["| " + " | ".join(format_cells(row, servers)) + " |" for row in self.rows]
        lines += ["", f"Ratio: how many times better Seamark is than the peer ({self.peer})."]
        lines += [f"- Bound: {name}: {value}" for name, value in self.bounds.items()]
        lines += [f"- {note}" for note in self.notes]
        facts = self.machine
        machine = f"{facts.get('cpu')}, {facts.get('cores')} cores, {facts.get('memory_gb')} GB; {facts.get('when')}"
        lines += ["", f"Machine: {machine}; Python {facts.get('python')}; commit {facts.get('commit')}."]
        if facts.get("load_before", 0) > BUSY:
            lines.append(
                f"Other work ran on it (load average {facts['load_before']}): the ratios hold, the times are high."
            )
        lines.append("")
        return "\n".join(lines)


def format_cells(row: Row, servers: Sequence[str]) -> list[str]:
    """Return the cells of a row as text: case, measure, ratio, one value for each server, goal."""
    ratio, meets_goal = row.compute_ratio(), row.is_goal_met()
    goal = "" if row.goal is None else f"{format_figure(row.goal)} {row.unit}: {'met' if meets_goal else 'missed'}"
    values = [f"{format_figure(row.values[name])} {row.unit}" if name in row.values else "–" for name in servers]
    return [row.case, row.measure, f"{format_figure(ratio)}×" if ratio else "–", *values, goal]


def format_figure(value: float) -> str:
    """Format a number with three significant digits and separated thousands."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def describe_machine() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": result.stdout.strip() or "unknown",
    }
