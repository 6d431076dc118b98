"""A real run of two ranks that trains on after its rounds, broken off meanwhile and resumed."""

import shutil
from pathlib import Path

import pytest
from commands import SMALL, bench_run

from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.run.close import finish

pytestmark = pytest.mark.campaign

SUSTAIN_S = 2.0
SWEEP = ("--modes", "ddp", "--gpus", "1,2", "--bucket-cap-mb", "default", "--passes", "none")
STEADY = ("steady_images_per_s", "steady_change_pct")


@pytest.fixture(scope="module")
def sustained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sustained") / "run"
    how = ("--image-size", "8", "--rounds", "5", "--sustain", f"{SUSTAIN_S}s", "--out", str(folder))
    done = bench_run(*SMALL, *SWEEP, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all rounds done" in done.stdout
    return load_run(folder)


def after_rounds(run):
    return run.blocks[run.blocks["phase"] == "sustained"]


def trained_s(run):
    longest = after_rounds(run).groupby(["case_id", "round"], sort=False)["block_ms"].max()
    return longest.groupby("case_id", sort=False).sum() / 1000


def test_every_case_trains_so_long_in_the_plans_order_after_the_rounds(sustained):
    own = sustained.cases["case_id"].tolist()
    assert len(own) == 3
    assert after_rounds(sustained)["case_id"].drop_duplicates().tolist() == own
    assert sustained.blocks["phase"].tolist()[-len(after_rounds(sustained)) :] == ["sustained"] * len(
        after_rounds(sustained)
    )
    # One step more or less, and a machine of noise may take longer for a block than for the one before.
    assert (trained_s(sustained) > 0.7 * SUSTAIN_S).all()
    for _, found in after_rounds(sustained).groupby(["case_id", "rank"]):
        assert found["round"].tolist() == list(range(1, len(found) + 1))


def test_all_ranks_take_as_many_steps(sustained):
    by_block = after_rounds(sustained).groupby(["case_id", "round"])
    assert (by_block["num_steps"].min() == by_block["num_steps"].max()).all()
    ranks = by_block["rank"].apply(sorted).groupby("case_id").first()
    assert [ranks[case_id] for case_id in sustained.cases["case_id"]] == [[0], [0], [0, 1]]


def test_its_columns_and_the_page(sustained):
    cases = sustained.cases
    assert cases[list(STEADY)].notna().all(axis=None)
    assert cases["num_rounds"].tolist() == [5, 5, 5]
    assert not cases["prefetch"].any()
    page = (sustained.path / "report.html").read_text(encoding="utf-8")
    assert "Throughput, steady state" in page


def test_a_run_broken_off_meanwhile_goes_on_where_it_was(sustained, tmp_path):
    """As a power cut leaves it within the second case's third block."""
    folder = Path(shutil.copytree(sustained.path, tmp_path / "run"))
    journal = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (folder / "journal.jsonl").write_text(
        "".join(line for line in journal if not line.startswith('{"event": "end"'))
    )
    second = sustained.cases["case_id"].iloc[1]
    lines = (folder / "blocks.csv").read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if line.startswith(f"{second},sustained,3,"))
    kept = "".join(lines[:cut])
    (folder / "blocks.csv").write_text(kept + lines[cut][:-9])
    (folder / "cases.csv").unlink()

    broken = Path(shutil.copytree(folder, tmp_path / "closed"))
    assert finish(broken, "interrupted")
    known = load_run(broken).cases["steady_images_per_s"].notna()
    assert known.tolist() == [True, True, False], "what was measured so far"

    done = bench_run("--resume", str(folder), "--quiet")
    assert done.returncode == 0, done.stderr[-4000:]
    resumed = load_run(folder)
    assert (folder / "blocks.csv").read_text().startswith(kept), "nothing is measured again"
    new = resumed.blocks.iloc[len(kept.splitlines()) - 1 :]
    first, *others = sustained.cases["case_id"]
    assert new.loc[new["phase"] == "timed"].empty
    assert new.loc[new["phase"] == "sustained", "case_id"].drop_duplicates().tolist() == others
    assert first not in set(new["case_id"]), "it has trained long enough: it is not even prepared"
    assert (trained_s(resumed) > 0.7 * SUSTAIN_S).all()
    assert not resumed.blocks.duplicated(["case_id", "phase", "round", "rank"])[
        resumed.blocks["phase"] != "warmup"
    ].any()
    assert resumed.cases[list(STEADY)].notna().all(axis=None)
    assert resumed.manifest.timing.stopped_because == "all rounds done"

    again = bench_run("--resume", str(folder))
    assert "is complete: nothing is left to do" in again.stderr
