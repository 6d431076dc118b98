"""Turns the rows of runs into everything that the page shows: final strings, figures and tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from ..bench.findings.answers import headline
from ..bench.findings.cautions import Caution
from ..bench.findings.findings import conclude_run
from ..bench.findings.next_step import NextStep, again
from ..bench.findings.numbers import about, plural
from ..bench.findings.verdicts import RESOLVED, Verdict
from ..bench.findings.wording import device_noun, stand_ins
from ..bench.manifest import Manifest
from ..bench.predict.output import Predictions
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import EQUAL, FASTER, SLOWER
from ..bench.results.store import FAILURES, RunData
from ..bench.text import visible
from . import caps, conditions, figures, forest, step, tables, timeline
from .cases import WorkloadCases, with_cells, with_rates, workloads
from .drawing import Figure
from .forms import forms
from .predicted import predicted
from .table import Link, Section, Table

_MOST_HOSTS = 4
_MOMENT = re.compile(r"([0-9-]{10})T([0-9]{2}:[0-9]{2}):[0-9]{2}(?:Z|\+00:00)")
_TRACE = re.compile(r"(?P<case_id>.+)-rank(?P<rank>\d+)\.json\.gz")
_MODEL = re.compile(r"(?P<family>(?:wide_)?resne(?:x)?t)(?P<rest>[0-9].*)")
_FAMILIES = {"resnet": "ResNet", "resnext": "ResNeXt", "wide_resnet": "Wide ResNet"}
_STATES = {FASTER: "found", SLOWER: "found", RESOLVED: "found", EQUAL: "equal"}


@dataclass(frozen=True)
class Files:
    """What the page says of a run's files: tables, traces by case, failures by their name in its folder."""

    tables: tuple[Link, ...] = ()
    traces: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    failures: Mapping[str, Link] = field(default_factory=dict)
    data: Link | None = None
    """The numbers as CSV within the page."""

    @classmethod
    def of(cls, folder: Path, page_folder: Path | None) -> Files:
        """Find the files of the run in `folder`; links lead there where it lies in or below `page_folder`.

        Links are relative, so the page and the run have to move together. None makes no links.
        """
        below = None
        if page_folder is not None and folder.resolve().is_relative_to(page_folder.resolve()):
            below = folder.resolve().relative_to(page_folder.resolve())

        def link(label: str, name: str) -> Link:
            return Link(label, "" if below is None else f"./{quote((below / name).as_posix())}")

        traces: dict[str, list[tuple[int, Link]]] = {}
        for path in (folder / "traces").glob("*.json.gz") if below is not None else ():
            if (match := _TRACE.fullmatch(path.name)) is not None:
                rank, name = int(match["rank"]), f"traces/{path.name}"
                traces.setdefault(match["case_id"], []).append((rank, link(f"rank {rank}", name)))
        kept = sorted(f"{FAILURES}/{path.name}" for path in (folder / FAILURES).glob("*.txt"))
        names = ("cases.csv", "comparisons.csv", "blocks.csv", "manifest.json")
        return cls(
            tuple(link(name, name) for name in names if (folder / name).is_file()),
            {case_id: tuple(one for _, one in sorted(links)) for case_id, links in traces.items()},
            {name: link(name, name) for name in kept},
        )


def data_link(name: str, csv: bytes) -> Link:
    """A link of a page that holds a file of its own, which a browser saves under `name`."""
    return Link(name, f"data:text/csv;base64,{base64.b64encode(csv).decode()}")


class Card(NamedTuple):
    """One answer: `state` is `found`, `equal` or `open`, `label` names it in words, `paste` is code."""

    title: str
    state: str
    label: str
    sentence: str
    paste: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole page: `heading` names what was measured, `title` the run; what is not given is not shown."""

    title: str
    heading: str
    status: str
    subtitle: Sequence[str] = ()
    command: str = ""
    warnings: Sequence[str] = ()
    cards: Sequence[Card] = ()
    trust: Mapping[str, str] = field(default_factory=dict)
    """What the answers are worth, by what they claim; empty where there are none."""
    following: NextStep | None = None
    cautions: Sequence[Caution] = ()
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    not_drawn: Sequence[str] = ()
    """Why a figure is missing."""
    more_figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    """The first is the page's; the others are folded."""
    files: Files = field(default_factory=Files)
    unmeasured: Table | None = None
    conditions: Sequence[conditions.Group] = ()
    ranks: Table | None = None
    topology: str = ""
    forms: Section | None = None
    predicted: Section | None = None

    @property
    def sections(self) -> dict[str, Section]:
        """What stands between the figures and the numbers, by its key."""
        made = {"forms": self.forms, "predicted": self.predicted}
        return {name: section for name, section in made.items() if section is not None}

    @property
    def folds(self) -> dict[str, Section]:
        """What is folded, by its key."""
        more, others = self.more_figures, self.tables[1:]
        return {
            **({"more": Section(more[0].title.partition(":")[0], figures=more)} if more else {}),
            **({"all-tables": Section("More tables", tables=others)} if others else {}),
        }

    @property
    def every_figure(self) -> list[Figure]:
        """Every figure of the page, in its order."""
        of_sections = [figure for section in self.sections.values() for figure in section.figures]
        return [*self.figures, *of_sections, *self.more_figures]


