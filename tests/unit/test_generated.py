"""What terminal and page say of generated runs agrees with itself, whatever was measured."""

import contextlib
import io
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
from generated_runs import NUM_RUNS, generated, texts_of

from ddp_bench.bench.common.numbers import format_percent
from ddp_bench.bench.findings import communication
from ddp_bench.bench.findings.answers import select_batches, select_headline
from ddp_bench.bench.findings.published import answer_published
from ddp_bench.bench.findings.settings import TRAINING_SETTINGS
from ddp_bench.bench.findings.verdicts import BATCH, CAP, COMMUNICATION, MIN_SHARE, PUBLISHED, RESOLVED
from ddp_bench.bench.findings.wording import get_hidden_share
from ddp_bench.bench.page import terminal
from ddp_bench.bench.page.render import render_html
from ddp_bench.bench.results.comparisons import FASTER, OPEN_ANSWERS, TOO_FEW, UNRESOLVED, find_default
from ddp_bench.bench.results.published import list_scalings
from ddp_bench.report.page import choose_best

NUMBER = r"-?[\d,]*\.?\d+"
INTERVAL = re.compile(rf"({NUMBER})[^\s\d(]? \(({NUMBER})(?:\N{{EN DASH}}| to )({NUMBER})\)")
TERM = re.compile(rf"(?:^|([+-]) )({NUMBER})(?: \([^)]*\))? ms ([^+(]*?)(?: \(mostly [^)]*\))?(?= [+-] |$)")
NO_NUMBER = re.compile(r"\b(nan|inf|None|NaT|<NA>)\b")

OF_EXPOSED = {
    *(communication.EXPOSED, communication.ALL_REDUCE, communication.CONTENTION),
    *(communication.BUFFERS, communication.COPIES),
}
NAMES_CAUSE = ("all-reduce", "contention", "Why communication", "bucket cap", "16-bit")


def value(text):
    return float(text.replace(",", ""))


def unit(text):
    """What the last digit of a printed number counts; of five digits and more the last are rounded."""
    digits = text.lstrip("-").replace(",", "")
    if "." in digits:
        return 10.0 ** -len(digits.partition(".")[2])
    return 10.0 ** max(len(digits) - 4, 0)


def asked(conclusion, question):
    return [one for one in conclusion.verdicts if one.question == question]


def ddp_of(run):
    """The case whose step is explained."""
    return find_default(select_headline(run.results))


def printed(page):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        terminal.print_page(page, piped_width=100)
    return out.getvalue()


def sums(made):
    """A step is the sum of its parts, and communication that of its own."""
    for note in made.page.notes:
        if not note.startswith("A DDP step") or " ms: " not in note:
            continue
        whole, _, parts = note.rstrip(".").rpartition(" ms: ")
        total = re.search(rf" takes ({NUMBER})", whole)[1]
        terms = TERM.findall(f"{parts}")
        yield from () if len(terms) == len(re.findall(r" ms\b", parts)) else [f"not read: {parts}"]
        added = sum(-value(ms) if sign == "-" else value(ms) for sign, ms, _ in terms)
        rounding = 0.5 * sum(map(unit, (total, *(ms for _, ms, _ in terms)))) + unit(total)
        if abs(added - value(total)) > rounding:
            yield f"{added} is not {total}: {note}"
    for one in asked(made.conclusion, COMMUNICATION):
        found = re.search(rf"adds ({NUMBER}) .*takes ({NUMBER}) .* copies add ({NUMBER}) ", one.text)
        if found and abs(value(found[1]) - value(found[2]) - value(found[3])) > sum(
            map(unit, found.groups())
        ):
            yield one.text


