"""Which code was compared, in words and for programs."""

import html
import json

import pytest
from gate_runs import made_run
from made import made_manifest

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate import output
from ddp_bench.bench.gate.code import Code, check_one_code
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.results.schema import GATED

STEADY = {("single", 1): [10.0, 10.1, 9.9, 10.0, 10.05]}
OWN = {"ddp_bench": {"version": "0.1.0"}, "git": {"commit": "c" * 40, "dirty": False}}


def side(commit, code="x", *, dirty=False, **more):
    workload = {"spec": "net:make", "file": "net.py", "repository": "mynet", "code_sha256": code}
    return {**OWN, "workload": {**workload, "commit": commit * 40, "dirty": dirty}, **more}


@pytest.mark.parametrize(
    ("sides", "interleaved", "lines"),
    [
        (({}, {}), True, []),
        ((OWN, OWN), True, []),
        (
            (side("a"), side("b", "y", dirty=True)),
            True,
            [
                "workload: mynet aaaaaaa -> bbbbbbb with uncommitted changes",
                "measured with ddp-bench 0.1.0 (ccccccc)",
            ],
        ),
        (
            (side("a"), side("b")),
            True,
            [
                "workload: mynet aaaaaaa -> bbbbbbb",
                "both sides import identical code: this is an A/A comparison",
                "measured with ddp-bench 0.1.0 (ccccccc)",
            ],
        ),
        (
            (side("a"), side("a", versions={"torch": "2.16"})),
            True,
            [
                "workload: mynet aaaaaaa",
                "both sides import identical code: what differs is the environment",
                "measured with ddp-bench 0.1.0 (ccccccc)",
            ],
        ),
        (
            (side("a"), side("b", ddp_bench={"version": "0.2.0"}, git={})),
            False,
            [
                "workload: mynet aaaaaaa -> bbbbbbb",
                "both runs imported identical code of the workload",
                "measured with ddp-bench 0.1.0 (ccccccc) -> 0.2.0",
            ],
        ),
        (({}, side("b")), False, ["workload: not recorded -> mynet bbbbbbb"]),
        (
            ({"workload": {"file": "net.py"}}, side("b")),
            False,
            ["workload: net.py in no repository with a commit -> mynet bbbbbbb"],
        ),
    ],
)
def test_the_commits_are_named(*, sides, interleaved, lines):
    ours, theirs = (made_manifest(**side) for side in sides)
    assert Code(ours, theirs, interleaved=interleaved).lines() == lines


def test_code_that_was_edited_between_launches_is_refused():
    check_one_code([made_manifest(**side(commit)) for commit in "ab"])
    check_one_code([made_manifest(**OWN)] * 2)
    with pytest.raises(UsageError, match="was changed while it was measured"):
        check_one_code([made_manifest(**side("a", code)) for code in "xxy"])


def test_every_form_of_output_tells_the_commits():
    runs = [made_run(STEADY, **side(commit)) for commit in "ab"]
    gate = compare(runs[0], runs[1], thresholds=dict.fromkeys(GATED, 0.05))
    line = "workload: mynet aaaaaaa -> bbbbbbb"
    assert output.conditions(gate)[1] == line, "below that the runs were not interleaved"
    assert f"- {line}" in html.unescape(output.markdown(gate))
    code = json.loads(output.as_json(gate))["code"]
    assert code["identical"] is True
    assert [code[name]["workload"]["commit"] for name in ("baseline", "candidate")] == ["a" * 40, "b" * 40]
    assert code["baseline"]["ddp_bench"] == {"version": "0.1.0"}