def page(
    run: RunData,
    files: Files | None = None,
    predictions: Predictions | None = None,
    *,
    price: float | None = None,
) -> Page:
    """Make the page of a run.

    Args:
        run: what was measured.
        files: what the page offers of the run's files.
        predictions: made of this run, to be drawn.
        price: of a device for an hour.
    """
    files = files or Files()
    title = run.manifest.name or run.path.name
    cases, manifest = run.results, run.manifest
    conclusion, comparisons = conclude_run(run), run.compared
    measured = workloads(cases)
    main: list[Figure] = []
    not_drawn: list[str] = []
    more: list[Figure] = []
    for i, workload in enumerate(measured, start=1):
        place = f"w{i}"
        if any(c.answers_nothing for c in workload.cases) and not headline(workload.cases):
            not_drawn.append("No figures: cases that share a GPU tell nothing about speed.")
            continue
        one_step, why_not = timeline.one_step(workload, run.blocks, key=place)
        not_drawn += [why_not] if why_not else []
        first = (
            figures.scaling(workload, key=place),
            forest.against_default(workload, comparisons, key=place),
            caps.bucket_caps(workload, key=place),
            step.breakdown(workload, comparisons, key=place),
            one_step,
        )
        rest = (figures.drift(workload, run.times, key=place),)
        suffix = f": {workload.name}" if len(measured) > 1 else ""
        for found, kept in ((first, main), (rest, more)):
            kept += [replace(one, title=f"{one.title}{suffix}") for one in found if one is not None]
    shown = [
        with_cells(with_rates(case, manifest, price), workload=w.name if len(measured) > 1 else "")
        for w in measured
        for case in w.cases
    ]
    return Page(
        title=title,
        heading=", ".join(filter(None, (heading(cases) or title, conditions.link(manifest, cases)))),
        status=status(manifest, cases, conclusion.verdicts),
        subtitle=_subtitle(run, measured, title),
        command=again(manifest) or " ".join(manifest.argv),
        warnings=_warnings(cases, conditions.link(manifest, cases)),
        cards=cards(conclusion.verdicts),
        following=conclusion.next_step,
        cautions=conclusion.cautions,
        trust=conclusion.trust.lines if conclusion.trust else {},
        notes=conclusion.notes,
        figures=main,
        not_drawn=tuple(dict.fromkeys(not_drawn)),
        more_figures=more,
        tables=tables.tables(shown, files.traces, comparisons),
        files=files,
        unmeasured=tables.unmeasured(cases, files.failures),
        conditions=conditions.groups(manifest, cases),
        ranks=conditions.ranks(manifest),
        topology=(manifest.environment.topology or "").strip("\n"),
        predicted=predicted(run, predictions, key="predicted") if predictions else None,
        forms=forms(measured),
    )


def heading(cases: Sequence[CaseResult]) -> str:
    """Name what was measured on what: `ResNet-18, 1\N{EN DASH}4 CPU cores`."""
    shown = [case for case in cases if case.is_ok] or cases
    names = " and ".join(dict.fromkeys(model_name(case.arch) for case in shown if case.arch))
    own = [case for case in shown if not case.oversubscribed] or shown
    counts = [case.num_devices for case in own if case.num_devices]
    noun = " or ".join(dict.fromkeys(device_noun(case.device_type) for case in shown if case.device_type))
    if not counts or not noun:
        return names
    low, high = min(counts), max(counts)
    where = plural(low, noun) if low == high else f"{low}\N{EN DASH}{plural(high, noun)}"
    num_hosts = max(case.num_nodes for case in shown)
    where += f" of {num_hosts:,d} hosts" if num_hosts > 1 else ""
    return ", ".join(filter(None, (names, where)))