def unresolved_causes(made):
    """No cause, saving or remedy of communication is named where communication itself is unresolved."""
    answers = asked(made.conclusion, COMMUNICATION)
    if answers and answers[0].answer != RESOLVED:
        step = made.conclusion.step
        yield from (one.what for one in (step.savings if step else ()) if one.what in OF_EXPOSED)
        said = [*(step.consists_of if step else "",), answers[0].text]
        said += [made.page.following.why] if made.page.following else []
        yield from (text for text in said if any(cause in text for cause in NAMES_CAUSE))
    for one in made.conclusion.step.savings if made.conclusion.step else ():
        if not one.ms.low > 0 or one.ms.estimate <= MIN_SHARE * ddp_of(made.run).step_ms.estimate:
            yield f"{one} is no saving"
    following = made.page.following.why if made.page.following else ""
    is_more = re.search(r"would|intervals|noise|search for parameters|forecast", following)
    if following and not is_more and any(one.is_open for one in made.conclusion.verdicts):
        yield f"open, but next: {following}"


def savings(made):
    """What is saved of communication is exposed, and no more than its part of the sum."""
    if not made.conclusion.step:
        return
    ddp = ddp_of(made.run)
    parts = {
        name.strip(): value(ms)
        for _, ms, name in TERM.findall(made.conclusion.step.consists_of.rpartition(": ")[2].rstrip("."))
    }
    for one in made.conclusion.step.savings:
        is_exposed = one.what in OF_EXPOSED
        most = (ddp.exposed_comm_ms if is_exposed else None) or ddp.step_ms
        if one.ms.estimate > most.estimate * (1 + 1e-9):
            yield f"{one.sentence} of {most}"
        exposed = parts.get(communication.EXPOSED) if is_exposed else None
        if exposed is not None and one.ms.estimate > 1.01 * exposed + 1:
            yield f"{one.sentence} of {parts}"
    following = made.page.following.why if made.page.following else ""
    least = re.search(rf"at most ({NUMBER})", following)
    if least and value(least[1]) > 1.05 * ddp.exposed_comm_ms.high + 0.1:  # of two digits
        yield following


def best(made):
    """Which setting is best is by its estimate, among those that the sentence speaks of."""
    by_id = {case.case_id: case for case in made.run.results}
    for one in asked(made.conclusion, CAP):
        proved = [c for c in one.comparisons if not by_id[c.case_id].not_proved]
        chosen = [c for c in proved if c.answer == FASTER and not c.within_margin]
        same = [
            c
            for c in chosen
            if not TRAINING_SETTINGS & by_id[c.case_id].list_changed(by_id[c.reference_id]).keys()
        ]
        known = [c for c in proved if c.answer != TOO_FEW]
        among = {FASTER: same or chosen, UNRESOLVED: known}.get(one.answer, [])
        said = re.search(rf"is ({NUMBER})\N{{MULTIPLICATION SIGN}}", one.text)
        if among and abs(value(said[1]) - max(c.ratio.estimate for c in among)) > unit(said[1]):
            yield one.text
        gain = re.search(rf"more than ({NUMBER})%", one.text)
        if gain and value(gain[1]) > 100 * (made.run.manifest.margin + 0.001) * 1.1:
            yield f"equal at {made.run.manifest.margin}: {one.text}"
    for table in made.page.tables:
        if table.best is None:
            continue
        starred, why = choose_best(made.conclusion)
        settings = {v: {one.reference_id for one in v.comparisons} for v in asked(made.conclusion, CAP)}
        if any(v.is_open and starred in references for v, references in settings.items()):
            yield f"{starred} has a star, and is open"
        if why == "recommended":
            named = {one.faster_id for one in made.conclusion.verdicts}
            own = {c.case_id: "one device" if c.mode == "single" else c.case_id for c in by_id.values()}
            rates = {
                i: by_id[i].images_per_s.estimate for i in by_id if own[i] in named and by_id[i].images_per_s
            }
            if starred != max(rates, key=rates.__getitem__):
                yield f"{starred} is not the fastest of {rates}"
        elif not any(starred == v.faster_id or {starred} == refs for v, refs in settings.items()):
            yield f"{starred} is not what the answer about settings names"


