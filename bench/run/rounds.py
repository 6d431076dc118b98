"""The measuring part of one attempt: every case prepared, then round after round until it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from shutil import get_terminal_size
from typing import Any

from ...report.tables import tabulate_results
from ..common.numbers import format_mib
from ..common.turns import get_interleaved_id
from ..machine.load import LoadReading, average_loads, compute_loads
from ..page.terminal import make_grid
from ..plan.case import Case
from ..results.aggregate import compute_images_per_s, compute_rate_half_widths
from ..results.case_result import read_case_results
from ..results.columns import EQUAL_LAYOUT
from ..results.journal import Completion
from ..worker import messages as m
from .case_runner import CaseFailedError, CaseRunner
from .communication import ask_nccl, check_links, measure_curves
from .failures import compute_block_limit_s
from .schedule import AFTER_ROUNDS, LiveCase, draw_round_order, is_traced, list_unfinished
from .stop_rule import find_converged, is_interim_look, select_slowest

REFRESH_EVERY_S = 30.0
"""Results are made anew so often at most, while the ranks wait."""

REFRESH_SHARE = 0.0025
"""The share of the time that this may take, but for the rounds in which widths are looked at."""


class Rounds(CaseRunner):
    """Measures a run, from the first case to the last block."""

    _resting: frozenset[str] = frozenset()
    _refresh_at_s = REFRESH_EVERY_S
    _before: Sequence[LoadReading | None] = ()

    def run(self) -> str:
        """Prepare every case, then measure rounds until there is a reason to stop: that reason."""
        try:
            reason = self._measure_run()
            self._turns.close()
        finally:
            # A turn that is kept would hold up the other run, and this one's next attempt.
            self._turns.leave()
        return reason

    def _measure_run(self) -> str:
        if not self._earlier:
            check_links(self)
        self._prepare_cases()
        self._drop_equal_layouts()
        self.ask_all(m.Settle(forgets=True), "giving memory back")
        self._rounds_began_s = self.get_elapsed_s()
        measure_curves(self)
        self._count_earlier()
        if short := self._schedule.explain_shortage(self.live, self._stop_rule.compute_left_s()):
            self.console.print_note(short)
        self._before = self._load()
        num_rounds = earlier_rounds = self.recorder.rounds
        if self.settings.rounds is not None:
            for round_index in range(1, num_rounds + 1):
                self._measure_round(round_index)  # what an earlier attempt left out of it
        while not (reason := self._stop_rule.explain_end(num_rounds) if self.live else Completion.NO_CASE):
            num_rounds += 1
            self._measure_round(num_rounds)
            self._drop_slowest(num_rounds)
        if num_rounds > earlier_rounds:
            self._note_load()
        for live in [*self.live]:
            self.check_gradients(live)
        # A profiler may leave steps slower behind: whatever is profiled on a GPU comes last.
        traced = [live for live in self.live if is_traced(live.case, self.settings, last=True)]
        last = [(live, ["trace"]) for live in traced]
        self._visit(last, AFTER_ROUNDS, "trace", num_rounds=self.recorder.rounds)
        ask_nccl(self)
        self.console.hide_progress()
        return reason

    def _load(self) -> list[LoadReading | None]:
        return self.ask_all(m.Load(), "reading the machine's load")

    def _note_load(self) -> None:
        """Record what else used the cores during the rounds; of runs in turns it is mostly the other run."""
        after = self._load()
        if get_interleaved_id() is not None:
            return
        loads, earlier = compute_loads(self._before, after), self.recorder.manifest.load
        if len(earlier) == len(loads):
            loads = [average_loads(*pair) for pair in zip(loads, earlier, strict=True)]
        self.recorder.update_manifest(load=tuple(loads))

    def _prepare_cases(self) -> None:
        wanted = list_unfinished(self.plan, self.settings, self.recorder)
        cases = [planned.case for _, planned in wanted]
        for position, (index, planned) in enumerate(wanted):
            self._show("preparing", cases, position)
            self._prepare_case(index, planned)

    def _drop_equal_layouts(self) -> None:
        """Measure every bucket layout once: different caps can give the same one."""
        live, state = {one.index: one for one in self.live}, self.recorder.journal.state
        seen: dict[tuple[Any, ...], Case] = {}
        for index, settled in sorted(state.settled.items()):
            case = state.plan[index].case
            layout = state.layouts.get(case.case_id)
            if settled.status != "ok" or layout is None:
                continue
            first = seen.setdefault((*case.apart_from_cap, layout.num_bytes), case)
            if first is not case and index in live:
                self.drop_case(live[index])
                size = format_mib(sum(layout.num_bytes))
                reason = f"same buckets as cap {first.bucket_cap_mb}: the gradients are {size}"
                self.recorder.set_outcome(index, "skipped", reason, {"reason_code": EQUAL_LAYOUT})

    def _measure_round(self, round_index: int) -> None:
        """Measure what every live case lacks of this round, in the order that the seed gives."""
        runnable = [i for i, p in enumerate(self.plan) if p.skip_reason is None]
        order = draw_round_order(len(runnable), seed=self.settings.seed, round_index=round_index)
        by_index = {live.index: live for live in self.live}
        in_order = [by_index[runnable[i]] for i in order if runnable[i] in by_index]
        chosen = self._schedule.plan_round(self.live, round_index, resting=self._resting)
        wanted = [(live, chosen.get(live.index, [])) for live in in_order]
        if self._visit(wanted, round_index, f"round {round_index},", num_rounds=round_index - 1):
            self._take_look(round_index)

    def _visit(
        self, wanted: Sequence[tuple[LiveCase, list[str]]], round_index: int, what: str, *, num_rounds: int
    ) -> bool:
        """Measure of each case the phases that no earlier attempt has; whether any was lacking."""
        lacking = [
            (live, missing)
            for live, phases in wanted
            if (missing := [p for p in phases if (live.case.case_id, p, round_index) not in self._earlier])
        ]
        for position, (live, phases) in enumerate(lacking):
            self._show(what, [one.case for one, _ in lacking], position, num_rounds=num_rounds)
            self.await_turn()
            self._measure_case(live, round_index, position, phases)
            if round_index > 1 and self._stop_rule.is_out_of_time():
                break
        if lacking:
            self.recorder.record_start(None, "between rounds")
        return bool(lacking)

    def _count_earlier(self) -> None:
        lives = {live.case.case_id: live for live in self.live}
        for case_id, phase, _ in self._earlier:
            if (live := lives.get(case_id)) is not None and phase != "warmup":
                seconds = self._schedule.estimate_steps(phase, live.step_s) * live.step_s
                self._schedule.add(live, phase, seconds)

    def _take_look(self, num_rounds: int) -> None:
        """Show results now and then, and at a look rest the cases that have enough."""
        look, began_s = is_interim_look(num_rounds), self.get_elapsed_s()
        if look or began_s >= self._refresh_at_s:
            self.recorder.refresh()
            measured, _ = tabulate_results(read_case_results(self.recorder.tables.cases))
            if measured is not None:
                self.console.show_table(make_grid(measured, get_terminal_size().columns))
            now_s = self.get_elapsed_s()
            self._refresh_at_s = now_s + max(REFRESH_EVERY_S, (now_s - began_s) / REFRESH_SHARE)
        # The two sides of a gate are compared within rounds: both have to measure every case in each.
        if look and not self.settings.race and get_interleaved_id() is None:
            self._resting = find_converged(
                self.recorder.tables.comparisons, compute_rate_half_widths(self.recorder.tables.cases)
            )

    def _measure_case(self, live: LiveCase, round_index: int, position: int, wanted: Sequence[str]) -> None:
        steps = self.settings.count_steps_per_block(live.step_s)
        limit_s = compute_block_limit_s(self.settings, live.longest_step_s, live.step_s)
        is_dp, after_dp = live.case.spec.has_replicas, self._follows_dp
        self._follows_dp = is_dp
        gives_caches_back = self._shares_memory or is_dp != after_dp
        for phase in wanted:
            what = f"its {phase}" if round_index == AFTER_ROUNDS else f"round {round_index} ({phase})"
            gives = phase == wanted[0] and gives_caches_back
            block = m.Block(index=live.index, phase=phase, steps=steps, gives_caches_back=gives)
            started_s = self.get_elapsed_s()
            try:
                times = self._ask_case(live, what, block, limit_s)
            except CaseFailedError:
                self.live.remove(live)
                return
            self._record(live, phase, round_index, position, started_s, times)

    def _drop_slowest(self, num_rounds: int) -> None:
        """Stop measuring what is slowest in a race; its results stay."""
        if not self.settings.race:
            return
        rates = compute_images_per_s(self.recorder.times, [live.case for live in self.live])
        named = select_slowest(
            self.recorder.tables.list_pairs(), rates, self._stop_rule.compute_left_share(num_rounds)
        )
        for live in [live for live in self.live if live.case.case_id in named]:
            self.check_gradients(live)
            if live in self.live:
                self.drop_case(live)
