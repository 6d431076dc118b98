"""The layers of the code: what may import what, as `docs/architecture.md` has it."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name

import pytest
from commands import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (`.*`) \|$", PAGE, re.MULTILINE)
LAYERS = {int(level): re.findall(r"`(?:ddp_bench/)?(\w+)(?:\.py)?`", parts) for level, parts in ROWS}
"""Parts of the code by layer: folders and files of `bench`, `models`, `report`, and files of `ddp_bench`."""

(SENTENCE,) = re.findall(r"- Layers 1 and 2, (.*?) import no torch", PAGE, re.DOTALL)
WITHOUT_TORCH = {*LAYERS[1], *LAYERS[2], *re.findall(r"`(\w+)`", SENTENCE), "__init__"}
LEVEL = {part: level for level, parts in LAYERS.items() for part in parts}


TOP = "ddp_bench"


def _name(path):
    return ".".join([TOP, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


FILES = {_name(path): path for top in ("bench", "models", "report") for path in (ROOT / top).rglob("*.py")}
FILES |= {f"{TOP}.{name}": ROOT / TOP / f"{name}.py" for name in ("__init__", "__main__", "api")}
# A package file that is empty but for its docstring, and what starts a command in a checkout.
SHELLS = {
    f"{TOP}.bench",
    f"{TOP}.bench.tune",
    *(name for name in FILES if name.endswith(".__main__") and name != f"{TOP}.__main__"),
}
FILES = {name: path for name, path in FILES.items() if name not in SHELLS}


def _part(module):
    """The folder or file of `bench` that a module belongs to, or `models`, `report`, or a file of the top."""
    return module.removeprefix(f"{TOP}.").removeprefix("bench.").split(".")[0]


@cache
def _imports(module, *, deferred):
    """What a module imports, as modules; `deferred` counts what its functions import."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if deferred else iter(tree.body)
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(name for node in nodes for name in _named(node, package))


def _named(node, package):
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        named = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            inner = f"{named}.{alias.name}"
            yield inner if inner in FILES else named


COMMANDS = {f"{TOP}.{name}" for name in ("__init__", "__main__", "api")}  # they load nothing twice


@pytest.mark.parametrize("module", sorted(FILES.keys() - COMMANDS))
def test_the_three_folders_import_each_other_by_dots(module):
    """GitHub, IDEs and analysers follow no links: `ddp_bench.bench` means nothing to them."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    absolute = {
        name
        for node in ast.walk(tree)
        if not isinstance(node, ast.ImportFrom) or node.level == 0
        for name in _named(node, "")
    }
    assert not {name for name in absolute if name.split(".")[0] in (TOP, "bench", "models", "report")}


def test_every_part_has_its_layer():
    assert {_part(module) for module in FILES} <= set(LEVEL)
    assert set(LAYERS) == {*range(1, 9)}


def test_lower_layers_never_import_higher_ones():
    upwards = [
        f"{module} imports {other}"
        for module in FILES
        for other in _imports(module, deferred=True) & set(FILES)
        if LEVEL[_part(module)] < LEVEL[_part(other)]
    ]
    assert not upwards


def _needs():
    """The parts that each part imports, functions of it included."""
    needs = {}
    for module in FILES:
        others = {_part(other) for other in _imports(module, deferred=True) & set(FILES)}
        needs.setdefault(_part(module), set()).update(others - {_part(module)})
    return needs


def test_parts_import_each_other_in_one_direction():
    TopologicalSorter(_needs()).prepare()  # raises CycleError, which names the cycle


def test_rooms_are_few_and_know_few_others():
    """The shells of the package, which import what users name, count as one room."""
    shells = {"__init__", "__main__", "api"}
    rooms = {part: others - shells for part, others in _needs().items() if part not in shells}
    of_shells = set().union(*(others for part, others in _needs().items() if part in shells)) - shells
    assert len(rooms) + 1 <= 24
    assert sum(map(len, rooms.values())) + len(of_shells) <= 95


@pytest.mark.parametrize("module", sorted(module for module in FILES if _part(module) in WITHOUT_TORCH))
def test_importing_it_needs_no_torch(module):
    """A typing mistake is answered, and a page is built, without the seconds that torch takes."""
    seen, waiting = set[str](), [module]
    while waiting:
        now = waiting.pop()
        seen.add(now)
        parents = {now.rsplit(".", i)[0] for i in range(1, now.count(".") + 1)}
        waiting += ((_imports(now, deferred=False) | parents) & set(FILES)) - seen
    outside = {name.split(".")[0] for now in seen for name in _imports(now, deferred=False)}
    assert not outside & {"torch", "torchvision"}
