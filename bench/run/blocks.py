"""One block of one case on all ranks: done in lockstep, written down, and what follows where it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.cluster.turns import TURNS_ENV, TurnClient
from ddp_bench.bench.console import Console
from ddp_bench.bench.expected_time import least_warmup_s
from ddp_bench.bench.manifest import RankPlace
from ddp_bench.bench.measure import telemetry, trace
from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.memory import release_memory
from ddp_bench.bench.measure.telemetry import Telemetry
from ddp_bench.bench.measure.timed import BlockTimes
from ddp_bench.bench.modes.base import UnusedParametersError
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.recovery.attempt import Report, failure_in
from ddp_bench.bench.recovery.failures import preparing_s, turn_s
from ddp_bench.bench.recovery.lockstep import Lockstep
from ddp_bench.bench.recovery.reopen import Progress, fail_case
from ddp_bench.bench.recovery.watchdog import Watchdog
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run.job import Job
from ddp_bench.bench.run.phases import block_rows, work_of
from ddp_bench.bench.run.prepare import LiveCase, Prepared, facts_of, prepare
from ddp_bench.bench.run.proof import Prover
from ddp_bench.bench.run.reference import split_of
from ddp_bench.bench.run.schedule import Schedule, StopRule
from ddp_bench.bench.run.update_proof import PROOF_STEPS
from ddp_bench.bench.settings import ResolvedSettings

T = TypeVar("T")

LAST_STEPS = 3
"""Steps at the end of the warm-up whose median says how long a step takes: one alone may be an outlier."""

FAILED = {telemetry.FAILED: "GPU telemetry (--telemetry)", trace.FAILED: "trace"}
"""What a block's detail may say it lacks; its case is measured all the same."""


