"""Single cases: prepared, measured block by block on their ranks, written down, dropped where they fail."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from ..common.console import Console
from ..common.errors import NotMeasuredError
from ..common.text import format_list
from ..common.turns import TURNS_ENV, TurnClient
from ..findings.wording import label_planned_case
from ..machine.manifest import RankPlace
from ..plan.case import Case
from ..plan.settings import ResolvedSettings
from ..plan.sweep import Planned
from ..results.block_times import TELEMETRY_FAILED, TRACE_FAILED, BlockTimes
from ..results.journal import Layout
from ..results.recorder import Recorder
from ..worker import messages as m
from ..worker.facts import Begun, Prepared, make_case_facts, make_proof_facts
from .failures import (
    MAX_NAMED,
    MIN_BLOCK_TIMEOUT_S,
    TURN_TIMEOUT_S,
    Failure,
    RestartError,
    compute_preparing_limit_s,
    find_failure,
)
from .open_folder import fail_case, find_proved
from .schedule import LiveCase, Schedule
from .stop_rule import StopRule, compute_min_warmup_s
from .workers import Workers

T = TypeVar("T")

LAST_STEPS = 3
"""Steps at the end of the warm-up whose median says how long a step takes: one alone may be an outlier."""

FAILED = {TELEMETRY_FAILED: "GPU telemetry (--telemetry)", TRACE_FAILED: "trace"}
"""Parts that a block's detail may say it lacks; its case is measured all the same."""


class CaseFailedError(Exception):
    """A case has ended with a fault, which is written down; the ranks can go on."""


