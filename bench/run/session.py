"""Measures a run: every rank prepares every case, then measures rounds over all cases in random order.

All ranks go through one plan in the same order and meet before every block. Rank 0 also keeps the time,
records what is measured and decides when it is enough; the others hear its decisions.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ddp_bench.bench.cluster.load import LoadReading, mean_load, other_loads, read_load
from ddp_bench.bench.cluster.turns import interleaved_id
from ddp_bench.bench.measure.memory import release_cache, release_memory
from ddp_bench.bench.measure.telemetry import sampled
from ddp_bench.bench.plan import equal_layout_reason, round_order
from ddp_bench.bench.recovery.failures import block_s, preparing_s, turn_s
from ddp_bench.bench.recovery.reopen import Completion
from ddp_bench.bench.results.aggregate import rate_half_widths
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run import sustain
from ddp_bench.bench.run.blocks import Blocks
from ddp_bench.bench.run.curves import measure_curves
from ddp_bench.bench.run.device_rates import measure_rates
from ddp_bench.bench.run.phases import AFTER_ROUNDS, is_traced, unfinished
from ddp_bench.bench.run.prepare import LiveCase, equal_layouts
from ddp_bench.bench.run.proof import Prover, equal_replicas
from ddp_bench.bench.run.race import dropped
from ddp_bench.bench.run.schedule import FIRST_LOOK, Visitable, is_look, resting_cases
from ddp_bench.bench.run.summary import case_table
from ddp_bench.models.workload import make_module

WRITE_EVERY_S = 10.0
"""Tables are brought up to date so often: blocks.csv, from which they are made, has everything at once."""


class Session(Blocks):
    """One rank's part of measuring a run, from the first case to the last block."""

    def __init__(self, **more: Any) -> None:
        """As `Blocks`."""
        super().__init__(**more)
        self._resting: frozenset[str] = frozenset()
        self._written_s = 0.0

    def run(self) -> str:
        """Prepare every case, then measure rounds until there is a reason to stop: that reason."""
        torch.backends.cudnn.benchmark = self._settings.cudnn_benchmark
        runnable = [p.case for p in self._plan if p.skip_reason is None]
        self._telemetry = sampled(self._settings, runnable, self._cluster.place)
        self._measure_rates()
        self._prepare_cases()
        self._drop_equal_layouts()
        # What is alive now stays so: no collection of garbage has to look through it within a block.
        gc.collect()
        gc.freeze()
        self._measure_curves()
        self._count_earlier()
        self._say_if_too_short()
        before = self._cluster.gather(read_load())
        num_rounds = self._earlier.last_round
        if self._settings.rounds is not None:
            for round_index in range(1, num_rounds + 1):
                self._measure_round(round_index)  # what an earlier attempt left out of it
        while not (reason := self._reason_to_stop(num_rounds)):
            num_rounds += 1
            self._measure_round(num_rounds)
            self._drop_slowest(num_rounds)
        self._note_load(before, num_rounds)
        # A profiler may leave steps slower behind: whatever is profiled on a GPU comes last.
        self._sustain()
        self._trace_last()
        gc.unfreeze()
        self._console.progress_done()
        self._lockstep.wait_for_turn(self._turns.close, limit_s=turn_s(self._settings))
        for live in self._live:
            live.close()
        if self._telemetry is not None:
            self._telemetry.close()
        return reason

    def _note_load(self, before: Sequence[LoadReading | None], num_rounds: int) -> None:
        """Record what else used the cores during the rounds; of runs in turns it is mostly the other run."""
        after = self._cluster.gather(read_load())
        measured = num_rounds > self._earlier.last_round
        if self._recorder is None or interleaved_id() is not None or not measured:
            return
        loads, earlier = other_loads(before, after), self._recorder.manifest.load
        if len(earlier) == len(loads):
            loads = [mean_load(*pair) for pair in zip(loads, earlier, strict=True)]
        self._recorder.tell(load=tuple(loads))

    def _reason_to_stop(self, num_rounds: int) -> str:
        """Why to measure no more after so many rounds; empty while the run goes on."""
        if not self._live:
            return Completion.NO_CASE
        return self._cluster.from_first(self._stop_rule.reason(num_rounds))

    def _measure_rates(self) -> None:
        """Measure the devices by themselves, while no case needs their memory, unless it was done before."""
        recorder = self._recorder
        if self._cluster.from_first(recorder is not None and bool(recorder.manifest.roofline)):
            return
        self._next_turn()
        found = measure_rates(
            self._lockstep,
            self._cluster,
            self._plan,
            precision=self._settings.precision,
            limit_s=preparing_s(self._settings),
            say=self._console.note,
        )
        if recorder is not None:
            recorder.tell(roofline=tuple(found))

    def _prepare_cases(self) -> None:
        torch.manual_seed(self._settings.seed)
        earlier = self._earlier
        wanted = unfinished(
            self._plan,
            self._settings,
            earlier.measured,
            dropped=earlier.dropped,
            sustained_s=earlier.sustained_s,
        )
        if not wanted:
            return
        self._lockstep.idle()
        template = make_module(self._workload)
        equal = equal_replicas(template, self._cluster)
        place, seed = self._cluster.place, self._settings.seed
        workers = self._settings.data_workers
        prover = Prover(self._workload, template, place, seed, equal_replicas=equal, data_workers=workers)
        for position, (index, planned) in enumerate(wanted):
            self._show(f"preparing {planned.case.case_id}", position, len(wanted))
            self._prepare_case(index, planned, prover)
            # Another rank may need it for the next case: DP trains on everyone's GPU.
            release_memory(place.device)

    def _drop_equal_layouts(self) -> None:
        """Measure every bucket layout once: different caps can give the same one."""
        for live, first in equal_layouts(self._live, self._cluster, self._plan, self._earlier.layouts):
            self._drop(live)
            if self._recorder is not None:
                self._recorder.set_outcome(live.index, "skipped", equal_layout_reason(first))

    def _measure_curves(self) -> None:
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

    def _measure_round(self, round_index: int) -> None:
        """Measure what every live case lacks of this round, in the order that the seed gives."""
        runnable = [i for i, p in enumerate(self._plan) if p.skip_reason is None]
        order = round_order(len(runnable), seed=self._settings.seed, round_index=round_index)
        by_index = {live.index: live for live in self._live}
        in_order = [by_index[runnable[i]] for i in order if runnable[i] in by_index]
        chosen: dict[int, list[str]] = self._cluster.from_first(self._chosen(round_index))
        missing = {live.index: self._missing(live, round_index, chosen) for live in in_order}
        in_order = [live for live in in_order if missing[live.index]]
        if not in_order:
            return
        for position, live in enumerate(in_order):
            self._show(f"round {round_index} {live.case.case_id}", position, len(in_order))
            self._next_turn()
            self._measure_case(live, round_index, position, missing[live.index])
            if round_index > 1 and self._cluster.from_first(self._stop_rule.out_of_time()):
                break
        self._lockstep.between()
        if self._recorder is not None:
            self._look(self._recorder, round_index)

    def _trace_last(self) -> None:
        """Trace every case that is traced after all rounds, once, whatever the time."""
        wanted = [
            live
            for live in self._live
            if is_traced(live.case, self._settings, last=True)
            and (live.case.case_id, "trace", AFTER_ROUNDS) not in self._earlier.measured
        ]
        for position, live in enumerate(wanted):
            self._console.progress(f"trace {live.case.case_id}", position, len(wanted), None)
            self._next_turn()
            self._measure_case(live, AFTER_ROUNDS, position, ["trace"])
        if wanted:
            self._lockstep.between()

    def _chosen(self, round_index: int) -> dict[int, list[str]]:
        """The phases of every case that is visited in this round, on rank 0."""
        if self._recorder is None:
            return {}
        return self._schedule.round(self._visitable(), round_index, resting=self._resting)

    def _visitable(self) -> list[Visitable]:
        return [Visitable(one.index, one.case, one.oversubscribed, one.step_s) for one in self._live]

    def _say_if_too_short(self) -> None:
        """Before the rounds, say where preparation has left too little time for intervals."""
        left_s = self._stop_rule.left_s()
        if self._recorder is None or left_s is None or not self._live:
            return
        if short := self._schedule.shortage(self._visitable(), left_s):
            self._console.note(short)

    def _say_what_can_be_told(self, recorder: Recorder) -> None:
        """After two looks, or the only one: what differences the time given can tell here."""
        width = max((one.half_width for one in recorder.comparisons), default=math.inf)
        left_s, spent_s = self._stop_rule.left_s(), self._lockstep.elapsed_s()
        if math.isinf(width) or left_s is None:
            return
        reached = 100 * width * math.sqrt(spent_s / (spent_s + max(left_s, 0.0)))
        wanted = 100 * self._settings.margin / 2
        help_ = (
            "" if reached <= wanted else f"; ±{wanted:g}% takes {(reached / wanted) ** 2:.1f} times as long"
        )
        self._console.note(
            f"About ±{reached:.1f}% is what comparisons can reach here in the time given{help_}"
        )

    def _missing(self, live: LiveCase, round_index: int, chosen: Mapping[int, list[str]]) -> list[str]:
        found = chosen.get(live.index, [])
        return [p for p in found if (live.case.case_id, p, round_index) not in self._earlier.measured]

    def _count_earlier(self) -> None:
        """Let the schedule know of the blocks of earlier attempts."""
        lives = {live.case.case_id: live for live in self._live}
        for case_id, phase, _ in self._earlier.measured:
            if (live := lives.get(case_id)) is not None and phase != "warmup":
                seconds = self._schedule.steps_of(phase, live.step_s) * live.step_s
                self._schedule.add(case_id, phase, seconds, oversubscribed=live.oversubscribed)

    def _look(self, recorder: Recorder, num_rounds: int) -> None:
        """Bring the tables up to date now and then, and at a look rest the cases that have enough."""
        look = is_look(num_rounds)
        if look or self._lockstep.elapsed_s() - self._written_s >= WRITE_EVERY_S:
            self._console.table(case_table(recorder.write()))
            self._written_s = self._lockstep.elapsed_s()
        left_s = self._stop_rule.left_s()
        is_last = left_s is not None and left_s < self._lockstep.elapsed_s()
        if self._settings.rounds is None and num_rounds == (FIRST_LOOK if is_last else 2 * FIRST_LOOK):
            self._say_what_can_be_told(recorder)
        if look and not self._settings.race:
            self._resting = resting_cases(recorder.comparisons, rate_half_widths(recorder.cases))

    def _measure_case(self, live: LiveCase, round_index: int, position: int, wanted: Sequence[str]) -> None:
        """Measure the `wanted` phases of a case, a block each; it is dropped where one fails."""
        if self._gives_caches_back:
            release_cache(self._cluster.place.device)
        settings, limit_s = self._settings, block_s(self._settings, live.longest_step_s, live.step_s)
        for phase in wanted:
            what = f"its {phase}" if round_index == AFTER_ROUNDS else f"round {round_index} ({phase})"
            if not self._measure_block(live, phase, round_index, position, what, settings, limit_s):
                return

    def _sustain(self) -> None:
        """After the rounds, train every case with devices of its own without a pause, in the plan's order."""
        training = sustain.Training(self._settings, self._cluster, self._recorder, self._console)
        cases = [live for live in self._live if sustain.is_sustained(live, self._settings)]
        for position, live in enumerate(cases):
            before = [n for c, p, n in self._earlier.measured if (c, p) == (live.case.case_id, "sustained")]
            limit_s = sustain.limit_s(self._settings, live.longest_step_s, live.step_s)
            for number, settings in training.blocks(cases[position:], first=1 + max(before, default=0)):
                what = f"sustained block {number}"
                if not self._measure_block(live, "sustained", number, position, what, settings, limit_s):
                    break
            if self._recorder is not None:  # between blocks of one case it would be a pause
                self._console.table(case_table(self._recorder.write()))

    def _drop_slowest(self, num_rounds: int) -> None:
        """In a race, measure no further what rank 0 finds slowest; its results stay."""
        if not self._settings.race:
            return
        named: Collection[str] = ()
        if self._recorder is not None:
            rates = self._recorder.images_per_s()
            live_ids = [live.case.case_id for live in self._live]
            measured = {case_id: rates[case_id] for case_id in live_ids if case_id in rates}
            named = dropped(self._recorder.pairs(), measured, self._stop_rule.left_share(num_rounds))
        named = self._cluster.from_first(named)
        for live in [live for live in self._live if live.case.case_id in named]:
            self._drop(live)
