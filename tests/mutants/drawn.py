"""A mutation check: does a test fail where the code is wrong?

    python -m pytest --cov --cov-context=test --cov-report=
    python tests/mutants/drawn.py --number 200 --seed 1

draws small changes of the pure core, runs each against the tests that cover its line, and lists those that no
test noticed. Exit status 1 where fewer than 85% are noticed.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]

TARGETS = (
    "bench/stats/interval.py",
    "bench/stats/fit.py",
    "bench/plan/case.py",
    "bench/plan/sweep.py",
    "bench/predict/timeline.py",
    "bench/plan/buckets.py",
    "bench/results/aggregate.py",
    "bench/run/schedule.py",
    "bench/run/stop_rule.py",
)
NEEDED_SHARE = 0.85
NUM_WORKERS = 2
LIMIT_S = 600
"""A mutant that loops for ever is noticed."""

FIRST = 40
"""Tests that are tried before the rest: most mutants end there, and what is not collected costs nothing."""

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One thing to change in a file: the `index`-th of those that can be."""

    path: str
    index: int
    line: int
    change: str

    def source(self):
        """The file's text with the change."""
        tree = _parsed(self.path)
        _change(list(_computed(tree))[self.index])
        return ast.unparse(tree)


def mutants(path):
    """Every mutant of a file."""
    found = []
    for index, node in enumerate(_computed(_parsed(path))):
        change = _change(copy.copy(node))
        if change is not None:
            found.append(Mutant(path, index, getattr(node, "lineno", 0), change))
    return found


def _parsed(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _computed(tree):
    """Nodes of what functions compute: no annotations, no defaults, no messages of errors."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _inside(statement)


def _inside(node):
    if isinstance(node, ast.FunctionDef | ast.Raise | ast.Assert):
        return
    yield node
    for name, child in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for part in child if isinstance(child, list) else [child]:
                if isinstance(part, ast.AST):
                    yield from _inside(part)


def _change(node):  # noqa: PLR0911 - one branch a kind of node
    """Change this node itself, none of those below it; how, or None where nothing can be changed."""
    match node:
        case ast.Compare(ops=[op, *others]):
            node.ops = [COMPARED[type(op)](), *others]
            return f"{type(op).__name__} -> {COMPARED[type(op)].__name__}"
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            node.op = COMPUTED[type(op)]()
            return f"{type(op).__name__} -> {COMPUTED[type(op)].__name__}"
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            return f"{type(op).__name__} -> {type(node.op).__name__}"
        case ast.UnaryOp(op=ast.USub()):
            node.op = ast.UAdd()
            return "without its sign"
        case ast.Constant(value=bool() | int() | float() as was):
            node.value = not was if isinstance(was, bool) else was + 1
            return f"{was} -> {node.value}"
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return "condition negated"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            node.value = ast.Constant(None)
            return "returns None"
    return None


def covering(data, mutant):
    """Node ids of the tests that ran the mutant's line: units first, of these those named like its file."""
    contexts = data.contexts_by_lineno(str(ROOT / mutant.path)).get(mutant.line, [])
    own = set(re.split(r"[/_.]", mutant.path)) - {"bench", "py"}

    def rank(node_id):
        words = set(re.split(r"[/_.]", node_id.partition("::")[0]))
        return "unit" not in words, -len(own & words), node_id

    return sorted({context.split("|")[0] for context in contexts if "::" in context}, key=rank)


def survives(mutant, tests, place):
    """Whether every test passes although the code in `place` is the mutant's."""
    if not tests:
        return True
    changed = place / mutant.path
    before = changed.read_text(encoding="utf-8")
    changed.write_text(mutant.source(), encoding="utf-8")
    try:
        return all(pass_of(part, place) for part in (tests[:FIRST], tests[FIRST:]) if part)
    finally:
        changed.write_text(before, encoding="utf-8")


def pass_of(tests, place):
    """Whether these tests pass with the code in `place`."""
    environment = os.environ | {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-cov", *tests]
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=place,
            env=environment,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def copied_tree(place):
    """The path `place`, which has become a copy of our tree that may be changed."""
    ignored = shutil.ignore_patterns(".git", ".hypothesis", "__pycache__", ".*_cache")
    # With its links: the tests import what they lead to, and that is changed.
    return Path(shutil.copytree(ROOT, place, symlinks=True, ignore=ignored))


def main():
    """Draw, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    data = CoverageData(basename=str(ROOT / ".coverage"))
    data.read()
    every = [mutant for path in TARGETS for mutant in mutants(path)]
    drawn = random.Random(options.seed).sample(every, options.number)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_WORKERS) as pool:
        places = SimpleQueue()
        for index in range(NUM_WORKERS):
            places.put(copied_tree(Path(folder, str(index))))

        def check(mutant):
            place = places.get()
            try:
                return survives(mutant, covering(data, mutant), place)
            finally:
                places.put(place)

        survived = []
        for mutant, survivor in zip(drawn, pool.map(check, drawn), strict=True):
            if survivor:
                survived.append(mutant)
                print(f"survived: {mutant.path}:{mutant.line}: {mutant.change}", flush=True)
    share = 1 - len(survived) / len(drawn)
    print(f"{len(drawn)} of {len(every)} mutants, seed {options.seed}: {100 * share:.1f}% noticed")
    return 0 if share >= NEEDED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
