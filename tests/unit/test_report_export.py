from html import unescape

import pytest
from report_runs import blocks, case, dashed, run, usual_cases

from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.store import RunWriter
from ddp_bench.report.build import markdown
from ddp_bench.report.main import main
from ddp_bench.report.page import page


@pytest.fixture
def usual(tmp_path):
    folder = tmp_path / "usual"
    folder.mkdir()
    writer = RunWriter(folder)
    writer.write_manifest(Manifest(name="nightly"))
    made = run(usual_cases())
    writer.append("blocks.csv", blocks(usual_cases()))
    writer.replace("cases.csv", made.cases)
    writer.replace("comparisons.csv", made.comparisons)
    return folder


def test_markdown_has_the_verdict_and_every_case(usual, capsys):
    assert main([str(usual), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == dashed("## ResNet-50, 1--4 GPUs")
    shown = page([run(usual_cases())]).runs[0]
    said = unescape("\n".join(lines))
    assert all(card.sentence in said and f"{card.title}: {card.label}." in said for card in shown.cards)
    (command,) = (line for line in lines if line.startswith("python -m bench."))
    assert command.split()[:3] == shown.following.command.split()[:3]
    assert any("nightly" in line for line in lines)
    assert any(line.startswith(dashed("| DDP, 2 GPUs, cap default | 180 (178--182) |")) for line in lines)
    assert any("rank 3 died: exit code 9" in line for line in lines)
    assert not (usual / "report.html").exists()


def test_markdown_goes_into_a_file(usual, tmp_path, capsys):
    out = tmp_path / "summary.md"
    assert main([str(usual), "--markdown", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text(encoding="utf-8").startswith(dashed("## ResNet-50, 1--4 GPUs\n"))


def test_hostile_text_cannot_leave_its_cell():
    hostile = "a|b\n| c | [x](javascript:1) <img src=x> `d` @someone $x$ ~~e~~ https://x.y **f** \\| #1"
    text = markdown(page([run([case("ddp", 2, status="failed", reason=hostile)], {"name": hostile})]))
    (row,) = [line for line in text.splitlines() if line.startswith("| failed ")]
    assert row.count("|") == 7
    assert "a&#124;b &#124; c &#124; [x&#93;(javascript:1)" in row
    assert not set("<`@$~*\\#") & set(row.replace("&#", ""))
    assert "://" not in text
    assert text.count("\n## ") == 0


def test_several_runs_begin_with_what_they_say_together_then_what_differs():
    first, second = (
        run(usual_cases(), {"name": name, "settings": {"precision": precision}}, path=f"runs/{name}")
        for name, precision in (("a", "fp32"), ("b", "bf16"))
    )
    text = markdown(page([first, second]))
    assert text.startswith("**Not told apart are b and a in ")
    assert "## What differs between the runs\n\n| Condition | a | b |\n| --- | --- | --- |\n" in text
    assert text.index("\n## What differs") < text.index("\n## a: ResNet") < text.index("\n## b: ResNet")


def test_every_figure_becomes_a_picture(usual, tmp_path, capsys):
    assert main([str(usual), "--png", str(tmp_path / "slides")]) == 0
    keys = [figure.key for figure in page([run(usual_cases())]).figures]
    assert capsys.readouterr().out.split() == [str(tmp_path / "slides" / f"{key}.png") for key in keys]
    assert sorted(p.name for p in (tmp_path / "slides").iterdir()) == sorted(f"{key}.png" for key in keys)


def test_format_markdown_is_the_same_summary(usual, capsys):
    assert main([str(usual), "--markdown"]) == 0
    first = capsys.readouterr().out
    assert main([str(usual), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == first
    assert main([str(usual), "--format", "html"]) == 0
    assert capsys.readouterr().out.strip() == str(usual / "report.html")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--markdown", "--png", "x"], "--png"),
        (["--format", "word"], "--format"),
        (["--png", "{folder}/x", "--out", "y"], "--out"),
        (["--png", "{folder}/usual/cases.csv"], "--png"),
        (["--markdown", "--out", "{folder}/none/a.md"], "--out"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, named, usual, capsys):
    assert main([str(usual), *(a.format(folder=usual.parent) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("report: error: ")
    assert err.count("\n") == 1
    assert named in err


def test_run_without_figures_says_so(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    writer = RunWriter(tmp_path / "run")
    writer.write_manifest(Manifest())
    writer.replace("cases.csv", run([case("single", 1, 100.0)]).cases)
    assert main([str(tmp_path / "run"), "--png", str(tmp_path / "slides")]) == 2
    assert "no figure" in capsys.readouterr().err
    assert not (tmp_path / "slides").exists()
