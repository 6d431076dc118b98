"""The disk is full, or the results folder is gone: the run ends with one line that says what is kept."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pandas as pd
import pytest
from fault_campaign import Campaign, Deed, deed

pytestmark = pytest.mark.campaign
FULL = [
    deed("disk_full", moment, "fill disk")
    for moment in ("before_first_block", "in_timed_block", "while_writing")
]
VANISHED = [
    deed("folder_vanished", "before_first_block", "remove folder"),
    deed("folder_vanished", "in_timed_block", "rename folder", "elsewhere"),
    deed("folder_vanished", "between_rounds", "remove folder"),
]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    made = Campaign(tmp_path_factory.mktemp("full"))
    disk = made.folder / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    )
    made.out = disk / "run"
    try:
        for fault in FULL:
            made.start(fault)
            (disk / "filler").unlink(missing_ok=not mounted)
        made.start()
        yield made
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("fault", FULL, ids=lambda fault: fault.name)
def test_a_full_disk(full: Campaign, undisturbed: pd.DataFrame, fault: Deed) -> None:
    ended = full.check(fault.name, undisturbed)
    assert ended.code == 2
    said = f"{full.out} cannot be written: "
    assert sum(said in line for line in ended.error.splitlines()) == 1, ended.error
    assert f"python -m bench.run --resume {full.out}" in ended.error
    assert "Traceback" not in ended.error


@pytest.fixture(scope="module")
def vanished(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("vanished"))
    for fault in VANISHED:
        made.start(fault)
    made.start()
    return made


@pytest.mark.parametrize("fault", VANISHED, ids=lambda fault: fault.name)
def test_a_vanished_folder_is_made_again(vanished: Campaign, undisturbed: pd.DataFrame, fault: Deed) -> None:
    ended = vanished.check(fault.name, undisturbed)
    assert ended.code == 2
    assert "has been removed during the run; what it held was written there again" in ended.error
    assert f"python -m bench.run --resume {vanished.out}" in ended.error
    assert "Traceback" not in ended.error
