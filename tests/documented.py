"""Every command that README, docs and the help of commands name, and the way in which each is tried."""

import itertools
import re
import shlex
from dataclasses import dataclass

from commands import ROOT
from torch.distributed.run import get_args_parser

FILES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "results", ROOT / "results" / "baselines")
    for path in folder.glob("*.md")
    if path.name != "CHANGELOG.md"
)
OURS = ("run", "watch", "tune", "predict", "gate", "doctor", "lab", "export", "report")
SHELL, OUTPUT, WORKFLOW = "bash", "", "yaml"
CODE = ("python", "toml", "mermaid")
"""Languages of blocks without commands; those of Python are run by test_docs.py."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
STARTS = re.compile(
    r"(sudo|python3?|pip|ddp-bench|torchrun|srun|git|pytest|bench\.\w+)(?= )|python -m report"
)
"""What a command begins with, in the text between blocks."""


@dataclass(frozen=True)
class Documented:
    """A command as a page has it, in a block or in a sentence."""

    place: str
    words: tuple[str, ...]
    output: str = ""
    """The file that takes what it prints."""
    is_fenced: bool = False

    @property
    def is_elided(self):
        """Whether a part of it stands for what the reader puts there."""
        return any("…" in word for word in self.words)


def simple_commands(script):
    """The simple commands of a shell script: words and file of the output; of a loop those of every turn."""
    lines, open_line = [], ""
    for line in script.splitlines():
        open_line += line.removesuffix("\\") if line.endswith("\\") else f"{line}\n"
        try:
            _tokens(open_line)
        except ValueError:  # a quotation goes on
            continue
        if not line.endswith("\\"):
            lines.append(open_line.strip())
            open_line = ""
    assert not open_line, f"the script ends within a command: {open_line}"
    found, turns = [], [{}]
    for line in lines:
        if loop := re.fullmatch(r"for (\w+) in ([^;]+); do", line):
            turns = [{f"${loop[1]}": value} for value in loop[2].split()]
        elif line == "done":
            turns = [{}]
        else:
            for turn in turns:
                text = line
                for name, value in turn.items():
                    text = text.replace(name, value)
                found += _split(_tokens(text))
    return found


def _tokens(line):
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|>")
    lexer.whitespace_split = True
    return list(lexer)


def _split(tokens):
    """The commands between `&&`, `;` and `|`, each with the file behind its `>`."""
    found = []
    for is_end, run in itertools.groupby(tokens, lambda token: set(token) <= set(";&|")):
        words, _, output = " ".join(map(shlex.quote, run)).partition(f" {shlex.quote('>')} ")
        found += [] if is_end else [(tuple(shlex.split(words)), output)]
    return found


def in_page(path):
    """The commands of a page; a block of a language that nobody knows is an error."""
    text, place = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    found = list[tuple[tuple[str, ...], str]]()
    for language, block in FENCE.findall(text):
        if language == SHELL:
            found += simple_commands(block)
        elif language in (OUTPUT, WORKFLOW):
            lines = re.findall(r"^(?:\s*- (?:run: )?|  )((?:python|pip|ddp-bench) .*)$", block, re.MULTILINE)
            script = "\n".join(lines).replace("$CI_MERGE_REQUEST_DIFF_BASE_SHA", "HEAD")
            found += simple_commands(script)
        else:
            assert language in CODE, f"{place}: a block of {language!r}: commands are in blocks of bash"
    lines = [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]
    spans = simple_commands("\n".join(filter(STARTS.match, lines)))
    return [
        *(Documented(place, *one, is_fenced=True) for one in found),
        *(Documented(place, *one) for one in spans),
    ]


def in_help(name, text):
    """The commands that a help names: in its examples, between backticks, and in sentences."""
    text = text.partition("\n\n")[2]  # behind the usage
    lines = re.findall(r"^  (python -m [^\n]*?)(?:   .*)?$", text, re.MULTILINE)
    lines += [span for span in SPAN.findall(text) if STARTS.match(span)]
    lines += re.findall(
        r"(?<!^  )(?<!`)(python -m (?:bench\.\w+|report)[^\n`]*?)(?=\. |\.?$|`)", text, re.MULTILINE
    )
    return [Documented(f"{name} --help", tuple(shlex.split(line))) for line in dict.fromkeys(lines)]


def own(words):
    """Name and arguments of a command of ours; None of another's."""
    match list(words):
        case ["python" | "python3", "-m", "report", *rest] | ["ddp-bench", "report", *rest]:
            return "report", rest
        case ["python" | "python3", "-m", module, *rest] if module.removeprefix("bench.") in OURS:
            return module.removeprefix("bench."), rest
        case ["python" | "python3", "-m", "ddp_bench", name, *rest] | ["ddp-bench", name, *rest] if (
            name in OURS
        ):
            return name, rest
        case [module, *rest] if module.startswith("bench.") and module.removeprefix("bench.") in OURS:
            return module.removeprefix("bench."), rest
    return None


def behind_a_launcher(words):
    """What the options of torchrun or srun end with, as a command of ours; torchrun's own parser finds it."""
    if words[0] == "srun":
        return [*itertools.dropwhile(lambda word: word.startswith("-"), words[1:])]
    options = get_args_parser().parse_args([word for word in words[1:] if word != "…"] or ["x"])
    return [
        "python",
        *(["-m"] if options.module else []),
        options.training_script,
        *options.training_script_args,
    ]
