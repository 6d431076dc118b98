"""What every rank runs: prepare every case, then rounds over all of them in random order.

All ranks walk the same plan; rank 0 conducts, records and decides when to stop.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from bench.cluster.ranks import Cluster, RankInfo
from bench.cluster.turns import TURNS_ENV, Player
from bench.console import Console
from bench.measure.clock import make_clock
from bench.measure.device import set_precision
from bench.measure.timed import BlockTimes
from bench.plan import Case, round_order
from bench.recovery.failures import Failure, block_s, preparing_s, waiting_s
from bench.recovery.lockstep import Lockstep, Report, block_rows
from bench.recovery.reopen import Completion, Progress, fail_case
from bench.recovery.watchdog import Watchdog
from bench.results.ledger import ByRound
from bench.results.recorder import Recorder
from bench.run.curves import measure_curves
from bench.run.job import Job
from bench.run.phases import phases, unfinished, work_of
from bench.run.prepare import LiveCase, Prepared, equal_layouts, facts_of, prepare
from bench.run.proof import Prover, equal_replicas
from bench.settings import Settings
from models.workload import make_module

CasesToDrop = Callable[[Mapping[str, ByRound], float], Collection[str]]
"""Case ids to measure no further, from the throughput by round of those that are, and the share left."""


class Session:
    """One rank's part of a run. `recorder` exists on rank 0 only."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        job: Job,
        infos: Sequence[RankInfo],
        recorder: Recorder | None,
        console: Console,
        watchdog: Watchdog,
        earlier: Progress,
        to_drop: CasesToDrop | None = None,
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
        self._stop_rule = StopRule(job.settings, recorder, self._lockstep.elapsed_s)
        self._to_drop = to_drop
        self._live: list[LiveCase] = []
        # Rank 0 takes the turn for all: the others wait for it at the next barrier.
        self._player = Player(os.environ.get(TURNS_ENV) if cluster.is_first else None)
        self.rounds = 0
        self.stopped_because = ""

    def run(self) -> None:
        """Prepare, then measure until the rounds, the target or the time limit is reached."""
        set_precision(self._settings.precision, self._cluster.place.device)
        self._prepare_all()
        self._drop_equal_layouts()
        gc.collect()
        gc.freeze()
        if self._settings.allreduce_curve or self._settings.calibrate:
            measure_curves(
                self._live,
                self._lockstep,
                self._cluster,
                self._recorder,
                done=self._earlier.curves,
                limit_s=preparing_s(self._settings),
                max_time_s=self._settings.max_time,
            )
        for round_index in range(1, self._earlier.last_round + 1):
            self.rounds = round_index
            self._round(round_index)
        while self._live and not self.stopped_because:
            self.stopped_because = self._cluster.from_first(self._stop_rule.reason(self.rounds))
            if not self.stopped_because:
                self.rounds += 1
                self._round(self.rounds)
                self._retire()
        self.stopped_because = self.stopped_because or Completion.NO_CASE
        gc.unfreeze()
        self._console.progress_done()
        self._player.close()
        for live in self._live:
            live.close()

    def _prepare_all(self) -> None:
        torch.manual_seed(self._settings.seed)
        wanted = unfinished(self._plan, self._settings, self._earlier.measured, dropped=self._earlier.dropped)
        if not wanted:
            return
        self._lockstep.idle()
        template = make_module(self._workload)
        equal = equal_replicas(template, self._cluster)
        prover = Prover(
            self._workload, template, self._cluster.place, self._settings.seed, equal_replicas=equal
        )
        for done, (index, planned) in enumerate(wanted):
            case = planned.case
            self._console.progress(f"preparing {case.case_id}", done, len(wanted), self._stop_rule.left_s())
            in_ddp = case.mode == "ddp"
            group = self._cluster.group(case.num_devices, case.backend) if in_ddp else None
            live = LiveCase(index, case, group, planned.oversubscribed)
            takes_part = self._cluster.rank < (case.num_devices if in_ddp else 1)

            def work(live: LiveCase = live) -> Prepared:
                return prepare(live, prover=prover, settings=self._settings, clock=self._clock)

            self._player.next_turn()
            limit_s = preparing_s(self._settings) + waiting_s()
            started_s, reports = self._lockstep.run(
                index, "its preparation", work if takes_part else None, limit_s=limit_s
            )
            if self._keep(live, reports):
                steps_ms = (ms for r in reports if r.value for ms in r.value.warmup.steps_ms)
                live.longest_step_s = max(steps_ms) / 1000
                self._live.append(live)
                self._record_prepared(live, started_s, reports)

    def _record_prepared(self, live: LiveCase, started_s: float, reports: Sequence[Report]) -> None:
        if self._recorder is None:
            return
        found: list[tuple[int, Prepared]] = [(i, r.value) for i, r in enumerate(reports) if r.value]
        facts = facts_of(live, self._infos[0], [prepared for _, prepared in found])
        self._recorder.set_outcome(live.index, "ok", facts=facts)
        self._recorder.set_layout(live.case.case_id, live.layout)
        self._record(
            live.case, "warmup", 0, len(self._live) - 1, started_s, [(i, p.warmup) for i, p in found]
        )

    def _drop_equal_layouts(self) -> None:
        """Measure one layout once."""
        for live, first in equal_layouts(self._live, self._cluster, self._plan, self._earlier.layouts or {}):
            live.close()
            self._live.remove(live)
            if self._recorder is not None:
                reason = f"same bucket layout as {first}; see its row"
                self._recorder.set_outcome(live.index, "skipped", reason)

    def _round(self, round_index: int) -> None:
        """Visit every case that lacks a block of this round, in the order that the seed gives."""
        runnable = [i for i, p in enumerate(self._plan) if p.skip_reason is None]
        order = round_order(len(runnable), seed=self._settings.seed, round_index=round_index)
        by_index = {live.index: live for live in self._live}
        visits = [by_index[runnable[i]] for i in order if runnable[i] in by_index]
        missing = {live.index: self._missing(live, round_index) for live in visits}
        if not any(missing.values()):
            return
        for position, live in enumerate(visits):
            what = f"round {round_index} {live.case.case_id}"
            self._console.progress(what, position, len(visits), self._stop_rule.left_s())
            if missing[live.index]:
                self._player.next_turn()
                self._visit(live, round_index, position, missing[live.index])
            if round_index > 1 and self._cluster.from_first(self._stop_rule.out_of_time()):
                break
        self._lockstep.between()
        if self._recorder is not None:
            self._recorder.write()

    def _retire(self) -> None:
        """Measure no further what `to_drop` names on rank 0; what it was measured to be stays."""
        if self._to_drop is None:
            return
        named: Collection[str] = ()
        if self._recorder is not None:
            rates = self._recorder.images_per_s()
            live = {c: rates[c] for c in (x.case.case_id for x in self._live) if c in rates}
            named = self._to_drop(live, self._stop_rule.left_share(self.rounds))
        named = self._cluster.from_first(named)
        for live_case in [x for x in self._live if x.case.case_id in named]:
            live_case.close()
            self._live.remove(live_case)

    def _missing(self, live: LiveCase, round_index: int) -> list[str]:
        found = phases(
            live.case, oversubscribed=live.oversubscribed, round_index=round_index, settings=self._settings
        )
        return [p for p in found if (live.case.case_id, p, round_index) not in self._earlier.measured]

    def _visit(self, live: LiveCase, round_index: int, position: int, wanted: Sequence[str]) -> None:
        limit_s = block_s(self._settings, live.longest_step_s) + waiting_s()
        for phase in wanted:
            started_s, reports = self._lockstep.run(
                live.index,
                f"round {round_index} ({phase})",
                work_of(phase, live, self._settings, self._cluster.place, self._clock),
                limit_s=limit_s,
            )
            if not self._keep(live, reports):
                self._live.remove(live)
                return
            times = [(rank, r.value) for rank, r in enumerate(reports) if r.value is not None]
            self._record(live.case, phase, round_index, position, started_s, times)

    def _keep(self, live: LiveCase, reports: Sequence[Report]) -> bool:
        """Whether every rank fared well; otherwise the case ends here, on all of them."""
        bad = next((r for r in reports if r.status != "ok"), None)
        if bad is None:
            return True
        live.close()
        if self._cluster.place.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._recorder is not None:
            self._console.note(fail_case(self._recorder, live.index, Failure(bad.status, bad.reason)))
        return False

    def _record(
        self,
        case: Case,
        phase: str,
        round_index: int,
        position: int,
        started_s: float,
        times: Sequence[tuple[int, BlockTimes]],
    ) -> None:
        if self._recorder is None or (case.case_id, phase, round_index) in self._earlier.measured:
            return
        for rank, block in times:
            if "trace" in block.detail:
                self._recorder.add_trace(case.case_id, rank, block.detail["trace"])
        found = [(self._infos[rank].host, rank, block) for rank, block in times]
        self._recorder.add_block(block_rows(case.case_id, phase, round_index, position, started_s, found))


