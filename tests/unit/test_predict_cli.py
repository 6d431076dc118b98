"""`bench.predict` as a command: what it says, writes and refuses; networks that a user names."""

from dataclasses import replace

import pytest
from accuracy_tables import calibrations
from commands import ROOT
from test_scaling_predict import SAMPLE, SMALL

from ddp_bench.bench.common.numbers import format_interval
from ddp_bench.bench.plan.buckets import compute_ring_factor
from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.calibration import load_calibration, save_calibration
from ddp_bench.bench.predict.networks import (
    NETWORKS,
    MeasuredNetwork,
    find_network,
)
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import Scenario, predict, simulate_scenario


def refused(arguments, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def asked(capsys, *arguments):
    """What is predicted, by its document."""
    assert command.main([*map(str, arguments), "--json"]) == 0
    return Predictions.from_json(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"host": "a machine of 64 cores"}, "host 'a machine of 64 cores' is not"),
        ({"torch": "2.11.0"}, "torch '2.11.0' is not '2.15.0'"),
        ({"batch_per_device": 7}, "batch_per_device 7 is not 16"),
        ({"precision": "bf16"}, "precision 'bf16' is not 'fp32'"),
    ],
)
def test_errors_on_runs_of_something_else_are_refused_until_accepted(tmp_path, change, difference, capsys):
    own = load_calibration(SAMPLE)
    save_calibration(tmp_path, replace(own, identity=replace(own.identity, **change)))
    given = [str(tmp_path), "--validate", str(SAMPLE)]
    said = refused(given, capsys)
    assert difference in said
    assert said.count(" is not ") == 1
    assert "--accept" in said
    assert len(asked(capsys, *given, "--accept").validation) == 7


RATE = ["--throughput", "319", "--arch", "resnet50", "--batch-size", "32", "--gpus", "2,8"]
RATE += ["--intra", "nvlink-v100"]


def test_a_rate_that_is_known_stands_for_a_run(capsys):
    """Oracle: PyTorch's DDP table, 310 images/s per V100 on two and 307 on eight."""
    found = asked(capsys, *RATE)
    rates = [p.images_per_s.estimate for p in found.predictions]
    assert rates == [pytest.approx(620, rel=0.02), pytest.approx(2456, rel=0.02)]
    said = " ".join(found.notes)
    assert "the model's error on published rows" in said
    assert "fitted to published clusters" in said
    plain = [p.images_per_s.estimate for p in asked(capsys, *RATE, "--without-ddp").predictions]
    assert all(less < rate for less, rate in zip(plain, rates, strict=True))


def test_a_calibration_of_a_machine_that_drifted_says_so(capsys):
    runs = ROOT / "results" / "samples"
    drifted, steady = (
        asked(capsys, runs / name, "--gpus", "2", "--intra", "nvlink-h200").notes
        for name in ("h200-calibrated", "predictions/resnet18-2hosts/1gbit")
    )
    assert "Calibration: the machine became 49% faster during the run; calibrate again." in drifted
    assert not [note for note in steady if "calibrate again" in note]


def test_a_fast_workload_may_have_a_rate_of_ten_digits(capsys):
    (found, *_) = asked(capsys, "--throughput", "2000000000", *RATE[2:]).predictions
    assert found.exposed_comm_ms.estimate > 0.99 * found.step_ms.estimate


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


def test_the_all_reduces_of_another_run_are_a_network(capsys):
    """Its own are no other network."""

    own, other = (
        asked(capsys, SAMPLE, "--gpus", "2", *network).predictions[0].step_ms.estimate
        for network in ((), ("--network", SAMPLE))
    )
    assert other == pytest.approx(own)


def test_the_all_reduces_of_another_model_are_the_same_network():
    names = "predictions/resnet18-2hosts", "predictions/resnet34-2hosts-slow"
    own, other = (calibrations()[name] for name in names)
    networks = None, MeasuredNetwork("resnet34", other.allreduce)
    steps = [simulate_scenario(own, Scenario(num_devices=2, network=found)).step_ms for found in networks]
    assert steps[1] == pytest.approx(steps[0], rel=0.05)


def test_the_table_and_the_document_have_the_same_figures(capsys):
    given = [str(SAMPLE), "--gpus", "2,8", "--network", "link:350mbit,ib-100g", "--validate"]
    found = asked(capsys, *given)
    networks = [(net, n) for net in ("link:350mbit", "ib-100g") for n in (2, 8)]
    assert [(p.network, p.num_devices) for p in found.predictions] == networks
    assert len(found.validation) == 6
    assert command.main(given) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = {net for net, _ in networks}
    rows = [line for line in lines if line and line[0] in names and line[1].isdigit()]
    assert [(row[0], int(row[1])) for row in rows[: len(networks)]] == networks
    for row, p in zip(rows, found.predictions, strict=True):
        figures = p.step_ms, p.images_per_s, p.efficiency.scale(100), p.exposed_comm_ms
        assert row[2:] == " ".join(format_interval(figure, digits=4) for figure in figures).split()


