"""Pages of runs made by hand, one of each kind, as text: what people read of them is recorded."""

from dataclasses import replace
from html.parser import HTMLParser

from commands import ROOT
from gate_runs import STEADY, gated, slowed, write_run
from report_runs import PHASES, case, communicating, measured, paper_like, run, usual_cases
from token_runs import token_run

from ddp_bench.bench.gate.page import make_page as comparison_page
from ddp_bench.bench.gate.runs import read_run
from ddp_bench.bench.page.render import render_html
from ddp_bench.bench.predict.calibration import Identity
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import Prediction
from ddp_bench.bench.predict.runs import HeldOut
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.page import make_page

ON_CPU = {"device_type": "cpu", "device_name": "Test CPU"}
MEMORY = {"peak_mem_mib": 600.0, "reserved_mem_mib": 700.0, "dp_device0_mem_ratio": 4.0}
UNDER_LOAD = measured(sm_clock_mhz=1700.0, power_w=650.0, joules_per_image=0.25) | {
    "temperature_c": 71.0, "throttled_pct": 12.5, "throttle_reasons": "power cap",
}  # fmt: skip
STAGES = {"scatter": 2.0, "replicate": 5.0, "apply": 25.0, "gather": 1.0, "backward": 50.0, "reduce": 8.0}
CONDITIONS = {
    "name": "nightly",
    "settings": {"gpus": [1, 2], "static_graph": False, "rounds": None},
    "model": {"num_params": 11_689_512, "gradient_bytes": 46_758_048, "forward_flops_per_image": 4e9},
    "environment": {
        "gpus": [{"name": "A", "memory_mib": 1000}] * 2,
        "governors": ["performance"],
        "huge_pages": "madvise",
        "cgroup": {"cpu_quota_cores": 2.5, "memory_limit_gib": "unlimited", "cpuset": None},
        "env": {"NCCL_DEBUG": "WARN"},
    },
    "timing": {"total_s": 186.2, "stopped_because": "time limit reached", "measuring_s": 60.0},
    "ranks": [
        {"rank": i, "host": f"node{i // 2}", "device_name": "Test GPU", "bound_cores": "0-31"}
        for i in range(4)
    ],
    "workload": {
        "spec": "net:make",
        "file": "net.py",
        "repository": "mynet",
        "commit": "abc",
        "dirty": True,
        "code_sha256": "012",
    },
    "ddp_bench": {"version": "0.1.0"},
    "git": {"commit": "def", "dirty": False},
}

FORMS = [
    case("single", 1, 100.0),
    case("ddp", 2, 180.0, peak_mem_mib=300.0, mem_by_device_mib="300.0/290.0"),
    case("fsdp", 2, 150.0, peak_mem_mib=200.0, mem_by_device_mib="200.0/199.0"),
    case("partition", 2, 130.0, layers_by_device="4/7", **measured(bubble_pct=51.0)),
    case("pipeline", 2, 120.0, pipeline_schedule="1f1b", micro_batches=4, **measured(bubble_pct=25.0)),
]


def compiled(mode, num_devices, images_per_s, **more):
    found = case(mode, num_devices, images_per_s, compile="default", compile_s=41.2, num_graphs=3, **more)
    return found | {"case_id": f"{found['case_id']}-compiled"}


EAGER = {"compile": "off"}
COMPILED = [
    case("single", 1, 100.0, **EAGER),
    case("dp", 2, 150.0, **EAGER),
    case("ddp", 2, 160.0, num_buckets=2, **EAGER),
    case("ddp", 2, 150.0, bucket_cap_mb="25", num_buckets=2, **EAGER),
    compiled("single", 1, 120.0),
    compiled("ddp", 2, 210.0, num_buckets=2),
    compiled("ddp", 2, 180.0, optimize_ddp="no_optimization", num_buckets=2) | {"case_id": "whole"},
]


SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"


def wide(value):
    return Interval(value, 0.9 * value, 1.2 * value)


def predicted_at(num_devices, efficiency):
    return Prediction(
        num_devices=num_devices, step_ms=wide(200 / efficiency),
        network="ib-100g", bucket_cap_mb="default", scaling="weak", batch_size=16, comm_hook="none",
        accumulate=1, unit="images",
        images_per_s=wide(80 * num_devices * efficiency), efficiency=wide(efficiency),
        exposed_comm_ms=wide(10.0),
    )  # fmt: skip


