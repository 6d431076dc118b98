"""JSON Schemas of what runs leave and commands print: `python -m bench.results.schema --write` writes them.

Objects may have more keys than these: later versions, and users, add some.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddp_bench.bench.machine import UNLIMITED
from ddp_bench.bench.results.comparisons import ANSWERS
from ddp_bench.bench.results.schema import FILES, MOST, SCHEMA_VERSION, Column
from ddp_bench.bench.results.units import unit_of
from ddp_bench.bench.settings import Settings

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_JSON_TYPES = {"text": "string", "int": "integer", "float": "number", "bool": "boolean"}

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def documents() -> dict[str, str]:
    """Every schema as the text of its file in `docs/schema/`, by the file's name."""
    described = {
        "manifest": ("manifest.json: what a run was measured under, and how it ended", manifest()),
        "summary": ("What `bench.run --json` prints at the end of a run", summary()),
        "gate": ("What `bench.gate --json` prints", gate()),
        **{
            name.removesuffix(".csv"): (f"A row of {name} as an object; an empty field is null", row(columns))
            for name, columns in FILES.items()
        },
    }
    return {
        f"{name}.schema.json": json.dumps(
            {
                "$schema": DIALECT,
                "$id": identifier(name),
                "x-version": SCHEMA_VERSION,
                "title": title,
                **schema,
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
        for name, (title, schema) in described.items()
    }


def identifier(name: str) -> str:
    """The `$id` of a schema: it changes with the version of the results' schema."""
    return f"urn:ddp-bench:schema:{SCHEMA_VERSION}:{name}"


def row(columns: tuple[Column, ...]) -> Schema:
    """A row of a table."""
    return _object({column.name: _cell(column) for column in columns}, _needed(columns))


def _needed(columns: tuple[Column, ...]) -> tuple[str, ...]:
    return tuple(column.name for column in columns if column.needed)


def _cell(column: Column) -> Schema:
    found: Schema = {"description": column.meaning}
    if unit := unit_of(column.name):
        found["x-unit"] = unit
    if column.among:
        found["enum"] = [*column.among, *([] if column.needed else [None])]
        return found
    kind = _JSON_TYPES[column.kind]
    found["type"] = kind if column.needed else [kind, "null"]
    if column.above > -MOST:
        whole = column.kind == "int"
        found["minimum" if whole else "exclusiveMinimum"] = int(column.above) + whole
    if column.most < MOST:
        found["maximum"] = column.most
    return found


def manifest() -> Schema:
    """The conditions of a run."""
    machine = {
        "cpu_model": _said(_or_null(TEXT), "name of the processor"),
        "num_cores": _said(_or_null(COUNT), "logical cores"),
        "memory_gib": _said(_or_null(NUMBER), "memory", unit="GiB"),
        "gpus": _said(_list(_object(_GPU)), "the GPUs that the ranks on the host see, as NVML tells them"),
        "gpu_pairs": _said(_list(_object({})), "how each two of them reach each other, by places in `gpus`"),
        "topology": _said(_or_null(TEXT), "what `nvidia-smi topo -m` printed"),
        "governors": _said(_or_null(_list(TEXT)), "frequency governors of the cores; null: not readable"),
        "huge_pages": _said(_or_null(TEXT), "transparent huge pages: always, madvise or never"),
        "cgroup": _said(_object(_CGROUP), "what the container may use; null: not readable"),
    }
    own = {
        "host": _said(TEXT, "name of the first rank's host"),
        "os": _said(TEXT, "operating system"),
        "env": _said(_table(TEXT), "variables that change how fast a step is; credentials are hidden"),
    }
    return _object(
        {
            "schema_version": _said(
                {"type": "integer", "minimum": 1, "maximum": SCHEMA_VERSION}, "of the folder's files"
            ),
            "name": _said(TEXT, "of the run, by --name"),
            "run_id": _said(TEXT, "names the run, whatever becomes of its folder"),
            "interleaved_id": _said(TEXT, "alike in the two runs that a gate measured in turns"),
            "preset": _said(_or_null(TEXT), "--preset"),
            "created_utc": _said({**TEXT, "format": "date-time"}, "when the run began"),
            "argv": _said(_list(TEXT), "the command's arguments"),
            "command": _said(TEXT, "the command, to be pasted"),
            "settings": _said(_object(_settings()), "every setting, defaults included"),
            "seed": _said({"type": "integer"}, "of weights, batches and the order of cases"),
            "plan_hash": _said(TEXT, "equal for runs of the same cases"),
            "versions": _said(_table(TEXT), "of Python, packages, CUDA, cuDNN and NCCL"),
            "git": _said(
                _object(
                    {"commit": TEXT, "dirty": _said(FLAG, "whether tracked files had uncommitted changes")}
                ),
                "ddp-bench's own checkout; empty outside one",
            ),
            "ddp_bench": _said(_object({"version": TEXT}), "the version that measured"),
            "workload": _said(_object(_CODE), "the user's code, with --workload"),
            "environment": _said(_object({**own, **machine}), "the first rank's host"),
            "hosts": _said(_table(_object(machine)), "every host, by name"),
            "model": _said(_object(_MODEL, ("num_params", "gradient_bytes")), "what was trained"),
            "ranks": _said(_list(_object(_RANK, ("rank", "host", "device"))), "where every rank ran"),
            "link": _said(_or_null(TEXT), "rate of the link between the hosts of a lab, such as 1gbit"),
            "timing": _said(_object(_TIMING), "how long the run took; absent while it goes on"),
            "roofline": _said(_list(_object(_RATES)), "what the devices reach by themselves"),
            "load": _said(_list(_object(_LOAD)), "use of the ranks' cores by others, per machine"),
            "restarts": _said(COUNT, "how often the ranks were started again"),
            "resumed": _said(_list(_object({})), "one for each --resume: when, command, commit, host"),
        },
        ("schema_version", "settings", "versions", "environment"),
    )


def _settings() -> dict[str, Schema]:
    found = ((setting.name, setting.metadata.get("help")) for setting in fields(Settings))
    return {name: {"description": meaning} if meaning else {} for name, meaning in found}


def summary() -> Schema:
    """The summary of a run."""
    answers = _object(
        {
            "question": _said(TEXT, "what is answered, such as wrapper or communication"),
            "answer": _said({"enum": [*ANSWERS, "resolved"]}, "resolved: nothing was compared"),
            "sentence": TEXT,
            "paste": _said(TEXT, "a line of code that follows from it; may be empty"),
        }
    )
    following = _object({"why": TEXT, "command": TEXT})
    caution = _object({"kind": TEXT, "text": TEXT, "advice": TEXT, "case_id": _or_null(TEXT)})
    whole = {
        "results": _said(TEXT, "the run's folder"),
        "answers": _list(_all_required(answers)),
        "findings": _said(_list(TEXT), "further sentences"),
        "next": _said(_or_null(_all_required(following)), "the command to run next"),
        "cautions": _said(_list(_all_required(caution)), "what to know before trusting the run"),
        "timing": _object(_TIMING),
        "cases": _said(_list(row(FILES["cases.csv"])), "the rows of cases.csv"),
    }
    return _all_required(_object(whole))


def gate() -> Schema:
    """The result of a gate."""
    ratio = _object({end: _or_null(NUMBER) for end in ("estimate", "low", "high")})
    comparison: dict[str, Schema] = {
        "case_id": TEXT,
        "stand_in": _said(FLAG, "whether CPU cores stood in for GPUs in DP"),
        "metric": _said(_or_null(TEXT), "a column of cases.csv; null where the whole case is missing"),
        "verdict": {
            "enum": ["regressed", "missing", "not comparable", "inconclusive", "unchanged", "improved"]
        },
        "reason": TEXT,
        "baseline": _said(_or_null(NUMBER), "median over rounds, in the metric's unit"),
        "candidate": _said(_or_null(NUMBER), "the same of the candidate"),
        "ratio": _said(
            _or_null(_all_required(ratio)),
            "candidate / baseline with its interval; an end is null where it is unbounded or unknown",
        ),
        "threshold": _said(_or_null(NUMBER), "the change that matters, a fraction"),
        "num_rounds": _said(_or_null(_list(COUNT)), "rounds of the baseline and of the candidate"),
    }
    comparison["units"] = _said(_list(TEXT), "what throughput counts, in the baseline and the candidate")
    comparison["suspected"] = _said(
        FLAG, "a regression by its rounds that may be the machine's; reason says why"
    )
    side = _object({"workload": _object(_CODE), "ddp_bench": _object({"version": TEXT}), "git": _object({})})
    code = {
        "identical": _said(_or_null(FLAG), "whether both imported the same code; null: not recorded"),
        "baseline": side,
        "candidate": side,
    }
    difference = {
        "name": _said(TEXT, "the condition"),
        "baseline": TEXT,
        "candidate": TEXT,
        "blocking": _said(FLAG, "whether it makes the runs not comparable"),
    }
    whole: dict[str, Schema] = {
        "verdict": {"enum": ["pass", "regression", "not comparable", "undecided"]},
        "exit_code": {"enum": [0, 1, 3]},
        "sentence": _said(TEXT, "the verdict and what decided it"),
        "interval_confidence": _said(NUMBER, "of each single interval, a fraction"),
        "cpu_stand_in": _said(FLAG, "whether devices were CPU cores"),
        "code": _said(_all_required(_object(code)), "which code was measured"),
        "interleaved": _said(FLAG, "whether both sides took turns on one machine"),
        "interleave_command": _said(_or_null(TEXT), "the command that measures both in turns"),
        "model_change": _said(_or_null(TEXT), "how the candidate's model differs"),
        "differences": _list(_all_required(_object(difference))),
        "only_in_candidate": _said(_list(TEXT), "cases that were not gated"),
        "comparisons": _said(_list(_all_required(_object(comparison))), "worst first"),
    }
    return _all_required(_object(whole))


def _object(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    found: Schema = {"type": "object", "properties": dict(properties)}
    return {**found, "required": list(required)} if required else found


def _all_required(schema: Schema) -> Schema:
    return {**schema, "required": list(schema["properties"])}


def _table(values: Schema) -> Schema:
    """An object of any keys."""
    return {"type": "object", "additionalProperties": values}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _said(schema: Schema, description: str, *, unit: str = "") -> Schema:
    return {"description": description, **({"x-unit": unit} if unit else {}), **schema}


_LIMIT: Schema = {"anyOf": [NUMBER, {"const": UNLIMITED}, {"type": "null"}]}
_GPU = {
    "name": _or_null(TEXT),
    "uuid": TEXT,
    "driver": _or_null(TEXT),
    "memory_mib": _said(_or_null(NUMBER), "memory", unit="MiB"),
    "power_limit_w": _said(_or_null(NUMBER), "power limit", unit="W"),
}
_CGROUP = {
    "cpu_quota_cores": _said(_LIMIT, "CPU time, in cores, or unlimited", unit="cores"),
    "memory_limit_gib": _said(_LIMIT, "memory, or unlimited", unit="GiB"),
    "cpuset": _said(_or_null(TEXT), "cores, such as 0-3,8"),
}
_MODEL = {
    "arch": _said(TEXT, "architecture, or the user's workload"),
    "num_params": _said(COUNT, "parameters"),
    "gradient_bytes": _said(COUNT, "gradients of a step", unit="bytes"),
    "forward_flops_per_image": _said(_or_null(NUMBER), "arithmetic of a forward", unit="FLOP"),
    "operators": _said(_table(_list(_object({}))), "operators of a forward, by batch per device"),
}
_RANK = {
    "rank": COUNT,
    "host": TEXT,
    "local_rank": COUNT,
    "device": _said(TEXT, "cuda:0, or the core"),
    "device_name": TEXT,
    "link": _or_null(TEXT),
    "pid": COUNT,
    "gpu": _said(_or_null(TEXT), "UUID of its GPU"),
    "bound_cores": _said(TEXT, "the cores that it was kept on, such as 0-15,64; may be empty"),
}
_CODE = {
    "spec": _said(TEXT, "--workload"),
    "file": _said(TEXT, "of the workload, below the top of its repository, or where it is imported from"),
    "sha256": _said(TEXT, "of that file"),
    "code_sha256": _said(TEXT, "of all files that were imported from there"),
    "repository": _said(TEXT, "its name; absent outside of one"),
    "origin": _said(_or_null(TEXT), "where it was cloned from"),
    "commit": TEXT,
    "dirty": _said(FLAG, "whether tracked files had uncommitted changes"),
}
_TIMING = {
    "startup_s": _said(NUMBER, "from the command to the first case", unit="s"),
    "measuring_s": _said(NUMBER, "from there to the end", unit="s"),
    "timed_steps_s": _said(NUMBER, "in timed steps", unit="s"),
    "rounds": COUNT,
    "stopped_because": _said(TEXT, "why the run ended"),
    "total_s": _said(NUMBER, "from the command to the end", unit="s"),
    "timed_share_pct": _said(NUMBER, "share of the time after start-up in timed steps", unit="%"),
}
_LOAD = {
    "cores": _said(COUNT, "cores on which ranks may run"),
    "others": _said(NUMBER, "mean number of them that other programs used"),
    "steal": _said(NUMBER, "mean number of them that the hypervisor gave to other guests"),
    "seconds": _said(NUMBER, "of all rounds, those of earlier attempts included"),
}

_RATES = {
    "num_devices": COUNT,
    "rank": COUNT,
    "matrix_tflop_per_s": _said(_or_null(NUMBER), "rate of matrix products", unit="TFLOP/s"),
    "copy_gb_per_s": _said(_or_null(NUMBER), "bandwidth of a copy in memory", unit="GB/s"),
}