LARGE_ONLY = replace(SMALL, residual_ms=(0.0, 10.0, 400.0), backward_ms=(1.0, 80.0, 300.0))
"""What several ranks take is not known."""


def test_what_is_hardly_known_has_a_finite_interval_that_says_so(tmp_path, capsys):
    save_calibration(tmp_path, LARGE_ONLY)
    found = asked(capsys, tmp_path, "--gpus", "1,64")
    assert "only the order of magnitude is known" in " ".join(found.notes)
    many = found.predictions[1]
    assert many.images_per_s.half_width > 0.5
    assert 0 < many.step_ms.low < many.step_ms.estimate < many.step_ms.high
    save_calibration(tmp_path, SMALL)
    assert "order of magnitude" not in " ".join(asked(capsys, tmp_path, "--gpus", "1,64").notes)


def test_superlinear_values_that_were_measured_stay():
    """One device alone was slower than a rank of two: an efficiency above 1, and nothing clipped."""
    fast = replace(SMALL, single_step_ms=(200.0, 201.0, 199.0))
    p = predict(fast, Scenario(num_devices=2))
    assert p.efficiency.estimate > 1
    assert p.efficiency.high > p.efficiency.estimate


# Networks that a user names.

OWN = """
[fabric]
level = "inter"
busbw_gb_per_s = 46
high = 1.3
source = "as ib-400g, for a test"

[box]
level = "intra"
busbw_gb_per_s = [[1048576, 75.0], [67108864, 369.0], [1073741824, 466.0]]
hop_ms = 0.004
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_a_network_of_the_same_figures_costs_the_same(own):
    fabric, box = find_network(f"{own}:fabric"), find_network(f"{own}:box", level="intra")
    for size in (1, 2**20, 2**30):
        ours = find_network("ib-400g").compute_band(16, nics=8)
        assert fabric.compute_band(16, nics=8).high(size) == ours.high(size)
    for size in (2**20, 2**26, 2**30):
        theirs = NETWORKS["nvlink-h200"].compute_band(8).estimate(size)
        assert box.compute_band(8).estimate(size) == pytest.approx(theirs)


def test_predict_takes_one_of_the_file(own, capsys):
    alone = asked(capsys, SAMPLE, "--gpus", "16", "--network", f"{own}:fabric,ib-400g")
    fabric, ours = alone.predictions
    assert (fabric.network, fabric.step_ms) == ("fabric", ours.step_ms)
    assert "Network: fabric: as ib-400g, for a test." in alone.notes
    inside = asked(capsys, SAMPLE, "--gpus", "16", "--network", f"{own}:fabric", "--intra", f"{own}:box")
    assert [p.network for p in inside.predictions] == ["box + fabric"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "x: unsupported operand"),
        ("[a", "no file of networks"),
        ('[a]\nlevel = "inter"', "a: Object missing required field `busbw_gb_per_s`"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 0', "a: Expected `float` > 0"),
        ('[a]\nlevel = "inter"\nbusbw_gb_per_s = 4\nhop_us = 3', "unknown field `hop_us`"),
        ('[a]\nlevel = "rack"\nbusbw_gb_per_s = 4', "a: Invalid enum value 'rack'"),
        ('[a]\nlevel = "intra"\nbusbw_gb_per_s = [[0, 1.0], [4096, 1.0]]', "a: Expected `int` >= 1"),
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


def test_the_rates_of_a_log_of_nccl_tests_give_its_times_back(own):
    """As jq writes them into a file; of small messages latency is the time, with noise on it."""
    us = {8192: 31.0, 65536: 30.0, 2**20: 100.0, 2**26: 6000.0}
    rates = [[size, compute_ring_factor(4) * size / time / 1e3] for size, time in us.items()]
    own.write_text(f'[log]\nlevel = "intra"\nnum_ranks = 4\nbusbw_gb_per_s = {rates}')
    curve = find_network(f"{own}:log").compute_band(4).estimate
    assert [1000 * curve(size) for size in (2**20, 2**26)] == pytest.approx([100.0, 6000.0])
    assert 1000 * curve(8192) == 1000 * curve(65536) == pytest.approx(30.5, rel=0.001)
