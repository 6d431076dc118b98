"""Functions are named by a verb and its object, in the imperative."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERBS = (
    *("accept", "add", "advise", "align", "answer", "append", "apply", "ask", "assess", "assign", "average"),
    *("await", "become", "begin", "bind", "break", "broadcast", "build", "calibrate", "call", "can"),
    *("carry", "check", "choose", "claim", "classify", "close", "collate", "collect", "combine", "compare"),
    *("compile", "compute", "conclude", "copy", "count", "cut", "decide", "declare", "decode", "delay"),
    *("describe", "divide", "do", "draw", "drop", "encode", "end", "enter", "escape", "estimate"),
    *("evaluate", "examine", "exchange", "expand", "explain", "exponentiate", "fail", "fetch", "fill"),
    *("find", "finish", "fit", "flush", "forget", "format", "forward", "from", "fuse", "gather", "get"),
    *("give", "grade", "greet", "group", "grow", "guard", "guess", "handle", "has", "hash", "hide", "hold"),
    *("hook", "ignore", "import", "inline", "inspect", "install", "interrupt", "invert", "is", "join"),
    *("judge", "keep", "label", "launch", "leave", "let", "list", "listen", "load", "log", "make", "map"),
    *("mark", "measure", "meet", "merge", "monitor", "move", "name", "negate", "normalise", "note", "notify"),
    *(
        "observe",
        "open",
        "pair",
        "parse",
        "partition",
        "pause",
        "perturb",
        "pin",
        "plan",
        "poll",
        "post",
        "predict",
    ),
    *("prepare", "print", "probe", "profile", "propagate", "propose", "prove", "prune", "publish", "quote"),
    *("raise", "read", "rebuild", "receive", "record", "reduce", "refresh", "refuse", "register"),
    *("rehearse", "release", "remove", "render", "reopen", "repair", "replace", "report", "require"),
    *("resolve", "restart", "resume", "retry", "rewrite", "run", "save", "scale", "seed", "select", "send"),
    *("serve", "set", "shard", "share", "shift", "shorten", "show", "shuffle", "simulate", "skip", "solve"),
    *("split", "start", "step", "stop", "subtract", "suggest", "sum", "summarize", "suppress", "tabulate"),
    *("take", "tie", "time", "to", "train", "try", "update", "visit", "vote", "wait", "warm", "warn"),
    *("wrap", "write", "yield"),
)
"""First words of names, and `is`, `has`, `can` of predicates, `from` and `to` of conversions."""

NOT_OURS = {
    *("_shutdown", "backward", "error", "exec_module", "no_sync", "parallel_apply", "replicate", "scatter"),
    *("console", "main", "stored", "watch"),
}
"""Names that torch, argparse and importlib give, entry points, and what users call."""


def odd_names(source):
    """Functions and methods whose first word is no verb, but for properties and special methods."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__") and node.name not in NOT_OURS:
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not is_property and node.name.lstrip("_").split("_")[0] not in VERBS:
                yield node.name


def test_every_function_begins_with_a_verb():
    paths = [path for top in ("bench", "models", "report") for path in sorted((ROOT / top).rglob("*.py"))]
    paths += sorted([*(ROOT / "ddp_bench").glob("*.py"), *(ROOT / ".github").glob("*.py")])
    odd = [
        f"{path.relative_to(ROOT)}: {name}" for path in paths for name in odd_names(path.read_text("utf-8"))
    ]
    assert odd == []
    assert [*VERBS] == sorted({*VERBS})


def test_participles_nouns_and_genitives_are_refused():
    refused = ["given", "_found", "told", "placed", "of_case", "under_way", "steps_ms"]
    source = "\n".join(f"def {name}(): ..." for name in [*refused, "is_ok", "_format_ms", "from_row", "main"])
    assert [*odd_names(source)] == refused
