"""A gate as JUnit XML, which most CI systems show: a test case for each case that was compared."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from ..common.errors import ExitCode, NotComparableError, UsageError
from ..common.text import escape_controls
from .code import name_sides
from .decide import decide
from .headline import describe_verdict
from .judge import Change
from .result import Gate
from .wording import describe_change, format_change


def write_junit(gate: Gate) -> str:
    """Every case of the baseline: what regressed or is missing has failed, what is undecided was skipped.

    Where conditions differ, nothing is known of any case, and all are skipped.

    The format that Jenkins and GitLab read: https://github.com/testmoapp/junitxml.
    """
    by_case: dict[str, list[Change]] = {}
    for comparison in gate.comparisons:
        by_case.setdefault(comparison.case_id, []).append(comparison)
    suite = ET.Element("testsuite", name="ddp-bench gate", tests=str(len(by_case)), errors="0")
    if (created := gate.candidate.manifest.created_utc) is not None:
        suite.set("timestamp", created)
    if gate.launch_s is not None:
        suite.set("time", f"{gate.num_launches * gate.launch_s:.1f}")
    told, compared = ET.SubElement(suite, "properties"), name_sides(gate.baseline, gate.candidate)
    machine = "; ".join((*gate.machine, *gate.cautions))
    for name, value in (("compared", compared), ("machine", machine)):
        ET.SubElement(told, "property", name=name, value=escape_controls(value))
    for case_id, found in by_case.items():
        case = ET.SubElement(
            suite, "testcase", classname="ddp-bench.gate", name=escape_controls(found[0].label or case_id)
        )
        kind, why = _classify_outcome(gate, found)
        if kind:
            ET.SubElement(case, kind, message=escape_controls(why))
        rows = (f"{c.column.label}: {c.verdict} {format_change(c)}".rstrip() for c in found if c.column)
        ET.SubElement(case, "system-out").text = "\n".join(rows)
    for kind, name in (("failure", "failures"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{kind}"))))
    ET.SubElement(
        suite, "system-out"
    ).text = f"{escape_controls(describe_verdict(gate))}\n{escape_controls(compared)}"
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


def _classify_outcome(gate: Gate, found: Sequence[Change]) -> tuple[str, str]:
    """Classify what is known of a case: `failure`, `skipped` or nothing, and why."""
    decision = decide(found, gate.policy)
    if decision.verdict == "pass" and not gate.conditions_block:
        return "", ""
    if decision.exit_code == ExitCode.FAILED and not gate.conditions_block:
        return "failure", "; ".join(map(describe_change, decision.reasons))
    first = (*decision.reasons, *found)[0]
    what = describe_change(first) if first.ratio or first.column is None else first.name
    return "skipped", f"{first.verdict}: {what}" + (f" ({first.reason})" if first.column else "")
