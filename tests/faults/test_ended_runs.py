"""The whole run is ended: politely, at once, and with damage to its files; each resume is ended again."""

from __future__ import annotations

import shlex
import signal

import pandas as pd
import pytest
from fault_campaign import Campaign, Deed, damage, deed, forget

pytestmark = pytest.mark.campaign
MOMENTS = ("before_first_block", "in_timed_block", "between_rounds")


def parent(kind: str, number: int, *more: str) -> list[Deed]:
    return [deed(kind, moment, "signal parent", number) for moment in (*MOMENTS, *more)]


KILLED = parent("launcher_killed", signal.SIGKILL, "while_writing")
TERMINATED = parent("sigterm", signal.SIGTERM)
# Ctrl-C takes the same path as SIGTERM: one moment is enough.
INTERRUPTED = [deed("sigint", "in_timed_block", "signal parent", signal.SIGINT)]
DAMAGED = [
    deed("files_damaged", moment, "signal parent", signal.SIGKILL)
    for moment in ("in_timed_block", "between_rounds", "while_writing")
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("killed"))
    for fault in KILLED:
        made.start(fault)
    made.start()
    return made


@pytest.mark.parametrize("fault", KILLED, ids=lambda fault: fault.name)
def test_a_killed_launcher_leaves_no_rank_behind(
    killed: Campaign, undisturbed: pd.DataFrame, fault: Deed
) -> None:
    """`start` waits for every process to go; the lock of the dead run, still there, holds nobody up."""
    assert killed.check(fault.name, undisturbed).code == -signal.SIGKILL
    assert (killed.out / ".lock").read_text().startswith("process ")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("asked"))
    for fault in (*TERMINATED, *INTERRUPTED):
        made.start(fault)
    made.start()
    return made


@pytest.mark.parametrize("fault", TERMINATED + INTERRUPTED, ids=lambda fault: fault.name)
def test_a_run_that_is_asked_to_end(asked: Campaign, undisturbed: pd.DataFrame, fault: Deed) -> None:
    ended = asked.check(fault.name, undisturbed)
    assert ended.code == 130
    assert ended.manifest.timing.stopped_because == "interrupted"
    assert ended.error.splitlines()[-1].endswith(f"python -m bench.run {shlex.join(asked.resume)}")
    assert "Traceback" not in ended.error


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, dict[str, set[str]]]:
    made, gone = Campaign(tmp_path_factory.mktemp("damaged")), {}
    for fault in DAMAGED:
        made.start(fault)
        gone[fault.name] = damage(made.out, fault.name)
        forget(made, gone[fault.name])
    made.start()
    return made, gone


@pytest.mark.parametrize("fault", DAMAGED, ids=lambda fault: fault.name)
def test_a_cut_table_and_a_garbled_journal_cost_the_last_block_alone(
    damaged: tuple[Campaign, dict[str, set[str]]], undisturbed: pd.DataFrame, fault: Deed
) -> None:
    campaign, gone = damaged
    campaign.check(fault.name, undisturbed)
    again = {tuple(line.split(",")[:3]) for line in campaign.ended["end"].rows}
    assert {tuple(line.split(",")[:3]) for line in gone[fault.name]} <= again
    assert not gone[fault.name] & campaign.ended["end"].rows
