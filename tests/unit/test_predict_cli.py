"""`bench.predict` as a command: what it says, writes and refuses; networks that a user names."""

import csv
import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from accuracy_tables import calibrations
from test_scaling_predict import SAMPLE, SMALL

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.allreduce import ring_factor
from ddp_bench.bench.predict.calibration import save_calibration
from ddp_bench.bench.predict.from_pass import read_source
from ddp_bench.bench.predict.held_out import HeldOut, error_sizes
from ddp_bench.bench.predict.networks import (
    NETWORKS,
    MeasuredNetwork,
    network,
    parse_nccl_log,
)
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import estimate, predict
from ddp_bench.bench.predict.scenario import Scenario
from ddp_bench.bench.stats.interval import Interval


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    return folder


def refused(arguments, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"host": "a machine of 64 cores"}, "host 'a machine of 64 cores' is not"),
        ({"torch": "2.11.0"}, "torch '2.11.0' is not '2.15.0'"),
        ({"batch_per_device": 7}, "batch_per_device 7 is not 16"),
        ({"precision": "bf16"}, "precision 'bf16' is not 'fp32'"),
    ],
)
def test_a_calibration_of_something_else_is_refused_until_accepted(run, change, difference, capsys):
    own = read_source(run)
    changed = replace(own, identity=replace(own.identity, **change))
    save_calibration(run, changed)
    asked = [str(run), "--gpus", "2"]
    said = refused(asked, capsys)
    assert difference in said
    assert said.count(" is not ") == 1
    assert "--accept" in said
    assert command.main([*asked, "--accept"]) == 0
    assert read_source(run, accept=True).identity == changed.identity


RATE = [
    "--throughput",
    "319",
    "--arch",
    "resnet50",
    "--batch-size",
    "32",
    "--gpus",
    "2,8",
    "--intra",
    "nvlink-v100",
]


def test_a_rate_that_is_known_stands_for_a_run(tmp_path, capsys):
    """Oracle: PyTorch's DDP table, 310 images/s per V100 on two and 307 on eight."""
    table, document = tmp_path / "p.csv", tmp_path / "p.json"
    assert command.main([*RATE, "--csv", str(table), "--out", str(document)]) == 0
    rate = pd.read_csv(table).set_index("num_devices")["images_per_s"]
    assert dict(rate) == {2: pytest.approx(620, rel=0.02), 8: pytest.approx(2456, rel=0.02)}
    assert Predictions.from_json(document.read_text()).fitted == ""
    said = capsys.readouterr().out
    assert "the model's error on published rows" in said
    assert "fitted to published clusters" in said
    plain = [*RATE, "--without-ddp", "--csv", str(table)]
    assert command.main(plain) == 0
    assert (pd.read_csv(table).set_index("num_devices")["images_per_s"] < rate).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "2"], "name the folder of a run, or give --throughput"),
        ([str(SAMPLE), *RATE], "leave RUN out"),
        ([*RATE[:2], "--gpus", "2"], "takes what trains so fast: --batch-size, and --arch or --workload"),
        ([*RATE[:-4], "--gpus", "2"], "name one, as --intra nvlink-h100"),
        (["--throughput", "fast", *RATE[2:]], "--throughput: 'fast' is not a number above 0"),
        ([str(SAMPLE), "--gpus", "2", "--without-ddp"], "--without-ddp belongs to --throughput"),
        ([*RATE, "--arch", "resnet5"], "unknown architecture 'resnet5'"),
    ],
)
def test_what_no_rate_can_be_predicted_from(arguments, message, capsys):
    assert message in refused(arguments, capsys)


def test_a_calibration_that_is_broken_off_is_refused(run, capsys):
    path = run / "calibration.json"
    path.write_text(path.read_text()[:-9])
    assert "calibration.json is not valid JSON" in refused([str(run), "--gpus", "2"], capsys)


