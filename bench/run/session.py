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
from bench.plan import Case, equal_layout_reason, round_order
from bench.recovery import limits
from bench.recovery.failures import Blame
from bench.recovery.lockstep import Pieces, Report, block_rows
from bench.recovery.reopen import Past, blame_case
from bench.recovery.watchdog import Watchdog
from bench.results.ledger import ByRound
from bench.results.recorder import Recorder
from bench.run.curves import measure_curves
from bench.run.equal_layouts import twins
from bench.run.job import Job
from bench.run.phases import phases, unfinished, work_of
from bench.run.prepare import LiveCase, Prepared, facts_of, prepare
from bench.run.proof import Prover, equal_replicas
from bench.run.stop_rule import End
from models.workload import make_module

Leaving = Callable[[Mapping[str, ByRound], float], Collection[str]]
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
        past: Past,
        leaving: Leaving | None = None,
    ) -> None:
        self._cluster = cluster
        self._settings = job.settings
        self._plan = job.plan
        self._workload = job.workload
        self._infos = infos
        self._recorder = recorder
        self._console = console
        self._clock = make_clock(cluster.place.device)
        self._past = past
        self._pieces = Pieces(cluster, watchdog, recorder, past.elapsed_s)
        self._end = End(job.settings, recorder, self._pieces.elapsed_s)
        self._leaving = leaving
        self._live: list[LiveCase] = []
        # Rank 0 takes the turn for all: the others wait for it at the next barrier.
        self._player = Player(os.environ.get(TURNS_ENV) if cluster.is_first else None)
        self.rounds = 0
        self.stopped_because = ""

    def run(self) -> None:
        """Prepare, then measure until the rounds, the target or the time limit is reached."""
        set_precision(self._settings.precision, self._cluster.place.device)
        self._prepare_all()
        self._drop_twins()
        gc.collect()
        gc.freeze()
        if self._settings.allreduce_curve or self._settings.calibrate:
            measure_curves(
                self._live,
                self._pieces,
                self._cluster,
                self._recorder,
                done=self._past.curves,
                limit_s=limits.preparing_s(self._settings),
                max_time_s=self._settings.max_time,
            )
        for round_index in range(1, self._past.last_round + 1):
            self.rounds = round_index
            self._round(round_index)
        while self._live and not self.stopped_because:
            self.stopped_because = self._cluster.from_first(self._end.reached(self.rounds))
            if not self.stopped_because:
                self.rounds += 1
                self._round(self.rounds)
                self._retire()
        self.stopped_because = self.stopped_because or "no case is left to measure"
        gc.unfreeze()
        self._console.progress_done()
        self._player.close()
        for live in self._live:
            live.close()

    def _prepare_all(self) -> None:
        torch.manual_seed(self._settings.seed)
        wanted = unfinished(self._plan, self._settings, self._past.measured, dropped=self._past.dropped)
        if not wanted:
            return
        self._pieces.idle()
        template = make_module(self._workload)
        equal = equal_replicas(template, self._cluster)
        prover = Prover(
            self._workload, template, self._cluster.place, self._settings.seed, equal_replicas=equal
        )
        for done, (index, planned) in enumerate(wanted):
            case = planned.case
            self._console.progress(f"preparing {case.case_id}", done, len(wanted), self._end.left_s())
            in_ddp = case.mode == "ddp"
            group = self._cluster.group(case.num_devices, case.backend) if in_ddp else None
            live = LiveCase(index, case, group, planned.oversubscribed)
            takes_part = self._cluster.rank < (case.num_devices if in_ddp else 1)

            def work(live: LiveCase = live) -> Prepared:
                return prepare(live, prover=prover, settings=self._settings, clock=self._clock)

            self._player.next_turn()
            limit_s = limits.preparing_s(self._settings) + limits.waiting_s()
            started_s, reports = self._pieces.run(
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

    def _drop_twins(self) -> None:
        """Measure one layout once."""
        for live, twin in twins(self._live, self._cluster, self._plan, self._past.layouts or {}):
            live.close()
            self._live.remove(live)
            if self._recorder is not None:
                self._recorder.set_outcome(live.index, "skipped", equal_layout_reason(twin))

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
            self._console.progress(what, position, len(visits), self._end.left_s())
            if missing[live.index]:
                self._player.next_turn()
                self._visit(live, round_index, position, missing[live.index])
            if round_index > 1 and self._cluster.from_first(self._end.out_of_time()):
                break
        self._pieces.between()
        if self._recorder is not None:
            self._recorder.write()

    def _retire(self) -> None:
        """Measure no further what `leaving` names on rank 0; what it was measured to be stays."""
        if self._leaving is None:
            return
        named: Collection[str] = ()
        if self._recorder is not None:
            rates = self._recorder.images_per_s()
            live = {c: rates[c] for c in (x.case.case_id for x in self._live) if c in rates}
            named = self._leaving(live, self._end.left_share(self.rounds))
        named = self._cluster.from_first(named)
        for live_case in [x for x in self._live if x.case.case_id in named]:
            live_case.close()
            self._live.remove(live_case)

    def _missing(self, live: LiveCase, round_index: int) -> list[str]:
        found = phases(
            live.case, oversubscribed=live.oversubscribed, round_index=round_index, settings=self._settings
        )
        return [p for p in found if (live.case.case_id, p, round_index) not in self._past.measured]

    def _visit(self, live: LiveCase, round_index: int, position: int, wanted: Sequence[str]) -> None:
        limit_s = limits.block_s(self._settings, live.longest_step_s) + limits.waiting_s()
        for phase in wanted:
            started_s, reports = self._pieces.run(
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
            self._console.note(blame_case(self._recorder, live.index, Blame(bad.status, bad.reason)))
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
        if self._recorder is None or (case.case_id, phase, round_index) in self._past.measured:
            return
        for rank, block in times:
            if "trace" in block.detail:
                self._recorder.add_trace(case.case_id, rank, block.detail["trace"])
        found = [(self._infos[rank].host, rank, block) for rank, block in times]
        self._recorder.add_block(block_rows(case.case_id, phase, round_index, position, started_s, found))