class Blocks:
    """One rank's part of preparing and measuring single cases; `recorder` exists on rank 0 only."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        job: Job,
        infos: Sequence[RankPlace],
        recorder: Recorder | None,
        console: Console,
        watchdog: Watchdog,
        earlier: Progress,
    ) -> None:
        self._cluster = cluster
        self._settings = job.settings
        self._plan = job.plan
        self._workload = job.workload
        self._infos = infos
        self._recorder = recorder
        self._console = console
        self._clock = make_clock(cluster.place.device)
        self._earlier = earlier
        self._lockstep = Lockstep(cluster, watchdog, recorder, earlier.elapsed_s)
        self._stop_rule = StopRule(job.settings, recorder, self._rounds_s)
        self._schedule = Schedule(job.settings)
        self._telemetry: Telemetry | None = None
        self._said: set[str] = set()
        self._live: list[LiveCase] = []
        """The cases that are still measured, in the plan's order, the same on every rank."""
        turns = TURNS_ENV in os.environ
        self._gives_caches_back = turns or any(p.case.mode == "dp" and not p.skip_reason for p in job.plan)
        """Whether other processes, or DP of rank 0, need the GPU memory that cases leave cached."""
        # Rank 0 takes the turn for all: the others wait for it.
        self._turns = TurnClient(os.environ.get(TURNS_ENV) if cluster.is_first else None)

    def _prepare_case(self, index: int, planned: Planned, prover: Prover) -> None:
        """Prove, build and warm up a case on its ranks; it is live if that went well on all of them."""
        case = planned.case
        live = LiveCase(index, case, None, planned.oversubscribed)
        takes_part = self._cluster.rank < case.num_ranks

        def make_group() -> None:
            live.group = self._cluster.group(case.num_ranks, case.backend)

        def work() -> Prepared:
            return prepare(
                live,
                prover=prover,
                settings=self._settings,
                clock=self._clock,
                least_warmup_s=least_warmup_s(self._plan, self._settings),
            )

        self._next_turn()
        if case.backend:
            _, reports = self._run(live, "its process group", make_group, limit_s=preparing_s(self._settings))
            if not self._all_well(live, reports):
                return
        limit_s = preparing_s(self._settings, split_of(case).num_forwards * case.accumulate)
        wanted = work if takes_part else None
        started_s, reports = self._run(live, "its preparation", wanted, limit_s=limit_s)
        if not self._all_well(live, reports):
            return
        found: dict[int, Prepared] = {rank: r.value for rank, r in enumerate(reports) if r.value is not None}
        by_rank = [prepared.warmup.steps_ms for prepared in found.values()]
        longest_ms = max(map(max, by_rank), default=0.0)
        usual_ms = max((median(ms[-LAST_STEPS:]) for ms in by_rank), default=0.0)
        slowest_ms = self._cluster.from_first((longest_ms, usual_ms))
        live.longest_step_s, live.step_s = (ms / 1000 for ms in slowest_ms)
        if self._recorder is not None:
            if why_not := found[0].update.why_not:
                line = (
                    f"Parameters after {PROOF_STEPS} steps prove nothing of {case.case_id}: {why_not}; its "
                )
                more = "gradients are proven. So it is of every case without update_error"
                self._say_once("unproven", line + more)
            facts = facts_of(live, self._infos[0], list(found.values()))
            self._recorder.set_outcome(index, "ok", facts=facts)
            self._recorder.set_layout(case.case_id, live.layout)
        warmups = {rank: prepared.warmup for rank, prepared in found.items()}
        self._record(live, "warmup", 0, len(self._live), started_s, warmups)
        self._live.append(live)

    def _measure_block(
        self,
        live: LiveCase,
        phase: str,
        number: int,
        position: int,
        what: str,
        settings: ResolvedSettings,
        limit_s: float,
    ) -> bool:
        """Measure one block and write it down; False where the case failed and is dropped."""
        work = work_of(phase, live, settings, self._cluster.place, self._clock, self._telemetry)
        started_s, reports = self._run(live, what, work, limit_s=limit_s)
        if not self._all_well(live, reports):
            self._live.remove(live)
            return False
        times = {rank: r.value for rank, r in enumerate(reports) if r.value is not None}
        self._record(live, phase, number, position, started_s, times)
        return True

    def _run(
        self, live: LiveCase, what: str, work: Callable[[], T] | None, *, limit_s: float
    ) -> tuple[float, Sequence[Report]]:
        """Do a piece of work for a case on its ranks: when it began, and what each of them reports."""

        def explained() -> T:
            assert work is not None  # only then is this called
            try:
                return work()
            except RuntimeError as error:
                why = "" if live.trainer is None else live.trainer.mode.why_stopped(error)
                if why:
                    raise UnusedParametersError(why) from error
                raise

        done = explained if work is not None else None
        return self._lockstep.run(live.index, what, done, limit_s=limit_s, group=live.group)

    def _all_well(self, live: LiveCase, reports: Sequence[Report]) -> bool:
        """Whether no rank reports a fault; otherwise the case ends here, on all of them.

        Raises RestartError where the ranks cannot go on to another case.
        """
        found = failure_in(reports)
        if found is None:
            return True
        if self._recorder is not None:
            self._console.note(fail_case(self._recorder, live.index, found))
        self._lockstep.settle(reports, live.group, live.close)
        return False

    def _record(
        self,
        live: LiveCase,
        phase: str,
        round_index: int,
        position: int,
        started_s: float,
        times: Mapping[int, BlockTimes],
    ) -> None:
        """Write down a block, with the times by rank, unless an earlier attempt has."""
        case_id = live.case.case_id
        if self._recorder is None or (case_id, phase, round_index) in self._earlier.measured:
            return
        for rank, block in times.items():
            if "trace" in block.detail:
                self._recorder.add_trace(case_id, rank, block.detail["trace"])
            for name in FAILED.keys() & block.detail.keys():
                why = f"{block.detail[name]}; the run goes on"
                self._say_once(name, f"No {FAILED[name]} from rank {rank}: {why}")
        seconds = self._lockstep.elapsed_s() - started_s
        self._schedule.add(case_id, phase, seconds, oversubscribed=live.oversubscribed)
        found = [(self._infos[rank].host, rank, block) for rank, block in times.items()]
        self._recorder.add_block(block_rows(case_id, phase, round_index, position, started_s, found))

    def _drop(self, live: LiveCase) -> None:
        live.close()
        self._live.remove(live)
        release_memory(self._cluster.place.device)

    def _next_turn(self) -> None:
        self._lockstep.wait_for_turn(self._turns.next_turn, limit_s=turn_s(self._settings))

    def _rounds_s(self) -> float:
        """Seconds of the run but for those of training after the rounds, to which no limit applies."""
        after_s = sum(self._recorder.sustained_s().values()) if self._recorder is not None else 0.0
        return self._lockstep.elapsed_s() - after_s

    def _show(self, what: str, position: int, total: int) -> None:
        self._console.progress(what, position, total, self._stop_rule.left_s())

    def _say_once(self, what: str, line: str) -> None:
        """Say of the first case and rank what may concern many."""
        if what not in self._said:
            self._console.note(line)
        self._said.add(what)
