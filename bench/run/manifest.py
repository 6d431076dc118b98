"""The conditions of a run, for its manifest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from bench import conditions, plan
from bench.cluster.ranks import RankInfo
from bench.run.job import Job
from models.profile import profile_workload

HOST_FACTS = ("cpu_model", "num_cores", "memory_gib", "gpus", "topology")
"""What the manifest says of every host; of the first it says all."""


def described(
    job: Job,
    arguments: Sequence[str],
    infos: Sequence[RankInfo],
    machines: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """What manifest.json says of a run that begins; `machines` are its hosts, the first rank's first."""
    profile = profile_workload(job.workload)
    return {
        "name": job.settings.name,
        "preset": job.settings.preset,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(arguments),
        "command": shlex.join(["python", "-m", "bench.run", *arguments]),
        "settings": job.settings.stored(),
        "seed": job.settings.seed,
        "plan_hash": plan.plan_hash(job.plan),
        "versions": conditions.versions(),
        "git": conditions.git_state(),
        "environment": machines[0],
        "hosts": {m["host"]: {k: m[k] for k in HOST_FACTS} for m in machines},
        "model": {"arch": job.workload.name, **asdict(profile)},
        "ranks": [asdict(info) for info in infos],
        "link": infos[0].link,
    }
