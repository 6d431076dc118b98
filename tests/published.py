"""Published throughputs of GPUs, and what is predicted for them from one GPU's of the same source.

`results/README.md` names the sources. A row without `intra` is not predicted; one is
left out of fitting by a fact of its source, never by its error.
"""

import csv
from dataclasses import replace
from functools import cache, cached_property
from operator import attrgetter

import numpy as np

from ddp_bench.bench.plan.buckets import PYTORCH_CAPS
from ddp_bench.bench.predict.calibration import Identity
from ddp_bench.bench.predict.from_rate import OVERLAP_SLOWDOWN, calibrate_from_rate
from ddp_bench.bench.predict.networks import find_network
from ddp_bench.bench.predict.prediction import Scenario, predict, simulate_scenario
from ddp_bench.bench.results.published import ROWS
from ddp_bench.models.profile import Gradient, list_gradients
from ddp_bench.models.registry import make_resnet_workload

SLOWDOWNS = range(1, 41)
"""Of an all-reduce beside compute, tried in a fit."""
SHARES = np.linspace(1.0, 1.2, 201)
"""Of a step, tried as the one constant that is added to perfect scaling."""


@cache
def rows():
    with ROWS.open(encoding="utf-8", newline="") as file:
        return tuple(Row(row) for row in csv.DictReader(file) if row["intra"])


class Row(dict):
    """A published throughput; what is predicted for it, and errors in percent: above 0 is too fast."""

    @property
    def published(self):
        return float(self["published"])

    @property
    def num_gpus(self):
        return int(self["gpus"])

    @property
    def rate(self):
        """Images/s of one GPU, with DDP where that was measured."""
        return self["ddp"] or self["single"]

    @property
    def perfect(self):
        return float(self.rate) * self.num_gpus

    @property
    def name(self):
        ddp = "" if self["ddp"] else ", from the plain model"
        return f"{self['model']}, {self['gpu']}, {self['precision']}, {self['batch']}{ddp}"

    def predicted(self, comm_slowdown=OVERLAP_SLOWDOWN.comm, *, with_interval=False, rate="", **changes):
        """Images/s of the whole job; of another `rate`, or a scenario with `changes`."""
        made_of = (self["model"], self["precision"], self["batch"], not self["ddp"], rate or self.rate)
        calibration = _calibration(*made_of)
        scenario = Scenario(
            num_devices=self.num_gpus,
            intra=find_network(self["intra"]),
            network=find_network(self["network"]) if self["network"] else None,
            gpus_per_node=min(self.num_gpus, int(self.get("node") or 8)),
            nics_per_node=int(self["nics"]) if self["nics"] else None,
            **{"bucket_cap_mb": self.get("cap") or PYTORCH_CAPS} | changes,
        )
        changed = replace(calibration, comm_slowdown=(float(comm_slowdown),))
        of = predict if with_interval else simulate_scenario
        return of(changed, scenario).images_per_s

    @cached_property
    def errors(self):
        """By each slow-down that is tried."""
        found = [self.predicted(slow) for slow in SLOWDOWNS]
        return 100 * (np.array(found) / self.published - 1)

    @property
    def errors_by_constant(self):
        return 100 * (self.perfect / SHARES / self.published - 1)

    def __hash__(self):
        return id(self)


ERRORS, ERRORS_BY_CONSTANT = attrgetter("errors"), attrgetter("errors_by_constant")


@cache
def _calibration(model, precision, batch, without_ddp, rate):
    identity = Identity(
        arch=model, image_size=224, batch_per_device=int(batch), precision=precision,
        device_type="cuda", device_name="GPU", torch="", host="",
    )  # fmt: skip
    gradients = bert_base() if model == "bert-base" else _gradients(model)
    return calibrate_from_rate(identity, gradients, per_second=float(rate), with_ddp=not without_ddp)


@cache
def _gradients(model):
    return list_gradients(make_resnet_workload(model, 224))


def bert_base(seq=128, hidden=768, inner=3072, vocabulary=30522):
    """Gradients of BERT-base for pre-training, from its paper's sizes; its decoder shares the embedding."""

    def linear(name, inputs, outputs, tokens=seq):
        yield Gradient(f"{name}.bias", 4 * outputs, 0)
        yield Gradient(f"{name}.weight", 4 * inputs * outputs, 2 * tokens * inputs * outputs)

    def norm(name):
        yield from (Gradient(f"{name}.{part}", 4 * hidden, 0) for part in ("bias", "weight"))

    def layer():
        yield from (
            *norm("after"),
            *linear("out", inner, hidden),
            *linear("in", hidden, inner),
            *norm("norm"),
        )
        for name in ("attention", "value", "key", "query"):
            yield from linear(name, hidden, hidden)

    decoder = Gradient("decoder.bias", 4 * vocabulary, 2 * seq * hidden * vocabulary)
    head = [*linear("next", hidden, 2, 1), decoder, *norm("head"), *linear("transform", hidden, hidden)]
    layers = [*linear("pooler", hidden, hidden, 1), *(one for _ in range(12) for one in layer())]
    embeddings = [Gradient("kind", 8 * hidden, 0), Gradient("position", 4 * 512 * hidden, 0)]
    return [*head, *layers, *norm("embedding"), *embeddings, Gradient("word", 4 * vocabulary * hidden, 0)]


def fitted(errors, tried, chosen):
    """The constant of `tried` with the least error over rows; a large one weighs by its size alone."""
    cost = np.mean([np.sqrt(1 + errors(row) ** 2) for row in chosen], axis=0)
    return tried[int(cost.argmin())]


def left_out(errors, tried, group=lambda row: row["source"]):
    """By row the error with the constant fitted to the rows of the other sources."""
    used = [row for row in rows() if not row["left_out"]]
    found = {}
    for source in {group(row) for row in rows()}:
        best = fitted(errors, tried, [row for row in used if group(row) != source])
        found |= {row: errors(row)[list(tried).index(best)] for row in rows() if group(row) == source}
    return found


def table():
    """The lines of docs/accuracy.md: a row for each published figure."""
    without = left_out(ERRORS, SLOWDOWNS)
    yield "| source | trained | GPUs | published | predicted | error | constant of others | left out |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in rows():
        found = row.predicted()
        error = 100 * (found / row.published - 1)
        figures = f"{row.published:,.0f} | {found:,.0f} | {error:+.1f}% | {without[row]:+.1f}%"
        yield f"| {row['source']} | {row.name} | {row.num_gpus} | {figures} | {row['left_out']} |"


if __name__ == "__main__":
    print("\n".join(table()))