def predictions(**more):
    """As `bench.predict --json` writes them, of the sample."""
    found = load_run(SAMPLE)
    ok = found.cases[(found.cases["mode"] == "ddp") & (found.cases["status"] == "ok")].iloc[0]
    cpu = found.manifest.environment
    identity = Identity(
        arch="resnet18", image_size=64, batch_per_device=16, precision="fp32", device_type="cpu",
        device_name=ok["device_name"], torch="2.15.0", link="1gbit",
        host=f"{cpu.cpu_model} x {cpu.num_cores}, 0 GPUs",
    )  # fmt: skip
    cases = (HeldOut(f"case-{error}", 2, 100.0, wide(100.0 + error)) for error in (-1.0, 2.0, 6.0))
    made = Predictions(
        identity=identity, notes=("Network: x; assumed: y.",),
        predictions=(predicted_at(1, 1.0), predicted_at(32, 0.75), predicted_at(64, 0.7)),
        validation=tuple(cases),
    )  # fmt: skip
    return replace(made, **more)


FAILED = {"status": "failed", "reason": "ValueError: late bug (net.py:6, in late)"}
MANY_CAPS = [case("ddp", 2, 150.0 + (cap == 27), bucket_cap_mb=str(cap)) for cap in range(1, 41)]


def gate_page(folder, **both):
    """The page of a gate of two runs, one with a slower DDP."""
    both |= {"git": {"commit": "0123456789abcdef"}}
    sides = {"old": LONG, "new": slowed(1.25, "ddp", steps=LONG)}
    runs = [read_run(write_run(folder / name, steps, name=name, **both)) for name, steps in sides.items()]
    return comparison_page(gated(*runs))


def on_cores():
    """DP as its stages by hand, and more devices than cores; communication of which overlap is known."""
    stages = measured(**{f"dp_{name}_ms": ms for name, ms in STAGES.items()}, dp_device0_pct=25.0)
    whole = communicating(2, 200.0, **ON_CPU) | measured(overlap_trace_pct=70.0, compute_slowdown=1.25)
    return [
        case("single", 1, 100.0, **ON_CPU),
        case("dp", 2, 150.0, impl="cpu_standin", **ON_CPU, **measured(**PHASES), **stages),
        whole | measured(overlap_window_pct=80.0, rank_skew_ms=3.0, anatomy_slowdown_pct=8.0),
        communicating(2, 190.0, bucket_cap_mb="1", **ON_CPU) | measured(overlap_trace_pct=30.0),
        case("ddp", 4, 60.0, oversubscribed=True, **ON_CPU),
    ]


TWO = [case("single", 1, 100.0), case("ddp", 4, 300.0, num_nodes=2)]
GPUS = [case("single", 1, 100.0, **UNDER_LOAD), case("dp", 2, 150.0, **MEMORY)]
LONG = {key: [*series] * 4 for key, series in STEADY.items()}

PAGES = {
    "usual": lambda _: make_page(run(usual_cases())),
    "paper": lambda _: make_page(paper_like()),
    "conditions": lambda _: make_page(run(TWO, CONDITIONS)),
    "cores": lambda _: make_page(run(on_cores())),
    "gpus": lambda _: make_page(run(GPUS)),
    "forms": lambda _: make_page(run(FORMS)),
    "compiled": lambda _: make_page(run(COMPILED)),
    "tokens": lambda folder: make_page(load_run(token_run(folder / "tokens"))),
    "caps": lambda _: make_page(run([case("ddp", 2, 140.0), *MANY_CAPS])),
    "failed": lambda _: make_page(run([case(mode, 2, **FAILED) for mode in ("dp", "ddp")])),
    "predicted": lambda _: make_page(load_run(SAMPLE), predictions=predictions()),
    "gate": lambda folder: gate_page(folder, interleaved_id="a"),
}
"""What makes each page, in a folder of its own."""

BREAKS = {
    *("p", "li", "tr", "h1", "h2", "h3", "dt", "figure", "svg"),
    *("summary", "pre", "section", "article", "caption"),
}


class Visible(HTMLParser):
    """What a reader of a page sees, tips and descriptions of figures included, without its scripts."""

    def __init__(self, html):
        super().__init__()
        self.hidden, self.text = 0, ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("script", "style")
        self.text += "\n" if tag in BREAKS else " | " if tag in ("td", "th", "dd") else ""
        self.text += "\n| " if tag in ("text", "title") else ""
        self.text += "".join(
            f" [{value}] " for name, value in attrs if name in ("title", "alt", "aria-label")
        )

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data):
        self.text += "" if self.hidden else data


def text_of(html):
    """A line for each line of a page that is not empty."""
    lines = Visible(html).text.replace("\N{WORD JOINER}", "").replace("\n |", " |").split("\n")
    return [kept for line in lines if (kept := " ".join(line.split()))]


def text_of_page(name, folder):
    """Of predictions their part; conditions once."""
    made = PAGES[name](folder)
    predicted = name == "predicted"
    if predicted:  # without figures that are not looked at
        made = replace(made, figures=())
    lines = text_of(render_html(made))
    begin = max(i for i, line in enumerate(lines) if line.startswith("On hardware")) if predicted else 0
    ends = [i for i, line in enumerate(lines) if line == "Conditions" and name != "conditions"]
    return "".join(f"{line}\n" for line in lines[begin : ends[-1] if ends else len(lines)])