class CaseRunner:
    """Prepares and measures single cases on the workers of one attempt."""

    def __init__(
        self,
        workers: Workers,
        settings: ResolvedSettings,
        plan: Sequence[Planned],
        begun: Sequence[Begun],
        recorder: Recorder,
        console: Console,
    ) -> None:
        self.workers = workers
        self.settings = settings
        self.plan = plan
        self.places: Sequence[RankPlace] = [one.place for one in begun]
        self._groups: set[m.GroupKey] = set()
        self.recorder = recorder
        self.console = console
        self._earlier = recorder.list_measured()
        """Blocks of earlier attempts."""
        self._started_s = time.perf_counter() - recorder.times.elapsed_s
        self._rounds_before_s = recorder.times.rounds_s
        self._rounds_began_s: float | None = None
        self._stop_rule = StopRule(settings, recorder, self.get_measuring_s)
        self._schedule = Schedule(settings)
        self._proved = find_proved(recorder.manifest)
        """Outcomes of cases that an earlier launch of this code has proved, by place in the plan."""
        self._said: set[str] = set()
        self.live: list[LiveCase] = []
        """The cases that are still measured, in the plan's order."""
        turns = os.environ.get(TURNS_ENV)
        self._turns = TurnClient(turns)
        self._shares_memory = turns is not None or settings.share_gpus
        """True where every case may need the GPU memory that other processes have cached."""
        self._follows_dp = False
        """True where the case that was measured last is one of DP: rank 0 has cached memory of every GPU."""

    def get_elapsed_s(self) -> float:
        """Seconds since the run began, attempts before this one included, breaks between them not."""
        return time.perf_counter() - self._started_s

    def get_measuring_s(self) -> float:
        """Seconds of rounds, those of earlier attempts included; preparing the cases is start-up."""
        began_s = self._rounds_began_s
        return self._rounds_before_s + (0.0 if began_s is None else self.get_elapsed_s() - began_s)

    def _prepare_case(self, index: int, planned: Planned) -> None:
        """Prove a case that no launch has proven, build it and warm it up on its ranks.

        It is live if that went well on all of them.
        """
        case = planned.case
        live = LiveCase(index, case, planned.oversubscribed)
        self.await_turn()
        settled = self.recorder.journal.state.settled.get(index)
        proved = self._proved.get(index) if settled is None else settled
        layers = proved and proved.facts.get("layers_by_device")
        prepare = m.Prepare(
            index=index,
            case=case,
            by_device=tuple(map(int, str(layers).split("/"))) if layers else None,
            least_s=compute_min_warmup_s(self.plan, self.settings),
            proves=proved is None,
        )
        try:
            self._make_group(live)
            began_s = self.get_elapsed_s()
            limit_s = compute_preparing_limit_s(self.settings, case)
            ranks = self._ask_case(live, "its preparation", prepare, limit_s)
        except CaseFailedError:
            return
        by_rank = [one.times.steps_ms for one in ranks]
        live.layout = ranks[0].layout
        live.longest_step_s = max(map(max, by_rank)) / 1000
        live.step_s = max(median(ms[-LAST_STEPS:]) for ms in by_rank) / 1000
        if settled is None:
            known = self._read_proof(case, ranks[0]) if proved is None else proved.facts
            place = self.places[0]
            known = {"device_name": place.device_name, "link": place.link, **known}
            self.recorder.set_outcome(index, "ok", facts={**known, **make_case_facts(case, ranks)})
            if (found := live.layout) is not None:
                layout = Layout(case_id=case.case_id, num_bytes=found.num_bytes, parameters=found.parameters)
                self.recorder.append_event(layout, sync=False)
            self._record(live, "warmup", 0, len(self.live), began_s, [one.times for one in ranks])
        self.live.append(live)

    def _read_proof(self, case: Case, first: Prepared) -> dict[str, Any]:
        """Read the facts of both proofs of a case; what they leave open the user is told."""
        gradients, update = first.gradients, first.update
        assert gradients is not None  # it was asked for
        assert update is not None
        if update.inconclusive_reason and not gradients.not_proved:
            self._warn_once(
                "unproven",
                f"Parameters after 2 steps prove nothing of {case.case_id}: {update.inconclusive_reason}; "
                "its gradients are proven. So it is of every case without update_error",
            )
        proof = make_proof_facts(gradients, update)
        if why := proof["not_proved"]:
            name = label_planned_case(case, self.settings.batch_size)
            self.console.print_note(f"{name} is not proved: {why}. What helps: {proof['proved_by']}")
        return proof

    def _make_group(self, live: LiveCase) -> None:
        if live.case.backend and live.group not in self._groups:
            make, limit_s = m.Group(group=live.group), compute_preparing_limit_s(self.settings)
            self._ask_case(live, "its process group", make, limit_s, len(self.workers))
            self._groups.add(live.group)

    def ask(
        self,
        command: m.Command[Any],
        what: str,
        limit_s: float,
        *,
        num_ranks: int,
        index: int | None = None,
        curve: m.GroupKey | None = None,
    ) -> dict[int, m.Report]:
        """Have the first ranks do `what`, and note that it is under way; the reports of all, by rank.

        It concerns the case at `index`, or a curve, or neither. The other ranks wait until it begins, if all
        begin together.
        """
        self.recorder.record_start(index, what, curve)
        commands: dict[int, m.Command[Any]] = dict.fromkeys(range(num_ranks), command)
        if isinstance(command, m.STEP_COMMANDS):
            wait = m.Wait(gives_caches_back=getattr(command, "gives_caches_back", False))
            commands |= dict.fromkeys(range(num_ranks, len(self.workers)), wait)
        return self.workers.ask(commands, what, limit_s)

    def _ask_case(
        self, live: LiveCase, what: str, command: m.Command[T], limit_s: float, num_ranks: int | None = None
    ) -> list[T]:
        """Return the answers of the case's ranks, or of the first `num_ranks`, to a command.

        Raises CaseFailedError where one reports a fault, with which the case ends, and RestartError where the
        ranks cannot go on to another case.
        """
        num_ranks = num_ranks or live.case.num_ranks
        reports = self.ask(command, what, limit_s, num_ranks=num_ranks, index=live.index)
        failure = find_failure(reports)
        if failure is None:
            return [command.read_reply(reports[rank]) for rank in range(num_ranks)]
        said = fail_case(self.recorder, live.index, failure)
        self.console.print_note(said, is_fault=failure.status != "skipped")
        self.release_ranks(reports, live.index, live.group)
        raise CaseFailedError

    def release_ranks(self, reports: Mapping[int, m.Report], index: int | None, group: m.GroupKey) -> None:
        """After a failure, wait for what the ranks have launched, and have them let go of the case.

        Raises RestartError where a process is broken, or where that would never end: ranks that launched
        different numbers of collectives wait for each other, and the next case's all-reduces would pair with
        theirs.
        """
        counts = {report.launched for report in reports.values()} - {m.NO_GROUP}
        is_broken = any(report.fault and report.fault.restart for report in reports.values())
        if is_broken or len(counts) > 1 or None in counts:
            raise RestartError
        settle, what = m.Settle(index=index, group=group), "what a failed case had launched"
        after = self.ask(settle, what, MIN_BLOCK_TIMEOUT_S, num_ranks=len(self.workers))
        if any(report.fault for report in after.values()):
            raise RestartError

    def _record(
        self,
        live: LiveCase,
        phase: str,
        round_index: int,
        position: int,
        started_s: float,
        times: Sequence[BlockTimes],
    ) -> None:
        """Write down a block, with the times of each rank, unless an earlier attempt has."""
        case_id = live.case.case_id
        if (case_id, phase, round_index) in self._earlier:
            return
        for rank, block in enumerate(times):
            if block.trace is not None:
                self.recorder.add_trace(case_id, rank, block.trace)
            for name in FAILED.keys() & block.detail.keys():
                why = f"{block.detail[name]}; the run goes on"
                self._warn_once(name, f"No {FAILED[name]} from rank {rank}: {why}")
        seconds = self.get_elapsed_s() - started_s
        self._schedule.add(live, phase, seconds)
        found = [(self.places[rank].host, rank, block) for rank, block in enumerate(times)]
        self.recorder.add_block(case_id, phase, round_index, position, started_s, found)

    def check_gradients(self, live: LiveCase) -> None:
        """Fail a case whose ranks no longer average all gradients, and measure it no further."""
        if not live.case.communicates:
            return
        self.await_turn()
        agree, what = m.Agree(index=live.index), "the check of its gradients"
        differing = next(filter(None, self.ask_all(agree, what, num_ranks=live.case.num_ranks)), ())
        if differing:
            reason = (
                f"gradients of {format_list(differing, MAX_NAMED)} differ between ranks after the last "
                "round: DDP averages nothing that begins to train after it has wrapped the model; let it "
                "train in module()"
            )
            self.console.print_note(fail_case(self.recorder, live.index, Failure("failed", reason)))
            self.drop_case(live)

    def drop_case(self, live: LiveCase) -> None:
        """Measure a case no further."""
        self.live.remove(live)
        self.ask_all(m.Settle(index=live.index, group=live.group), "dropping a case")

    def ask_all(self, command: m.Command[T], what: str, *, num_ranks: int | None = None) -> list[T]:
        """Return the answers of all ranks, or of the first `num_ranks`, between cases."""
        count, limit_s = num_ranks or len(self.workers), compute_preparing_limit_s(self.settings)
        reports = self.ask(command, what, limit_s, num_ranks=count)
        if (failure := find_failure(reports)) is not None:
            raise RestartError(failure)
        return [command.read_reply(reports[rank]) for rank in range(count)]

    def await_turn(self) -> None:
        """Wait until this run may compute, where it takes turns with others. Raises NotMeasuredError."""
        limit_s = TURN_TIMEOUT_S + compute_preparing_limit_s(
            self.settings
        )  # the other runs have the same settings
        try:
            self._turns.await_turn(limit_s)
        except TimeoutError:
            raise NotMeasuredError(
                f"no end of the wait for this run's turn within {limit_s:g} s: another run on this machine "
                "has it"
            ) from None

    def _show(self, what: str, cases: Sequence[Case], position: int, *, num_rounds: int = 0) -> None:
        sizes = self.settings.batch_size
        now, *others = (label_planned_case(case, sizes) for case in cases[position : position + 2])
        coming = f"; next {others[0]}" if others else ""
        place = f"{position + 1} of {len(cases)}"
        done, how_far = self._stop_rule.describe_progress(num_rounds + position / len(cases))
        self.console.show_progress(f"{what} {place}: {now}{coming}", done, how_far)

    def _warn_once(self, what: str, line: str) -> None:
        if what not in self._said:
            self.console.print_note(line)
        self._said.add(what)
