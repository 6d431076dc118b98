"""Wrong patches of what trains, which the proof has to see, and of the proof, which its tests have to see."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from drawn import ROOT, copied_tree

SAID = "said.txt"
SEEN = {"training": "ProofError", "proof": r"^> +(assert |with pytest\.raises)"}
"""What a test says that sees a patch, by table."""

PATCHES = {
    patch["name"]: patch | {"seen": patch.get("seen", seen)}
    for table, seen in SEEN.items()
    for patch in tomllib.loads((Path(__file__).parent / f"{table}.toml").read_text())["patch"]
}
TESTS = {patch["test"] for patch in PATCHES.values()}


def patched(patch, folder):
    """The text by file of what a patch changes in `folder`. Each old text has to be in its file once."""
    texts = {}
    for edit in (patch, *patch.get("also", ())):
        file = folder / edit["file"]
        text = texts.get(file) or file.read_text(encoding="utf-8")
        found = text.count(edit["old"])
        assert found == 1, f"{edit['file']} has {found} of {edit['old']!r}"
        texts[file] = text.replace(edit["old"], edit["new"])
    return texts


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_still_applies_and_the_test_that_sees_it_exists(name):
    for file, text in patched(PATCHES[name], ROOT).items():
        compile(text, file, "exec")
    file, _, function = PATCHES[name]["test"].partition("::")
    assert f"\ndef {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_as_many_as_meant_and_those_that_came_from_users_are_among_them():
    assert len(PATCHES) == 35
    assert {patch["fits"] for patch in PATCHES.values() if "fits" in patch} == {"B1", "B2", "B3", "B4", "B5"}


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs tests in a copy of the tree; pytest's exit status, and what it said."""
    place = copied_tree(tmp_path_factory.mktemp("tree") / "copy")
    environment = os.environ | {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command, pipe = [sys.executable, str(place / "tests" / "mutants" / "played.py"), SAID], subprocess.PIPE
    with subprocess.Popen(command, cwd=place, env=environment, stdin=pipe, stdout=pipe, text=True) as played:

        def run(*tests):
            played.stdin.write(json.dumps(tests) + "\n")
            played.stdin.flush()
            return int(played.stdout.readline()), (place / SAID).read_text(encoding="utf-8")

        run.place = place
        yield run
        played.stdin.close()
    shutil.rmtree(place)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_where_nothing_is_patched_the_tests_pass(play):
    status, said = play(*sorted(TESTS))
    assert status == 0, said[-4000:]


@pytest.mark.campaign
@pytest.mark.parametrize("name", PATCHES)
def test_a_wrong_patch_is_seen(play, name):
    patch = PATCHES[name]
    texts = patched(patch, play.place)
    before = {file: file.read_text(encoding="utf-8") for file in texts}
    try:
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
        status, said = play(patch["test"])
    finally:
        for file, text in before.items():
            file.write_text(text, encoding="utf-8")
    assert status == pytest.ExitCode.TESTS_FAILED, f"survived {patch['test']}"
    assert re.search(patch["seen"], said, re.MULTILINE), said[-4000:]
