"""JSON Schemas of what runs leave and commands print: `ddp-bench export --schema NAME` prints one.

Objects may have more keys than these: later versions, and users, add some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddp_bench.bench.machine import UNLIMITED
from ddp_bench.bench.results.comparisons import ANSWERS
from ddp_bench.bench.results.schema import FILES, MOST, SCHEMA_VERSION, Column
from ddp_bench.bench.results.units import unit_of
from ddp_bench.bench.settings import Settings

Schema = dict[str, Any]


def json_schema(name: str) -> Schema:
    """The schema of this name, one of `SCHEMAS`; its `$id` changes with the version of the results files."""
    title, described = SCHEMAS[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ddp-bench:schema:{SCHEMA_VERSION}:{name}",
        "x-version": SCHEMA_VERSION,
        "title": title,
        **described,
    }


def _row(columns: tuple[Column, ...]) -> Schema:
    needed = [column.name for column in columns if column.needed]
    return _object({column.name: _cell(column) for column in columns}) | {"required": needed}


def _cell(column: Column) -> Schema:
    found: Schema = {"description": column.meaning}
    if unit := unit_of(column.name):
        found["x-unit"] = unit
    if column.among:
        found["enum"] = [*column.among, *([] if column.needed else [None])]
        return found
    kind = {"text": "string", "int": "integer", "float": "number", "bool": "boolean"}[column.kind]
    found["type"] = kind if column.needed else [kind, "null"]
    if column.above > -MOST:
        whole = column.kind == "int"
        found["minimum" if whole else "exclusiveMinimum"] = int(column.above) + whole
    if column.most < MOST:
        found["maximum"] = column.most
    return found


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties)}


def _complete(properties: Mapping[str, Schema]) -> Schema:
    """An object that has all of its properties."""
    return _object(properties) | {"required": list(properties)}


def _table(values: Schema) -> Schema:
    """An object of any keys."""
    return {"type": "object", "additionalProperties": values}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return schema | {"type": [schema["type"], "null"]}


def _said(schema: Schema, description: str) -> Schema:
    return {"description": description, **schema}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {"type": "object"}
_LIMIT: Schema = {"anyOf": [_NUMBER, {"const": UNLIMITED}, {"type": "null"}]}

_CODE = {
    "spec": _said(_TEXT, "--workload"),
    "file": _said(_TEXT, "of the workload, below the top of its repository, or where it is imported from"),
    "sha256": _said(_TEXT, "of that file"),
    "code_sha256": _said(_TEXT, "of all files that were imported from there"),
    "repository": _said(_TEXT, "its name; absent outside of one"),
    "origin": _said(_or_null(_TEXT), "where it was cloned from"),
    "commit": _TEXT,
    "dirty": _said(_FLAG, "whether tracked files had uncommitted changes"),
}
_GPU = {
    "name": _or_null(_TEXT),
    "uuid": _TEXT,
    "driver": _or_null(_TEXT),
    "memory_mib": _or_null(_NUMBER),
    "power_limit_w": _or_null(_NUMBER),
}
_CGROUP = {
    "cpu_quota_cores": _LIMIT,
    "memory_limit_gib": _LIMIT,
    "cpuset": _said(_or_null(_TEXT), "cores, such as 0-3,8"),
}
_MACHINE = {
    "cpu_model": _or_null(_TEXT),
    "num_cores": _said(_or_null(_COUNT), "logical cores"),
    "memory_gib": _or_null(_NUMBER),
    "gpus": _said(_list(_object(_GPU)), "the GPUs that the ranks on the host see, as NVML tells them"),
    "gpu_pairs": _said(_list(_ANY), "how each two of them reach each other, by places in `gpus`"),
    "topology": _said(_or_null(_TEXT), "what `nvidia-smi topo -m` printed"),
    "governors": _said(_or_null(_list(_TEXT)), "frequency governors of the cores; null: not readable"),
    "huge_pages": _said(_or_null(_TEXT), "transparent huge pages: always, madvise or never"),
    "cgroup": _said(_object(_CGROUP), "what the container may use; null: not readable"),
}
_ENVIRONMENT = {
    "host": _TEXT,
    "os": _TEXT,
    "env": _said(_table(_TEXT), "variables that change how fast a step is; credentials are hidden"),
    **_MACHINE,
}
_MODEL = {
    "arch": _said(_TEXT, "architecture, or the user's workload"),
    "num_params": _COUNT,
    "gradient_bytes": _said(_COUNT, "gradients of a step"),
    "forward_flops_per_image": _said(_or_null(_NUMBER), "arithmetic of a forward, FLOP"),
}
_RANK = {
    "rank": _COUNT,
    "host": _TEXT,
    "local_rank": _COUNT,
    "device": _said(_TEXT, "cuda:0, or the core"),
    "device_name": _TEXT,
    "link": _or_null(_TEXT),
    "pid": _COUNT,
    "gpu": _said(_or_null(_TEXT), "UUID of its GPU"),
    "bound_cores": _said(_TEXT, "the cores that it was kept on, such as 0-15,64; may be empty"),
}
_TIMING = {
    "startup_s": _said(_NUMBER, "from the command to the first case"),
    "measuring_s": _said(_NUMBER, "from there to the end"),
    "timed_steps_s": _NUMBER,
    "rounds": _COUNT,
    "stopped_because": _TEXT,
    "total_s": _said(_NUMBER, "from the command to the end"),
    "timed_share_pct": _said(_NUMBER, "share of the time after start-up in timed steps"),
}
_LOAD = {
    "cores": _said(_COUNT, "cores on which ranks may run"),
    "others": _said(_NUMBER, "mean number of them that other programs used"),
    "steal": _said(_NUMBER, "mean number of them that the hypervisor gave to other guests"),
    "seconds": _said(_NUMBER, "of all rounds, those of earlier attempts included"),
}
_RATES = {
    "num_devices": _COUNT,
    "rank": _COUNT,
    "matrix_tflop_per_s": _said(_or_null(_NUMBER), "rate of matrix products"),
}
_MANIFEST = {
    "schema_version": {"type": "integer", "minimum": 1, "maximum": SCHEMA_VERSION},
    "name": _said(_TEXT, "--name"),
    "run_id": _said(_TEXT, "names the run, whatever becomes of its folder"),
    "interleaved_id": _said(_TEXT, "alike in the two runs that a gate measured in turns"),
    "preset": _or_null(_TEXT),
    "created_utc": _said(_TEXT | {"format": "date-time"}, "when the run began"),
    "argv": _list(_TEXT),
    "command": _said(_TEXT, "the command, to be pasted"),
    "settings": _object({one.name: _said({}, one.metadata.get("help", "")) for one in fields(Settings)}),
    "seed": _said({"type": "integer"}, "of weights, batches and the order of cases"),
    "plan_hash": _said(_TEXT, "equal for runs of the same cases"),
    "versions": _said(_table(_TEXT), "of Python, packages, CUDA, cuDNN and NCCL"),
    "git": _said(_object({"commit": _TEXT, "dirty": _FLAG}), "ddp-bench's own; empty outside a checkout"),
    "ddp_bench": _said(_object({"version": _TEXT}), "the version that measured"),
    "workload": _said(_object(_CODE), "the user's code, with --workload"),
    "environment": _said(_object(_ENVIRONMENT), "the first rank's host"),
    "hosts": _said(_table(_object(_MACHINE)), "every host, by name"),
    "model": _object(_MODEL) | {"required": ["num_params", "gradient_bytes"]},
    "ranks": _list(_object(_RANK) | {"required": ["rank", "host", "device"]}),
    "link": _said(_or_null(_TEXT), "rate of the link between the hosts of a lab, such as 1gbit"),
    "timing": _said(_object(_TIMING), "how long the run took; absent while it goes on"),
    "roofline": _said(_list(_object(_RATES)), "what the devices reach by themselves"),
    "load": _said(_list(_object(_LOAD)), "use of the ranks' cores by others, per machine"),
    "restarts": _said(_COUNT, "how often the ranks were started again"),
    "resumed": _said(_list(_ANY), "one for each --resume: when, command, commit, host"),
}
_ANSWER = {
    "question": _TEXT,
    "answer": _said({"enum": [*ANSWERS, "resolved"]}, "resolved: nothing was compared"),
    "sentence": _TEXT,
    "paste": _said(_TEXT, "a line of code that follows from it; may be empty"),
}
_CAUTION = {"kind": _TEXT, "text": _TEXT, "advice": _TEXT, "case_id": _or_null(_TEXT)}
_SUMMARY = {
    "results": _said(_TEXT, "the run's folder"),
    "answers": _list(_complete(_ANSWER)),
    "findings": _list(_TEXT),
    "next": _said(_or_null(_complete({"why": _TEXT, "command": _TEXT})), "the command to run next"),
    "cautions": _list(_complete(_CAUTION)),
    "timing": _object(_TIMING),
    "cases": _said(_list(_row(FILES["cases.csv"])), "the rows of cases.csv"),
}
_RATIO = {"estimate": _or_null(_NUMBER), "low": _or_null(_NUMBER), "high": _or_null(_NUMBER)}
_GATED = {
    "case_id": _TEXT,
    "stand_in": _said(_FLAG, "whether CPU cores stood in for GPUs in DP"),
    "metric": _said(_or_null(_TEXT), "a column of cases.csv; null where the whole case is missing"),
    "verdict": {"enum": ["regressed", "missing", "not comparable", "inconclusive", "unchanged", "improved"]},
    "reason": _TEXT,
    "baseline": _said(_or_null(_NUMBER), "median over rounds, in the metric's unit"),
    "candidate": _said(_or_null(_NUMBER), "the same of the candidate"),
    "ratio": _said(
        _or_null(_complete(_RATIO)), "candidate / baseline; an end is null where unbounded or unknown"
    ),
    "threshold": _said(_or_null(_NUMBER), "the change that matters, a fraction"),
    "num_rounds": _said(_or_null(_list(_COUNT)), "of the baseline and of the candidate"),
    "units": _said(_list(_TEXT), "what throughput counts, in the baseline and the candidate"),
    "suspected": _said(_FLAG, "a regression that may be the machine's; reason says why"),
}
_SIDE = _object({"workload": _object(_CODE), "ddp_bench": _object({"version": _TEXT}), "git": _ANY})
_CODE_OF_BOTH = {
    "identical": _said(_or_null(_FLAG), "whether both imported the same code; null: not recorded"),
    "baseline": _SIDE,
    "candidate": _SIDE,
}
_DIFFERENCE = {
    "name": _TEXT,
    "baseline": _TEXT,
    "candidate": _TEXT,
    "blocking": _said(_FLAG, "whether it makes the runs not comparable"),
}
_GATE: dict[str, Schema] = {
    "verdict": {"enum": ["pass", "regression", "not comparable", "undecided"]},
    "exit_code": {"enum": [0, 1, 3]},
    "sentence": _said(_TEXT, "the verdict and what decided it"),
    "interval_confidence": _said(_NUMBER, "of each single interval, a fraction"),
    "cpu_stand_in": _said(_FLAG, "whether devices were CPU cores"),
    "code": _complete(_CODE_OF_BOTH),
    "interleaved": _said(_FLAG, "whether both sides took turns on one machine"),
    "interleave_command": _said(_or_null(_TEXT), "the command that measures both in turns"),
    "model_change": _said(_or_null(_TEXT), "how the candidate's model differs"),
    "differences": _list(_complete(_DIFFERENCE)),
    "only_in_candidate": _said(_list(_TEXT), "cases that were not gated"),
    "comparisons": _said(_list(_complete(_GATED)), "worst first"),
}

SCHEMAS: dict[str, tuple[str, Schema]] = {
    **{
        file.removesuffix(".csv"): (f"A row of {file} as an object; an empty field is null", _row(columns))
        for file, columns in FILES.items()
    },
    "manifest": (
        "manifest.json: what a run was measured under, and how it ended",
        _object(_MANIFEST) | {"required": ["schema_version", "settings", "versions", "environment"]},
    ),
    "summary": ("What `ddp-bench run --json` prints at the end of a run", _complete(_SUMMARY)),
    "gate": ("What `ddp-bench gate --json` prints", _complete(_GATE)),
}
