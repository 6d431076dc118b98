"""Takes host names, paths, addresses and user names out of a run's files.

What is known beforehand to be a name, such as the host of a rank, is replaced as a whole. In text that can
say anything, such as why a case failed, names are looked for as words.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddp_bench.bench.results.schema import FILES
from ddp_bench.bench.text import csv_cell, csv_text

KEPT = (
    *("schema_version", "name", "run_id", "interleaved_id", "preset", "created_utc", "settings", "seed"),
    *("plan_hash", "versions", "ddp_bench", "git", "workload", "environment", "hosts", "model"),
    *("ranks", "link", "timing", "load", "roofline", "restarts"),
)
"""Keys of a manifest that an archive keeps: not the command, nor who resumed the run from where."""

WORKLOAD_KEPT = ("spec", "commit", "dirty", "sha256", "code_sha256")
"""Of the user's own code: what tells versions of it apart, not where it lies."""

HOST_VARIABLES = ("BENCH_HOST", "NCCL_HOSTID")

PATH, ADDRESS, USER = "(path)", "(address)", "(user)"

FREE_TEXT = {"cases.csv": ("reason",)}
"""Columns that can say anything."""

_PATH = re.compile(r"(?<![\w./)-])(~[\w.-]*)?/(?![/\s])[^\s\"'`,;:()<>]+|\bfile:/+[^\s\"'`,;()<>]+")
"""An absolute path within text; not the `/` of a rate or a list, nor the `//` of a URL."""

_WHOLE_PATH = re.compile(r"(/(?!/)|~)[^:]*")
"""A path by itself, or one of several joined by colons: it may hold blanks."""

_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])|\b[0-9a-f]{1,4}(:[0-9a-f]{0,4}){5,7}\b")
_LEAST_NAME = 3
"""Characters of a name that is looked for as a word: shorter ones are found in everything."""

Clean = Callable[[str], str]


def host_names(manifest: Mapping[str, Any], blocks: Iterable[str]) -> list[str]:
    """Every host that a run names, the first rank's first; `blocks` are the hosts of its blocks."""
    environment, hosts, ranks = (manifest.get(key) for key in ("environment", "hosts", "ranks"))
    found: list[Any] = [environment.get("host")] if isinstance(environment, dict) else []
    found += [rank.get("host") for rank in ranks or () if isinstance(rank, dict)]
    found += [*(hosts if isinstance(hosts, dict) else ()), *blocks]
    return list(dict.fromkeys(name for name in found if isinstance(name, str) and name))


def aliases(names: Sequence[str]) -> dict[str, str]:
    """What stands for each host: `host0`, `host1`, … in their order."""
    return {name: f"host{place}" for place, name in enumerate(names)}


def cleaner(hosts: Mapping[str, str], users: Iterable[str] = ()) -> Clean:
    """What takes paths, addresses, hosts and users out of text that can say anything."""
    words = {user: USER for user in users if len(user) >= _LEAST_NAME} | dict(hosts)
    # A name in full is also known by its first part.
    words |= {name.split(".")[0]: alias for name, alias in hosts.items()}
    words = {word: alias for word, alias in words.items() if len(word) >= _LEAST_NAME and not word.isdigit()}
    longest_first = sorted(words, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])", re.IGNORECASE)
    folded = {word.lower(): alias for word, alias in words.items()}

    def clean(text: str) -> str:
        text = _ADDRESS.sub(ADDRESS, without_paths(text))
        return pattern.sub(lambda found: folded[found[0].lower()], text) if words else text

    return clean


def without_paths(text: str) -> str:
    """Text with `(path)` for every absolute path."""
    words = (PATH if _WHOLE_PATH.fullmatch(word) else word for word in text.split(":"))
    return _PATH.sub(PATH, ":".join(words))


def clean_manifest(manifest: Mapping[str, Any], hosts: Mapping[str, str], clean: Clean) -> dict[str, Any]:
    """The manifest without what tells of people and places; `hosts` are the names that stand for hosts."""
    kept = {key: _each_text(manifest[key], without_paths) for key in KEPT if key in manifest}
    if isinstance(kept.get("name"), str):
        kept["name"] = clean(kept["name"])
    if isinstance(kept.get("settings"), dict):
        kept["settings"] = {**kept["settings"], "out": None}
        kept["settings"]["name"] = kept.get("name")
    if isinstance(kept.get("timing"), dict):
        kept["timing"] = _each_text(kept["timing"], clean)
    if isinstance(kept.get("workload"), dict):
        kept["workload"] = {key: kept["workload"][key] for key in WORKLOAD_KEPT if key in kept["workload"]}
    environment = kept.get("environment")
    if isinstance(environment, dict):
        kept["environment"] = _clean_environment(environment, hosts, clean)
    if isinstance(kept.get("hosts"), dict):
        kept["hosts"] = {hosts.get(name, name): facts for name, facts in kept["hosts"].items()}
    if isinstance(kept.get("ranks"), list):
        kept["ranks"] = [
            {**rank, "host": hosts.get(str(rank.get("host")), rank.get("host")), "pid": 0}
            for rank in kept["ranks"]
            if isinstance(rank, dict)
        ]
    return kept


def _clean_environment(environment: dict[str, Any], hosts: Mapping[str, str], clean: Clean) -> dict[str, Any]:
    found = {**environment, "host": hosts.get(str(environment.get("host")), environment.get("host"))}
    if isinstance(found.get("env"), dict):
        found["env"] = {
            name: hosts.get(str(value), clean(str(value))) if name in HOST_VARIABLES else clean(str(value))
            for name, value in found["env"].items()
        }
    return found


def clean_table(name: str, content: bytes, hosts: Mapping[str, str], clean: Clean) -> bytes:
    """A table's file with the columns that the schema knows, without what tells of people and places."""
    known = [column for column in FILES[name] if column.kind == "text"]
    texts = {column.name for column in known}
    reader = csv.DictReader(io.StringIO(content.decode("utf-8"), newline=""), strict=True)
    columns = [column.name for column in FILES[name] if column.name in (reader.fieldnames or ())]
    made = io.StringIO(newline="")
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(columns)
    for row in reader:
        writer.writerow(
            [_cell(name, one, row[one], hosts, clean) if one in texts else row[one] for one in columns]
        )
    return made.getvalue().encode("utf-8")


def _cell(table: str, column: str, cell: str, hosts: Mapping[str, str], clean: Clean) -> str:
    text = csv_text(cell)
    if column == "host":
        return csv_cell(hosts.get(text, text))
    change = clean if column in FREE_TEXT.get(table, ()) else without_paths
    changed = change(text)
    return cell if changed == text else csv_cell(changed)


def _each_text(value: Any, clean: Clean) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: _each_text(item, clean) for key, item in value.items()}
    if isinstance(value, list):
        return [_each_text(item, clean) for item in value]
    return value


def left_over(content: bytes, hosts: Iterable[str]) -> str | None:
    """The first host name that still stands in a file as a word; None where there is none."""
    text = content.decode("utf-8")
    for name in hosts:
        if len(name) >= _LEAST_NAME and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            return name
    return None
