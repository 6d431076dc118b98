"""Every option that a help offers is one that its command takes."""

import contextlib
import io
import re
import shutil
import sys

import pytest
from tried_commands import put_run, stop_at_processes, tried

from ddp_bench.__main__ import COMMANDS, load_main

BESIDE = {
    "predict": "RUN --gpus 2",
    "gate": "RUN OTHER",
    "lab": "--hosts 2 --rate 1gbit",
    "export": "RUN --format zip --out a.zip",
    "report": "RUN",
    "run": "--device cpu --gpus 2 --arch resnet20",
    "tune": "--device cpu --gpus 2 --arch resnet20",
}
"""What a command needs beside an option."""

BEHIND = dict.fromkeys(("lab", "watch"), ("--", "python", "x.py"))
OF_RATE = "--throughput 319 --arch resnet50 --batch-size 32 --gpus 2 --network ib-100g"
IN_TURNS = "--interleave . --quiet"
INSTEAD = {
    **{
        ("predict", option): OF_RATE for option in ("--throughput", "--arch", "--image-size", "--without-ddp")
    },
    ("predict", "--workload"): OF_RATE.replace("--arch resnet50 ", ""),
    ("report", "--compare-with"): "GPUS",
    ("predict", "--gpus-per-node"): "RUN --gpus 2 --intra pcie-4",
    ("run", "--resume"): "",
    **{
        ("gate", option): IN_TURNS
        for option in ("--interleave", "--launches", "--max-time", "--dry-run", "--python", "--out")
    },
    **{("gate", option): IN_TURNS for option in ("--env", "--baseline-env")},
    **{(name, "--workload"): "--device cpu --gpus 2" for name in ("run", "tune")},
    **{(name, "--optimize-ddp"): "--compile on --device cpu" for name in ("run", "tune")},
    **{(name, "--skip-all-reduce-unused-params"): "--static-graph" for name in ("run", "tune")},
    **{("gate", option): "RUN OTHER" for option in ("--json", "--markdown")},
}
"""What it needs beside an option of a case of its own."""

VALUES = {
    "--workload": "net:make", "--config": "some.toml", "--preset": "quick", "--arch": "resnet20",
    "--python": "python3", "--throughput": "319", "--threshold": "5%", "--predictions": "p.json",
    "--network": "ib-100g", "--intra": "pcie-4", "--bucket-cap-mb": "default,1", "--scaling": "weak",
    "--comm-hook": "none", "--validate": "RUN", "--rate": "1gbit", "--margin": "2%",
    "--precision-target": "2%", "--max-time": "60s", "--case-timeout": "60s", "--modes": "ddp",
    "--device": "cpu", "--data": "host", "--precision": "fp32", "--backend": "gloo", "--sweep": "star",
    "--passes": "none", "--compile": "off", "--mp-policy": "none", "--pipeline-schedule": "gpipe",
    "--name": "x", "--optimize-ddp": "no_optimization", "--format": "zip", "--gpus": "2",
    "--compare-with": "GPUS",
    "--interleave": ".", "--launches": "1,6", ("run", "--resume"): "RUN", ("export", "--out"): "b.zip",
}  # fmt: skip
"""A value of each option whose metavar does not tell one."""

BY_METAVAR = {"DIR": "new", "FILE": "new", "NAME=VALUE": "A=1"}
BY_METAVAR |= dict.fromkeys(("N", "N,…", "N,N", "K", "K,…", "M,…", "R"), "2")


def offered(name):
    """The options of a command's whole help, each with its metavar."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        load_main(name)(["--help-all"])
    text = said.getvalue().partition("\n\n")[2]
    return re.findall(r"^  (--[\w-]+)(?: (\S+))?", text, re.MULTILINE)


CASES = [(name, option, metavar) for name in COMMANDS for option, metavar in offered(name)]


@pytest.mark.usefixtures("in_process")
def test_every_option_of_a_help_is_taken(tmp_path, monkeypatch, capsys):
    put_run("predictions/resnet18-2hosts/1gbit", tmp_path / "RUN")
    put_run("predictions/resnet18-2hosts/1gbit", tmp_path / "OTHER")
    put_run("h200-calibrated", tmp_path / "GPUS")
    (tmp_path / "net.py").write_text("from torchvision.models import resnet18 as make\n")
    (tmp_path / "some.toml").write_text('margin = "3%"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    stop_at_processes(monkeypatch)
    load_main("predict")([*BESIDE["predict"].split(), "--json"])
    (tmp_path / "p.json").write_text(capsys.readouterr().out)
    assert len(CASES) > 120
    for name, option, metavar in CASES:
        if option != "--help-all":
            has_value = metavar and not metavar.startswith("[on|off")
            value = (
                [VALUES.get((name, option)) or VALUES.get(option) or BY_METAVAR[metavar]] if has_value else []
            )
            beside = INSTEAD.get((name, option), BESIDE.get(name, "")).split()
            module = "report" if name == "report" else f"bench.{name}"
            tried(["python", "-m", module, *beside, option, *value, *BEHIND.get(name, ())])
            shutil.rmtree("new", ignore_errors=True)