def model_name(arch: str) -> str:
    """Write a built-in architecture as papers do: `ResNet-18`; another name as it is."""
    found = _MODEL.fullmatch(arch)
    return arch if found is None else f"{_FAMILIES[found['family']]}-{found['rest']}"


def status(manifest: Manifest, cases: Sequence[CaseResult], verdicts: Sequence[Verdict]) -> str:
    """Say in one line how the run ended and how much of its questions it answered."""
    why = manifest.timing.stopped_because or ""
    num_skipped = sum(case.status == "skipped" for case in cases)
    answered = sum(not verdict.is_open for verdict in verdicts)
    ok = [case for case in cases if case.is_ok]
    if not ok:
        said = "nothing measured"
    elif not verdicts:
        shared = any(case.answers_nothing for case in ok)
        said = "it works; shared GPUs tell nothing about speed" if shared else "nothing to compare"
    elif not answered:
        said = "undecided"
    else:
        every = answered == len(verdicts)
        said = "answered" if every else f"{answered} of {plural(len(verdicts), 'question')} answered"
    rounds = max((case.num_rounds for case in ok), default=0)
    took = manifest.timing.measuring_s
    interrupted = why == "interrupted"
    parts = (
        f"Interrupted, {said}" if interrupted else f"{said[:1].upper()}{said[1:]}",
        f"{len(ok):,d} of {plural(len(cases) - num_skipped, 'case')} measured",
        f"{num_skipped:,d} skipped" if num_skipped else "",
        plural(rounds, "round") if rounds else "",
        f"{about(took)} of measuring" if took else "",
        f"ended: {why}" if why and not interrupted else "",
    )
    return " · ".join(part for part in parts if part)


def _subtitle(run: RunData, measured: Sequence[WorkloadCases], title: str) -> list[str]:
    """Say what trained on what: workload, processor, backend, torch, hosts, time."""
    manifest, cases = run.manifest, run.results
    machine = manifest.environment
    named = dict.fromkeys(case.device_name for case in cases)
    if all(case.device_type == "cpu" for case in cases) and machine.cpu_model:
        cores = f", {plural(machine.num_cores, 'core')}" if machine.num_cores else ""
        named = {f"{machine.cpu_model}{cores}": None}
    hosts = list(dict.fromkeys(filter(None, (machine.host, *(rank.host for rank in manifest.ranks)))))
    more = f" and {plural(len(hosts) - _MOST_HOSTS, 'other')}" if len(hosts) > _MOST_HOSTS else ""
    torch = manifest.versions.get("torch") or max(case.torch_version for case in cases)
    link, moment = conditions.link(manifest, cases), manifest.created_utc or ""
    stamp = _MOMENT.fullmatch(moment)
    parts = (
        measured[0].label if len(measured) == 1 else plural(len(measured), "workload") if measured else "",
        *named,
        *dict.fromkeys(f"backend {case.backend}" for case in cases if case.backend),
        f"torch {torch}" if torch else "",
        f"{'hosts' if len(hosts) > 1 else 'host'} {', '.join(hosts[:_MOST_HOSTS])}{more}" if hosts else "",
        f"link {link}" if link else "",
        f"{stamp[1]} {stamp[2]} UTC" if stamp else moment,
        f"run {title}" if title != "run" else "",
    )
    return [part for part in parts if part]


def _warnings(cases: Sequence[CaseResult], link: str) -> list[str]:
    """Return what a reader must know before any number; `link` is that of a lab."""
    tried = [case for case in cases if case.status != "skipped"]
    broken = sum(case.has_failed for case in tried)
    stand_in = " ".join(f"{said}." for said in stand_ins(cases))
    made = [stand_in] if stand_in else []
    made += ["Hosts and link are made by bench.lab on one machine."] if link else []
    if any(case.oversubscribed for case in tried if case.is_ok):
        made.append(
            "Cases with more devices than the machine has share cores or GPUs (“shared”, drawn hollow): they "
            "say nothing about scaling."
        )
    if broken:
        made.append(f"{broken:,d} of {plural(len(tried), 'case')} did not finish: see “Not measured”.")
    return made


def cards(verdicts: Iterable[Verdict]) -> list[Card]:
    """Make a card per answer."""
    return [
        Card(
            title=verdict.title,
            state=_STATES.get(verdict.answer, "open"),
            label=verdict.label,
            sentence=visible(verdict.sentence),
            paste=visible(verdict.paste),
        )
        for verdict in verdicts
    ]
