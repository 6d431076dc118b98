"""Shows several runs in one drawing: machines, versions or settings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddp_bench.bench.findings.next_step import NOT_INTERLEAVED
from ddp_bench.bench.findings.numbers import TIMES, per_second, plural, with_interval
from ddp_bench.bench.findings.wording import Row, cap_label, estimate, short_mode, text
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.store import RunData
from ddp_bench.report import caps
from ddp_bench.report.between_runs import MeasuredRun, findings, following, in_turns, measured_run, ratios
from ddp_bench.report.devices import BARS, LOG_FROM, by_devices, device_ticks, hollow_note
from ddp_bench.report.drawings import MOST_RUNS, Chart, Panel, Point, Series, Tick
from ddp_bench.report.model import Section, Table, TableColumn
from ddp_bench.report.select import WorkloadCases

_MODES = ("dp", "ddp")
_HOW = (
    "Each run has its colour, mark and line. What differs between runs that were not measured in turns, "
    "below, and the time of day, can cause a difference. "
)
_NOTE = "The same cases of every run, beside each other."
_UNLIKE = "The runs do not measure the same work, so only ratios compare: "
_UNITS_DIFFER = "Throughputs are not comparable, because the runs count different units: "
_TABLE_NOTE = (
    "Throughput with its 95% interval over rounds, of cases that several runs measured, and its ratio to the "
    "first run's. The intervals of the ratios hold all at once"
)
_SEPARATE = (
    ", and hold how much each run changed within itself; a change of the machine between the runs may be "
    "larger."
)
_IN_TURNS = (
    ". The runs were measured in turns, so the ratio is the median of those within rounds, where the machine "
    "did the same to both; it may differ from the quotient of the throughputs."
)


def section(
    titles: Sequence[str], runs: Sequence[RunData], measured: Sequence[Sequence[WorkloadCases]]
) -> Section | None:
    """Show what can be drawn of several runs together, in the order given; None for fewer than two.

    Workloads of one name belong together; runs that have one workload each are compared whatever its name.
    """
    labels = dict.fromkeys(workload.label for own in measured for workload in own)
    alone = all(len(own) <= 1 for own in measured)
    groups = [
        [
            measured_run(run, title, f"run{i}", workload)
            for i, (title, run, own) in enumerate(zip(titles, runs, measured, strict=True), start=1)
            for workload in own
            if alone or workload.label == label
        ]
        for label in ([""] if alone else labels)
    ]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return None
    drawn = [_figures(group[:MOST_RUNS], f"together-{i}") for i, group in enumerate(groups, 1)]
    found = [ratios(group) for group in groups]
    pairs = list(zip(groups, found, strict=True))
    tables = [made for pair in pairs if (made := _table(*pair)) is not None]
    names = [group[0].workload.label for group in groups]
    said = [
        sentence if len(groups) == 1 else f"{name}: {sentence}"
        for pair, name in zip(pairs, names, strict=True)
        for sentence in findings(*pair)
    ]
    if len(groups) > 1:
        drawn = [
            [replace(figure, title=f"{figure.title}: {name}") for figure in figures]
            for figures, name in zip(drawn, names, strict=True)
        ]
    return Section(
        title="The runs side by side",
        notes=(_NOTE, *(note for group in groups for note in _notes(group))),
        figures=tuple(figure for figures in drawn for figure in figures),
        tables=tuple(tables),
        findings=tuple(said),
        warnings=(NOT_INTERLEAVED,) if said and not all(map(in_turns, groups)) else (),
        following=following(groups[0]) if said and len(groups) == 1 else None,
    )


def _notes(group: Sequence[MeasuredRun]) -> list[str]:
    labels = {run.workload.label for run in group}
    units = [f"{run.title} {run.workload.unit}" for run in group]
    counted = [] if _unit(group) else [f"{_UNITS_DIFFER}{', '.join(units)}."]
    said = [_UNLIKE + "; ".join(f"{run.title}: {run.workload.label}" for run in group) + "."]
    more = [f"Of {len(group)} runs the first {MOST_RUNS} are drawn."] if len(group) > MOST_RUNS else []
    return [*(said if len(labels) > 1 else []), *counted, *more]


def _unit(group: Sequence[MeasuredRun]) -> str:
    """Return what the throughput of all runs counts; empty where they differ in it."""
    units = {run.workload.unit for run in group}
    return units.pop() if len(units) == 1 else ""


def _figures(group: Sequence[MeasuredRun], key: str) -> list[Chart]:
    device, unit = _device(group), _unit(group)
    made = (
        _against_devices(
            group,
            column=("images_per_s", 1.0, per_second(unit)),
            words=(f"{key}-throughput", "Throughput of every run", f"throughput ({per_second(unit)})"),
            device=device,
            how="Higher is better. ",
        )
        if unit
        else None,
        _against_devices(
            group,
            column=("efficiency", 100.0, "%"),
            words=(f"{key}-efficiency", "Scaling efficiency of every run", "efficiency (%)"),
            device=device,
            how="Efficiency is throughput over that of the run's own “single”, divided by the number of "
            "devices: it compares machines of different speed. ",
        ),
        _caps(group, key, device),
    )
    return [figure for figure in made if figure is not None]


def _against_devices(
    group: Sequence[MeasuredRun],
    *,
    column: tuple[str, float, str],
    words: tuple[str, str, str],
    device: str,
    how: str,
) -> Chart | None:
    """Make a panel per mode and a series per run."""
    name, factor, unit = column
    key, title, y_label = words
    found = [
        (run, series) for run in group for series in by_devices(run.workload, name, factor) if series.points
    ]
    modes = [mode for mode in _MODES if sum(series.style == mode for _, series in found) > 1]
    panels = tuple(
        Panel(
            _mode_name(group, mode),
            tuple(
                replace(series, label=run.title, style=run.style)
                for run, series in found
                if series.style == mode
            ),
        )
        for mode in modes
    )
    counts = sorted({p.x for panel in panels for s in panel.series for p in s.points})
    if not counts or counts == [1.0]:
        return None
    return Chart(
        key=key,
        title=title,
        x_label=f"devices ({device}s)",
        y_label=y_label,
        ticks=device_ticks(counts),
        panels=panels,
        caption=" ".join(f"{_finding(panel, device, unit)}." for panel in panels),
        how_to_read=f"{how}{_HOW}{BARS}{hollow_note(s for panel in panels for s in panel.series)}",
        log_x=counts[-1] > LOG_FROM,
    )


def _caps(group: Sequence[MeasuredRun], key: str, device: str) -> Chart | None:
    """Make a panel per device count that several runs swept."""
    by_run = [(run, caps.points(run.workload)) for run in group]
    counts = sorted({n for _, by_count in by_run for n, marks in by_count.items() if len(marks) > 1})
    several = {n: [run for run, by_count in by_run if len(by_count.get(n, {})) > 1] for n in counts}
    counts = [n for n in counts if len(several[n]) > 1]
    order = caps.in_order(by_count[n] for _, by_count in by_run for n in counts if n in by_count)
    panels = tuple(
        Panel(
            f"DDP, {plural(n, device)}",
            tuple(
                Series(run.title, run.style, _bare(caps.placed(by_count[n], order)), joined=False)
                for run, by_count in by_run
                if run in several[n]
            ),
        )
        for n in counts
    )
    if not panels:
        return None
    said = [
        f"{panel.title}: "
        + "; ".join(
            f"{series.label} has its shortest step at {_best(series, order)}" for series in panel.series
        )
        for panel in panels
    ]
    return Chart(
        key=f"{key}-buckets",
        title="Step time against bucket cap, every run",
        x_label="bucket cap (MiB)",
        y_label="step time (ms)",
        ticks=tuple(Tick(float(i), cap) for i, cap in enumerate(order)),
        panels=panels,
        caption=". ".join(said) + ".",
        how_to_read=f"Lower is better. {_HOW}{BARS} Each panel has its own scale."
        f"{hollow_note(s for panel in panels for s in panel.series)}",
        from_zero=False,
    )


def _bare(points: Sequence[Point]) -> tuple[Point, ...]:
    """Drop the number of buckets beside each mark: several runs leave no room for it."""
    return tuple(replace(point, note="") for point in points)


def _best(series: Series, order: Sequence[str]) -> str:
    best = min(series.points, key=lambda point: point.y)
    cap = order[int(best.x)]
    return f"{cap_label(cap)}, {with_interval(best.interval, 'ms')}"


def _finding(panel: Panel, device: str, unit: str) -> str:
    """Name each run, best first, at the largest count of unshared devices that most runs have."""
    counts = [p.x for series in panel.series for p in series.points]
    shared = {p.x for series in panel.series for p in series.points if p.hollow}
    at = max(set(counts), key=lambda n: (counts.count(n), n not in shared, n))
    there = [(p, series.label) for series in panel.series for p in series.points if p.x == at]
    each = [
        f"{label} {with_interval(p.interval, unit)}"
        for p, label in sorted(there, key=lambda mark: -mark[0].y)
    ]
    return f"{panel.title} on {plural(at, device)}: {', '.join(each)}"


def _table(group: Sequence[MeasuredRun], found: Sequence[Mapping[str, Comparison]]) -> Table | None:
    """Tabulate throughput of every case that several runs have, a column per run; None in several units."""
    unit = _unit(group)
    if not unit:
        return None
    by_run = [run.rows for run in group]
    names = dict.fromkeys(name for rows in by_run for name in rows)
    kept = [name for name in names if sum(name in rows for rows in by_run) > 1]
    rows = tuple(
        (name, *_cells([rows.get(name) for rows in by_run], [own.get(name) for own in found]))
        for name in kept
    )
    first, *others = (run.title for run in group)
    columns = (
        TableColumn("Case"),
        TableColumn(f"{first} ({per_second(unit)})", "number"),
        *(
            TableColumn(name, "number")
            for title in others
            for name in (f"{title} ({per_second(unit)})", f"{title} / {first} ({TIMES})")
        ),
    )
    note = _TABLE_NOTE + (_IN_TURNS if in_turns(group) else _SEPARATE)
    return Table("Throughput side by side", note, columns, rows) if rows else None


def _cells(rows: Sequence[Row | None], found: Sequence[Comparison | None]) -> list[str]:
    rates = [None if row is None else estimate(row, "images_per_s") for row in rows]
    cells = [with_interval(rates[0])]
    for rate, one in zip(rates[1:], found, strict=True):
        cells += [with_interval(rate), with_interval(None if one is None else one.ratio)]
    return cells


def _mode_name(group: Sequence[MeasuredRun], mode: str) -> str:
    labels = dict.fromkeys(
        short_mode(row) for run in group for row in records(run.workload.cases) if text(row["mode"]) == mode
    )
    return " and ".join(labels)


def _device(group: Sequence[MeasuredRun]) -> str:
    kinds = {run.workload.device for run in group}
    return kinds.pop() if len(kinds) == 1 else "device"