def ends(made):
    """The ends of an interval are told apart, and hold the estimate."""
    for text in (*texts_of(made.page), printed(made.page)):
        for found in INTERVAL.finditer(text):
            middle, low, high = map(value, found.groups())
            if not low < high or not low <= middle <= high:
                yield found[0]


def unknown(made):
    """What is not known is not said, nor that it is known."""
    for text in texts_of(made.page):
        yield from NO_NUMBER.findall(text)
    for one in made.conclusion.verdicts:
        intervals = [c.ratio for c in one.comparisons[:1]]
        intervals += [ddp_of(made.run).exposed_comm_ms] if one.question == COMMUNICATION else []
        if (
            one.answer not in OPEN_ANSWERS
            and "is proved" not in one.text
            and any(found and math.isnan(found.low) for found in intervals)
        ):
            yield one.text
    shown = (get_hidden_share(case) for case in made.run.results)
    yield from (str(share) for share in shown if share and math.isnan(share.low))
    if made.page.trust:
        told = [one for one in made.conclusion.verdicts if not one.is_open]
        compared = [one for one in told if one.comparisons]
        if "is reliable" in made.page.trust["which is faster"] and not compared:
            yield "reliable"
        if made.page.trust["by how much"].startswith("This run's true values") and all(
            one.answer == TOO_FEW for one in made.conclusion.verdicts
        ):
            yield made.page.trust["by how much"]
    exposed = ddp_of(made.run) and ddp_of(made.run).exposed_comm_ms
    if exposed and math.isnan(exposed.low):
        yield from (text for text in texts_of(made.page) if "below the noise" in text and "exposed" in text)


def efficiencies(made):
    """A run that is held against itself has its own efficiency, and neither is below the other."""
    own = list_scalings(made.run, "itself")
    if one := answer_published(replace(made.run, published=tuple(own))):
        most = max(own, key=lambda scaling: scaling.case.num_devices)
        if one.label != "as published" or format_percent(most.efficiency.estimate) not in one.text:
            yield one.text
    yield from (one.text for one in asked(made.conclusion, PUBLISHED))


def shares(made):
    """No part is more than its whole."""
    whole = re.compile(
        rf"({NUMBER})% of (?:the cores|it\b|the step)|({NUMBER})%(?: \([^)]*\))? is overlapped"
    )
    for text in texts_of(made.page):
        yield from (found[0] for found in whole.finditer(text) if value(found[1] or found[2]) > 100)


def ranked(made):
    """Stand-ins and shared GPUs win nothing and have no speed-up; each case has a row."""
    by_id = {case.case_id: case for case in made.run.results}
    (results,) = [table for table in made.page.tables if table.title == "Results"] or [None]
    for one in made.conclusion.verdicts:
        case = by_id.get(one.faster_id)
        if case and (case.is_stand_in or case.shares_gpu):
            yield one.text
    others = [table for table in made.page.tables if table.title == "Also run, not comparable"]
    rows = [row for table in ([results] if results else []) + others for row in table.rows]
    if len(rows) != sum(case.is_ok and case.images_per_s is not None for case in made.run.results):
        yield f"{len(rows)} rows of as many cases"
    names = [column.name for column in results.columns] if results else []
    for row in results.rows if results else ():
        cells = dict(zip(names, row, strict=True))
        speedup = next((cell for name, cell in cells.items() if name.startswith("Speed-up")), "")
        is_stand_in = cells["Case"].startswith("DP emulated")
        if ("shared" in cells["Case"] or is_stand_in) and re.search(r"\d", speedup):
            yield str(row)
        apart = [row[0] for table in others for row in table.rows]
        shared_apart = any("shared" in name and "emulated" not in name for name in apart)
        if (is_stand_in and apart) or ("shared" in cells["Case"] and shared_apart):
            yield f"{row} is among those that compare"
    for case in made.run.results:
        if case.get_number("ranked") is not None and bool(case.get_number("ranked")) != case.is_ranked:
            yield f"{case.case_id} ranked {case.get_number('ranked')}"


