"""Mistakes on every command line: one line on stderr that names them, exit code 2, nothing else."""

import pytest
from commands import ROOT

from ddp_bench.__main__ import load_main

SAMPLES = ROOT / "results" / "samples"
RUN = SAMPLES / "cpu-lab-1gbit-2hosts"
CALIBRATED = SAMPLES / "predictions" / "resnet18-2hosts" / "1gbit"
LAB = "--hosts 2 --rate 1gbit"
TO_RUN = "-- python -m bench.run --rate x"

MISTAKES = {
    "run": [
        ("--case-timeout soon", "'soon' is not a duration"),
        *(
            (f"--device cpu {given} --out {{empty}}/run", message)
            for given, message in (
                ("--modes ddp,fsdp2", "did you mean 'fsdp'"),
                ("--arch resnet19", "resnet1"),
                ("--mode ddp", "unrecognized arguments: --mode ddp; did you mean --modes?"),
                ("--scaling strong --batch-size 16 --gpus 3", "does not divide"),
                ("--precision fp16", "needs a CUDA device"),
                ("--data /nowhere/at/all", "/nowhere/at/all"),
                ("--workload no.such.module:name", "no module 'no'"),
                ("--config /nowhere.toml", "/nowhere.toml"),
            )
        ),
    ],
    "tune": [
        (f"--device cpu --gpus 2 {given}", message)
        for given, message in (
            ("--gpus 1", "2 devices or more"),
            ("--modes dp", "2 devices or more"),
            ("--arch resnet-18", "resnet18"),
            ("--resume x", "are options of"),
            ("--preset quick", "are options of"),
        )
    ],
    "export": [
        ("{long} --format pytest-benchmark", "has no "),
        ("", "the following arguments are required: RUN"),
        ("{run}", "the following arguments are required: --format"),
        ("{run} --format pytest", "did you mean 'pytest-benchmark'?"),
        ("{run} --format pytest-benchmark --out {run}/cases.csv", "is a file of a run's results"),
        ("{run} --format zip --out a.tar", "--format zip needs --out FILE.zip"),
        ("{run} --format zip --out /nowhere/a.zip", "--out /nowhere/a.zip cannot be written"),
        ("{run} --format pytest-benchmark --out /nowhere/x", "--out /nowhere/x cannot be written"),
        ("{empty} --format pytest-benchmark", "is not a results folder"),
    ],
    "gate": [
        ("{long} {run}", "has no "),
        ("{run} {calibrated} --threshold 5x", "--threshold: '5x' is not a share"),
        ("{run} {calibrated} --config /nowhere.toml", "/nowhere.toml"),
        ("{run} {calibrated} --json --quiet", "not allowed with"),
        ("{run} {run}", "are the same folder"),
        *(
            (f"--interleave . -- {option}", f"remove {option.split()[0]} from the arguments of bench.run")
            for option in ("--dry-run", "--json", "--out x", "--resume x")
        ),
        ("--interleave no-such-reference", "git knows no 'no-such-reference'"),
        ("--interleave . --quiet --python /nowhere/python", "/nowhere/python: no such file"),
        ("--interleave . a b", "leave the results folders out"),
        ("only-one", "name two results folders"),
        ("a b --python python3", "name two results folders"),
    ],
    "predict": [
        ("{long} --gpus 2", "has no "),
        ("{calibrated}", "nothing to predict"),
        ("{calibrated} --gpus 0", "not a whole number of at least 1"),
        ("{calibrated} --gpus 8192 --network ib-400g", "give 1 to 4096"),
        ("{calibrated} --gpus 8 --network ib-400", "did you mean 'ib-400g'"),
        ("{calibrated} --gpus 2 --network ib-100g,nope", "unknown network 'nope'"),
        ("{calibrated} --gpus 2 --network {empty}", "has no calibration.json"),
        ("{calibrated} --gpus 8 --image-size 9", "--image-size belongs to --throughput"),
        ("{run} --gpus 2", "has no calibration.json; measure a run with bench.run --calibrate"),
    ],
    "lab": [
        (f"--rate 1gbit {TO_RUN}", "--hosts"),
        (f"--hosts 2 {TO_RUN}", "--rate"),
        *((f"--hosts {hosts} --rate 1gbit {TO_RUN}", "2 to 64") for hosts in ("1", "65", "two")),
        (f"--hosts 2 --rate 1gb {TO_RUN}", "200mbit"),
        (f"{LAB} --rnaks 2 {TO_RUN}", "--rnaks"),
        (LAB, "python train.py"),
        (f"{LAB} -- no-such-program", "no-such-program"),
        (f"{LAB}, {TO_RUN}", "200mbit"),
    ],
    "doctor": [
        ("--repair", "--repair"),
        ("--power x", "--power"),
    ],
    "report": [
        ("{long}", "has no "),
        ("", "RUN"),
        ("{run} {run}", "to compare two: python -m bench.gate"),
        ("{run} --colour", "--colour"),
        ("{run} --out {empty}/no/such/folder.html", "--out"),
        ("{run} --markdown --out {empty}/none/a.md", "--out"),
    ],
}  # fmt: skip
WITH_USAGE = [(command, *row) for command, rows in MISTAKES.items() for row in rows]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("command", "arguments", "message"), WITH_USAGE)
def test_a_mistake_is_one_line(command, arguments, message, tmp_path, capsys):
    places = {"run": RUN, "calibrated": CALIBRATED, "empty": tmp_path, "long": "9" * 5000}
    name = command if command == "report" else f"bench.{command}"
    given = [word.format(**places) for word in arguments.split()]
    assert load_main(command)(given) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{name}: error: ")
    assert said.err.count("\n") == 1
    assert message in said.err
    assert list(tmp_path.iterdir()) == []