def test_the_all_reduces_of_another_run_are_a_network(capsys):
    """Its own are no other network."""

    def step_ms(run, *network):
        assert command.main([str(run), "--gpus", "2", *network, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["predictions"][0]["step_ms"]["estimate"])

    assert step_ms(SAMPLE, "--network", str(SAMPLE)) == pytest.approx(step_ms(SAMPLE))


def test_the_all_reduces_of_another_model_are_the_same_network():
    names = "predictions/resnet18-2hosts", "predictions/resnet34-2hosts-slow"
    own, other = (calibrations()[name] for name in names)
    networks = None, MeasuredNetwork("resnet34", other.allreduce)
    steps = [estimate(own, Scenario(num_devices=2, network=found)).step_ms for found in networks]
    assert steps[1] == pytest.approx(steps[0], rel=0.05)


def test_the_table_and_the_document_have_the_same_figures(tmp_path):
    table, document = tmp_path / "p.csv", tmp_path / "p.json"
    given = [str(SAMPLE), "--gpus", "2,8", "--network", "link:350mbit,ib-100g", "--validate"]
    assert command.main([*given, "--csv", str(table), "--out", str(document)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    found = Predictions.from_json(document.read_text())
    asked = [(net, n) for net in ("link:350mbit", "ib-100g") for n in (2, 8)]
    assert [(p.network, p.num_devices) for p in found.predictions] == asked
    assert len(found.validation) == 6
    mark = found.predictions[0]
    for name, figure in {"images_per_s": mark.images_per_s, "efficiency": mark.efficiency}.items():
        ends = [float(rows[0][f"{name}{end}"]) for end in ("", "_low", "_high")]
        assert ends == pytest.approx([figure.estimate, figure.low, figure.high])
    assert float(rows[0]["step_ms_p50"]) == pytest.approx(mark.step_ms.estimate)
    assert float(rows[0]["exposed_comm_ms_low"]) < float(rows[0]["exposed_comm_ms"])


LARGE_ONLY = replace(SMALL, residual_ms=(0.0, 10.0, 400.0))
"""What several ranks take beyond the simulation is not known."""


@pytest.fixture
def folder(tmp_path):
    save_calibration(tmp_path, LARGE_ONLY)
    return tmp_path


def test_nothing_to_show_is_a_mistake(folder, capsys):
    out = folder / "p.json"
    said = refused([str(folder), "--gpus", "64,128", "--out", str(out)], capsys)
    assert "not predicted: the interval would be ±" in said
    assert not out.exists()


def test_some_refused_leave_the_others_and_no_figure_anywhere(folder, capsys):
    table, document = folder / "p.csv", folder / "p.json"
    given = [str(folder), "--gpus", "1,64", "--csv", str(table), "--out", str(document)]
    assert predict(LARGE_ONLY, Scenario(num_devices=64)).reason, "or nothing is tested here"
    assert command.main([*given, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    one, many = whole["predictions"]
    assert one["reason"] == ""
    assert one["step_ms"]["estimate"] > 0
    assert many["reason"].startswith("not predicted: the interval would be ±")
    assert {many[name] for name in ("step_ms", "images_per_s", "efficiency", "exposed_comm_ms")} == {None}
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[1]["reason"] == many["reason"]
    assert {rows[1][name] for name in ("step_ms_p50", "step_ms_low", "images_per_s", "efficiency")} == {""}
    found = Predictions.from_json(document.read_text())
    assert [p.step_ms is None for p in found.predictions] == [False, True]
    assert command.main(given) == 0
    said = capsys.readouterr().out
    assert "not predicted: the interval would be ±" in " ".join(said.split())


def test_superlinear_values_that_were_measured_stay():
    """One device alone was slower than a rank of two: an efficiency above 1, and nothing clipped."""
    fast = replace(SMALL, single_step_ms=(200.0, 201.0, 199.0))
    p = predict(fast, Scenario(num_devices=2))
    assert p.reason == ""
    assert p.efficiency.estimate > 1
    assert p.efficiency.high > p.efficiency.estimate


def test_held_out_cases_that_are_not_predicted_have_no_error():
    known = HeldOut("a", 2, "25", 100.0, Interval(110.0, 100.0, 120.0))
    refused = HeldOut("b", 2, "25", 100.0, None, reason="not predicted")
    assert refused.error_pct is None
    assert error_sizes([known, refused]) == [pytest.approx(10.0)]
    assert error_sizes([refused]) == []


# Networks that a user names: a file of them, or a log of nccl-tests.

OWN = """
[fabric]
level = "inter"
busbw_gb_per_s = 46
high = 1.3
source = "as ib-400g, for a test"

[box]
level = "intra"
busbw_gb_per_s = 368.0
shape_of = "nvlink-h200"
hop_ms = 0.004
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_a_network_of_the_same_figures_costs_the_same(own):
    fabric, box = network(f"{own}:fabric"), network(f"{own}:box", level="intra")
    for size in (1, 2**20, 2**30):
        ours = network("ib-400g").band(16, nics=8)
        assert fabric.band(16, nics=8).high(size) == ours.high(size)
        assert box.band(8).estimate(size) == NETWORKS["nvlink-h100"].band(8).estimate(size)


def test_predict_takes_one_of_the_file(own, tmp_path, capsys):
    def steps(*given):
        assert command.main([str(SAMPLE), "--gpus", "16", *given, "--csv", str(tmp_path / "p.csv")]) == 0
        return dict(pd.read_csv(tmp_path / "p.csv").set_index("network")["step_ms_p50"])

    alone = steps("--network", f"{own}:fabric,ib-400g")
    assert alone["fabric"] == alone["ib-400g"]
    assert "Network: fabric: as ib-400g, for a test." in capsys.readouterr().out
    inside = steps("--network", f"{own}:fabric", "--intra", f"{own}:box")
    assert list(inside) == ["box + fabric"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no table of a network"),
        ("[a", "no file of networks"),
        ('[a]\nlevel = "inter"', "a: Object missing required field `busbw_gb_per_s`"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 0', "a: Expected `float` > 0"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nhop_us = 3', "unknown field `hop_us`"),
        ('[a]\nlevel = "rack"\nbusbw_gb_per_s = 4', "a: Invalid enum value 'rack'"),
        ('[a]\nlevel = "intra"\nbusbw_gb_per_s = [[4096, 1.0], [8192, 9.0]]', "larger message takes longer"),
        ('[a]\nlevel = "intra"\nbusbw_gb_per_s = [[8192, 1.0], [4096, 1.0]]', "from small to large"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nshape_of = "ib-400g"', "shape_of names a network"),
        ("", "name a network of"),
    ],
)
def test_what_is_no_network_is_one_line(own, text, message, capsys):
    own.write_text(text)
    said = refused([str(SAMPLE), "--gpus", "16", "--network", f"{own}:a"], capsys)
    assert message in said
    assert str(own) in said


def test_a_name_or_level_that_the_file_lacks_is_refused(own, capsys):
    given = [str(SAMPLE), "--gpus", "16"]
    for name in (f"{own}:fabrik", str(own)):
        assert f"name a network of {own}, as {own}:NAME; it has fabric, box" in refused(
            [*given, "--network", name], capsys
        )
    assert "it has box" in refused([*given, "--intra", f"{own}:fabric"], capsys)
    assert "is missing" in refused([*given, "--network", str(own.with_name("none.toml"))], capsys)


MEASURED = ((2**20, 900.0, 100.0), (2**22, 1500.0, 250.0), (2**26, 9000.0, 6000.0))
"""Bytes, us out of place, us in place."""


def timing(size, us, ranks):
    algbw = size / us / 1e3
    return {
        "time": us,
        "alg_bw": round(algbw, 6),
        "bus_bw": round(ring_factor(ranks) * algbw, 6),
        "nwrong": 0.0,
    }


def per_iteration(us):
    return {"skipped_iterations": 0, "min_us": us, "max_us": us, "times_us": [us, us]}


def document(version=3, *, processes=1, threads=1, gpus=8):
    """A whole log; version 1 spelt a key otherwise at first, 2 has times by iteration, 3 a skip of some."""
    ranks = processes * threads * gpus
    config = {"nthreads": threads, "ngpus": gpus, "step_factor": 4, "iterations": 20, "graph": 0}
    config |= {"per_iter_timing": "true"} if version > 1 else {}
    config |= {"per_iter_skip": 0} if version > 2 else {}
    # One entry per process, of its first rank.
    config["devices"] = [
        {"rank": p * threads * gpus, "group": 0, "pid": 100 + p, "hostname": "node", "device": 0}
        for p in range(processes)
    ]
    results = []
    for size, out, inside in MEASURED:
        found = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        found |= {"out_of_place": timing(size, out, ranks), "in_place": timing(size, inside, ranks)}
        if version > 1:
            found |= {"out_of_place_per_iter": per_iteration(out), "in_place_per_iter": per_iteration(inside)}
        results.append(found | {"actual_iterations": 20, "experiment_name": ""})
    bandwidth = "bandwidith" if version == 1 else "bandwidth"
    told = {"version": version, "start_time": "2026-07-09 10:00:00", "nccl_version": 22803}
    told |= {"args": ["./build/all_reduce_perf", "-J", "out.json"], "env": ["PATH=/usr/bin", 'A="b"']}
    told |= {"config": config, "results": results, "out_of_bounds": {"count": 0, "okay": "true"}}
    told[f"average_bus_{bandwidth}"] = {bandwidth: 7.5, "okay": "unchecked"}
    return told | {"errors": [], "end_time": "2026-07-09 10:00:09"}


def read(log):
    return parse_nccl_log(json.dumps(log, separators=(",", ":")))


def changed(index, **more):
    log = document()
    log["results"][index] |= more
    return log


def without(*keys):
    return {key: value for key, value in document().items() if key not in keys}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_in_place_times_of_every_version(version):
    log = read(document(version))
    assert log.num_ranks == 8
    assert dict(log.points) == {size: (pytest.approx(us / 1000),) for size, _, us in MEASURED}


@pytest.mark.parametrize(("processes", "threads", "gpus"), [(1, 1, 8), (8, 1, 1), (2, 1, 4), (2, 2, 2)])
def test_ranks_are_those_of_all_processes(processes, threads, gpus):
    assert read(document(processes=processes, threads=threads, gpus=gpus)).num_ranks == 8


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (without("results"), "no log of nccl-tests"),
        (without("config"), "no log of nccl-tests"),
        (document() | {"results": []}, "communicates nothing"),
        (document(gpus=1), "communicates nothing"),
        (changed(1, redop="none"), "no log of nccl-tests' all_reduce_perf .*none"),
        (changed(2, in_place={"time": "x"}), "no log of .*results.2..in_place.time"),
        (changed(0, in_place={"time": -1.0}), "no log of .*results.0..in_place.time"),
        (changed(0, in_place={"cpu_time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0}), "required field `time`"),
        (changed(0, in_place={"time": 1, "alg_bw": 10**400, "bus_bw": 1.0}), "no log of "),
        (changed(2, in_place=timing(2**26, 6000.0, 2)), "is 1.00, an all-reduce over 8 ranks has 1.75"),
        ({"predictions": []}, "no log of nccl-tests"),
    ],
)  # fmt: skip
def test_refusals(log, message):
    with pytest.raises(UsageError, match=message):
        read(log)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(share):
    text = json.dumps(document())
    with pytest.raises(UsageError, match="no log of nccl-tests"):
        parse_nccl_log(text[: int(share * len(text))])


def test_predict_takes_the_file(tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(document()))
    assert command.main([str(SAMPLE), "--gpus", "2", "--network", str(path)]) == 0
    assert f"Network: nccl-tests log {path.name}: assumed" in capsys.readouterr().out
    path.write_text("#       size         count      type   redop    root     time   algbw   busbw #wrong")
    assert "write one with -J FILE" in refused([str(SAMPLE), "--gpus", "2", "--network", str(path)], capsys)


def test_a_logs_in_place_times_are_what_counts(tmp_path, capsys):
    """Out of place the messages took longer; DDP reduces in place. On GPUs: a core would slow its compute."""
    save_calibration(tmp_path, SMALL)
    exposed = []
    for out, inside in ((9000.0, 6000.0), (90000.0, 6000.0), (9000.0, 60000.0)):
        log = changed(2, out_of_place=timing(2**26, out, 8), in_place=timing(2**26, inside, 8))
        (tmp_path / "log").write_text(json.dumps(log))
        given = [str(tmp_path), "--gpus", "2", "--network", str(tmp_path / "log"), "--json"]
        assert command.main(given) == 0
        exposed.append(json.loads(capsys.readouterr().out)["predictions"][0]["exposed_comm_ms"]["estimate"])
    assert exposed[0] == exposed[1] < exposed[2]