def sizes(made):
    """The fastest batch size has the highest rate of those measured, and the largest that fits is named."""
    alike = select_batches(made.run.results)
    rates = {case.case_id: case.images_per_s.estimate for case in alike if case.is_ok}
    fits, out = ([f"{case.batch:g}" for case in alike if case.status == status] for status in ("ok", "oom"))
    for one in asked(made.conclusion, BATCH):
        if one.faster_id and one.faster_id != max(rates, key=rates.__getitem__):
            yield f"{one.text}: {rates}"
        said = " ".join((one.text, *one.notes))
        if not re.search(rf"fits is {fits[-1]}\b|only batch {fits[-1]} fits", said):
            yield f"{fits} fit: {said}"
        yield from (
            f"{name} lacks memory: {said}" for name in out if not re.search(rf"\b{name}\b.* ran out", said)
        )
    names = {case.batch_name for case in made.run.results}
    if len(fits) + len(out) < 2 <= len(names) and asked(made.conclusion, BATCH):
        yield "one size is compared"


PROPERTIES = (sums, unresolved_causes, savings, best, ends, unknown, shares, ranked, efficiencies, sizes)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.__name__)
def test_no_generated_run_contradicts_itself(prop):
    found = {seed: said for seed in range(NUM_RUNS) if (said := [*prop(generated(seed))])}
    assert found == {}


@pytest.mark.parametrize("seed", range(0, NUM_RUNS, 40))
def test_terminal_and_page_say_the_same(seed):
    _, _, page = generated(seed)
    shown, rendered = (re.sub(r"\s+", " ", text) for text in (printed(page), render_html(page)))
    for card in page.cards:
        assert card.sentence in shown
        told = re.sub(
            rf"^{re.escape(card.label)}: (.)", lambda m: m[1].upper(), card.sentence, flags=re.IGNORECASE
        )
        assert told.replace("'", "&#39;") in rendered.replace("\N{WORD JOINER}", "")


def test_the_generator_makes_what_the_properties_are_about():
    seen = Counter()
    for seed in range(NUM_RUNS):
        run, conclusion, page = generated(seed)
        seen.update(f"{one.question}: {one.answer}" for one in conclusion.verdicts)
        seen.update(one.what for one in (conclusion.step.savings if conclusion.step else ()))
        notes = " ".join(page.notes)
        seen["sum"] += " ms: " in notes
        seen["minus"] += " - " in notes
        seen["accumulates"] += "single-device steps" in notes
        seen["strong"] += "of the single-device step" in notes
        seen["nothing"] += any(one.label == "adds nothing" for one in conclusion.verdicts)
        seen["efficiency"] += bool(list_scalings(run))
        seen["stand-in"] += any(case.is_stand_in for case in run.results)
        seen["shared"] += any(case.oversubscribed for case in run.results)
        seen["load"] += any(kind == "other load" for kind, _ in page.cautions)
        seen["not proved"] += any(kind == "not proved" for kind, _ in page.cautions)
    wanted = {
        *(f"{CAP}: {answer}" for answer in ("faster", "no difference", "unresolved", "too few rounds")),
        *(f"{BATCH}: {answer}" for answer in (FASTER, UNRESOLVED)),
        *(f"{COMMUNICATION}: {answer}" for answer in (RESOLVED, "no difference", UNRESOLVED, TOO_FEW)),
        *OF_EXPOSED,
        *(
            "efficiency",
            "sum",
            "minus",
            "accumulates",
            "strong",
            "nothing",
            "stand-in",
            "shared",
            "load",
            "not proved",
        ),
    }
    assert {name for name in wanted if not seen[name]} == set()
