"""A gate as JUnit XML, which most CI systems show: a test case for each case that was compared."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from ..common.errors import NotComparableError, UsageError
from ..common.text import escape_controls
from .compare import Gate
from .headline import describe_verdict
from .judge import Change
from .more import estimate_duration_s
from .wording import describe_change, format_change


def write_junit(gate: Gate, *, allow_missing: bool) -> str:
    """Every case of the baseline: what regressed or is missing has failed, what is undecided was skipped.

    Where conditions differ, nothing is known of any case, and all are skipped.

    The format that Jenkins and GitLab read: https://github.com/testmoapp/junitxml.
    """
    by_case: dict[str, list[Change]] = {}
    for comparison in gate.comparisons:
        by_case.setdefault(comparison.case_id, []).append(comparison)
    suite = ET.Element("testsuite", name="ddp-bench gate", tests=str(len(by_case)), errors="0")
    if (created := gate.code.candidate.created_utc) is not None:
        suite.set("timestamp", created)
    sides = (gate.code.baseline, gate.code.candidate)
    if (each_s := estimate_duration_s(sides, in_turns=gate.interleaved)) is not None:
        suite.set("time", f"{gate.num_launches * each_s:.1f}")
    told = ET.SubElement(suite, "properties")
    machine = "; ".join((*gate.machine, *gate.cautions))
    for name, value in (("compared", gate.code.name_sides()), ("machine", machine)):
        ET.SubElement(told, "property", name=name, value=escape_controls(value))
    for case_id, found in by_case.items():
        case = ET.SubElement(
            suite, "testcase", classname="ddp-bench.gate", name=escape_controls(found[0].label or case_id)
        )
        kind, why = _classify_outcome(gate, found, allow_missing=allow_missing)
        if kind:
            ET.SubElement(case, kind, message=escape_controls(why))
        rows = (f"{c.column.label}: {c.verdict} {format_change(c)}".rstrip() for c in found if c.column)
        ET.SubElement(case, "system-out").text = "\n".join(rows)
    for kind, name in (("failure", "failures"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{kind}"))))
    ET.SubElement(
        suite, "system-out"
    ).text = f"{escape_controls(describe_verdict(gate))}\n{escape_controls(gate.code.name_sides())}"
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def write_junit_error(error: UsageError) -> str:
    """Write why no comparison was made: an error, or a skipped case where the runs cannot be compared."""
    is_skipped = isinstance(error, NotComparableError)
    suite = ET.Element("testsuite", name="ddp-bench gate", tests="1", failures="0")
    suite.set("errors", f"{int(not is_skipped)}")
    suite.set("skipped", f"{int(is_skipped)}")
    case = ET.SubElement(suite, "testcase", classname="ddp-bench.gate", name="gate")
    ET.SubElement(case, "skipped" if is_skipped else "error", message=f"{error.label}: {error}")
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _classify_outcome(gate: Gate, found: Sequence[Change], *, allow_missing: bool) -> tuple[str, str]:
    """`failure`, `skipped` or nothing, and why."""
    bad = {name: [c for c in found if c.verdict == name] for name in ("regressed", "missing")}
    if bad["regressed"] or (bad["missing"] and not (allow_missing or gate.conditions_block)):
        return "failure", "; ".join(map(describe_change, bad["regressed"] + bad["missing"]))
    left = [
        c for c in found if c in gate.undecided or c.verdict in ("missing", "not comparable", "not gated")
    ]
    if not left:
        return "", ""
    first = left[0]
    what = describe_change(first) if first.ratio or first.column is None else first.name
    return "skipped", f"{first.verdict}: {what}" + (f" ({first.reason})" if first.column else "")
