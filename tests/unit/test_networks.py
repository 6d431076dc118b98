"""Networks that a user names: a file of them, or a log of nccl-tests."""

import json

import pytest
from test_predict_cli import SAMPLE, refused
from test_scaling_predict import SMALL

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.allreduce import ring_factor
from ddp_bench.bench.predict.calibration import save_calibration
from ddp_bench.bench.predict.networks import NETWORKS, named_networks, network, parse_nccl_log

pytestmark = pytest.mark.usefixtures("few_resamples")

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
    (fabric,) = named_networks(f"{own}:fabric")
    (box,) = named_networks(str(own), level="intra")
    for size in (1, 2**20, 2**30):
        ours = network("ib-400g").band(16, nics=8)
        assert fabric.band(16, nics=8).high(size) == ours.high(size)
        assert box.band(8).estimate(size) == NETWORKS["nvlink-h100"].band(8).estimate(size)


def test_predict_takes_the_file_or_one_of_it(own, capsys):
    def steps(*given):
        assert command.main([str(SAMPLE), "--gpus", "16", *given, "--json"]) == 0
        lines = json.loads(capsys.readouterr().out)["lines"]
        asked = [p for line in lines for p in line["predictions"] if p["asked"]]
        return {p["network"]: p["step_ms"]["estimate"] for p in asked}

    alone = steps("--network", f"{own}:fabric,ib-400g")
    assert alone["fabric"] == alone["ib-400g"]
    assert steps("--network", str(own)) == {"fabric": alone["fabric"]}, "the box joins no nodes"
    inside = steps("--network", f"{own}:fabric", "--intra", str(own))
    assert list(inside) == ["box + fabric"]
    assert command.main([str(SAMPLE), "--gpus", "16", "--network", f"{own}:fabric"]) == 0
    assert "Network: fabric: as ib-400g, for a test." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no table of a network"),
        ("[a", "no file of networks"),
        ('[a]\nlevel = "inter"', "a: Object missing required field `busbw_gb_per_s`"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 0', "a: Expected `float` > 0"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nhop_us = 3', "unknown field `hop_us`"),
        ('[a]\nlevel = "rack"\nbusbw_gb_per_s = 4', "a: Invalid enum value 'rack'"),
        (
            '[a]\nlevel = "intra"\nbusbw_gb_per_s = [[4096, 1.0], [8192, 9.0]]',
            "a larger message takes longer",
        ),
        ('[a]\nlevel = "intra"\nbusbw_gb_per_s = [[8192, 1.0], [4096, 1.0]]', "from small to large"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nwhole_job = [[2, 9.0]]', "two numbers of nodes or more"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nshape_of = "ib-400g"', "shape_of names a network"),
        ("", "has no network"),
    ],
)
def test_what_is_no_network_is_one_line(own, text, message, capsys):
    own.write_text(text)
    said = refused([str(SAMPLE), "--gpus", "16", "--network", str(own)], capsys)
    assert message in said
    assert str(own) in said


def test_a_name_or_level_that_the_file_lacks_is_refused(own, capsys):
    given = [str(SAMPLE), "--gpus", "16"]
    assert "has no network 'fabrik'; it has fabric, box" in refused(
        [*given, "--network", f"{own}:fabrik"], capsys
    )
    assert "of level intra" in refused([*given, "--intra", f"{own}:fabric"], capsys)
    assert "is missing" in refused([*given, "--network", str(own.with_name("none.toml"))], capsys)
    own.write_text(OWN + OWN.replace("[fabric]", "[fabric2]").replace("[box]", "[box2]"))
    assert "has several networks" in refused([*given, "--intra", str(own)], capsys)


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
    "config", [None, {}, {"devices": [{}], "nthreads": True, "ngpus": 8}, {"devices": [{}]}]
)
def test_without_a_configuration_the_bandwidths_tell_the_ranks(config):
    assert read(document() | {"config": config}).num_ranks == 8


def test_out_of_place_times_stand_in_where_there_are_no_others():
    log = document()
    for result in log["results"]:
        result["in_place"] = None
    assert read(log).points[0] == (2**20, (pytest.approx(0.9),))


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (without("average_bus_bandwidth"), "is cut off before its last part"),
        (without("results"), "no log of nccl-tests"),
        (without("nccl_version"), "no log of nccl-tests"),
        (document() | {"results": []}, "no message above 0 bytes"),
        (document(gpus=1), "one rank"),
        (changed(1, redop="none"), "no log of nccl-tests' all_reduce_perf .*none"),
        (changed(2, in_place={"time": "x"}), "no log of .*results.2..in_place.time"),
        (changed(0, in_place={"time": -1.0}), "no log of .*results.0..in_place.time"),
        (changed(0, in_place={"alg_bw": 1.0, "bus_bw": 1.0}), "the result of 1048576 bytes holds no time"),
        (changed(0, in_place={"time": 1, "alg_bw": 10**400, "bus_bw": 1.0}), "no log of .*alg_bw"),
        (changed(0, in_place={"cpu_time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0}), "without -C"),
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
    with pytest.raises(UsageError, match="is cut off"):
        parse_nccl_log(text[: int(share * len(text))])


def test_predict_takes_the_file(tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(document()))
    assert command.main([str(SAMPLE), "--gpus", "2", "--network", str(path)]) == 0
    assert f"Network: nccl-tests log of 8 ranks: {path}" in capsys.readouterr().out
    path.write_text(json.dumps(document())[:-200])
    assert "is cut off" in refused([str(SAMPLE), "--gpus", "2", "--network", str(path)], capsys)
    path.write_text("#       size         count      type   redop    root     time   algbw   busbw #wrong")
    assert "write one with all_reduce_perf -J FILE" in refused(
        [str(SAMPLE), "--gpus", "2", "--network", str(path)], capsys
    )


def test_a_logs_in_place_times_are_what_counts(tmp_path, capsys):
    """Out of place the messages took longer; DDP reduces in place. On GPUs: a core would slow its compute."""
    save_calibration(tmp_path, SMALL)
    exposed = []
    for out, inside in ((9000.0, 6000.0), (90000.0, 6000.0), (9000.0, 60000.0)):
        log = changed(2, out_of_place=timing(2**26, out, 8), in_place=timing(2**26, inside, 8))
        (tmp_path / "log").write_text(json.dumps(log))
        given = [str(tmp_path), "--gpus", "2", "--network", str(tmp_path / "log"), "--json"]
        assert command.main(given) == 0
        exposed.append(
            json.loads(capsys.readouterr().out)["lines"][0]["predictions"][1]["exposed_comm_ms"]["estimate"]
        )
    assert exposed[0] == exposed[1] < exposed[2]