MIN_ROUNDS_FOR_TARGET = 5
"""Fewer rounds can agree by chance."""


class StopRule:
    """Asked on every rank; `recorder` exists on rank 0 only, whose answer counts."""

    def __init__(self, settings: Settings, recorder: Recorder | None, elapsed_s: Callable[[], float]) -> None:
        self._settings = settings
        self._recorder = recorder
        self._elapsed_s = elapsed_s
        self._left_at_first_s: float | None = None

    def reason(self, num_rounds: int) -> str:
        """Why the run ends after so many rounds; empty while it goes on."""
        if self._recorder is None or not num_rounds:
            return ""
        if self._settings.rounds is not None:
            if num_rounds >= self._settings.rounds:
                return Completion.ROUNDS
        elif (
            num_rounds >= MIN_ROUNDS_FOR_TARGET
            and self._recorder.half_width() <= self._settings.precision_target
        ):
            return Completion.TARGET
        return Completion.TIME if self.out_of_time() else ""

    def left_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
        limit = self._settings.max_time
        return None if limit is None else limit - self._elapsed_s()

    def left_share(self, num_rounds: int) -> float:
        """Share of the rounds, or of the time since this was first asked, that is left after `num_rounds`."""
        if self._settings.rounds is not None:
            return 1 - num_rounds / self._settings.rounds
        left_s = self.left_s()
        if left_s is None:
            return 1.0
        if self._left_at_first_s is None:
            self._left_at_first_s = left_s
        return left_s / self._left_at_first_s if self._left_at_first_s > 0 else 0.0

    def out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        left = self.left_s()
        return left is not None and left <= 0
