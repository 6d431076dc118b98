"""First words of docstrings, and of the texts below constants and attributes: never those of a fragment."""

import ast
import re

from commands import ROOT

FRAGMENT = re.compile(
    r"\W*(of|what|how|who|whose|which|where|whether|when|so|as|that|not|if|on|in|by|with|without)\b",
    re.IGNORECASE,
)
MODULES = sorted(
    path
    for top, pattern in (
        ("bench", "**/*.py"),
        ("models", "*.py"),
        ("report", "*.py"),
        ("ddp_bench", "*.py"),
        (".github", "*.py"),
    )
    for path in (ROOT / top).glob(pattern)
)


def fragments(source):
    """Lines of a module whose docstring, or text below a constant, begins as a fragment does."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and FRAGMENT.match(node.value.value)
    )


def test_docstrings_begin_with_a_verb_or_a_noun_phrase():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        for line in fragments(path.read_text(encoding="utf-8"))
    ]
    assert len(MODULES) > 100
    assert found == []


def test_a_fragment_is_found_wherever_a_docstring_stands():
    source = '''"""What a module is."""
LIMIT = 3
"""Of a loop."""
SIZE = 4
"""Offset of a row, and what it holds."""
class Made:
    """How it is made."""
    name: str = ""
    """Whether it is."""
    def __init__(self):
        """Set what is open."""
        self.size = 1
        """`where` it begins."""
    async def read(self):
        """Without an end.

        More.
        """
'''
    assert fragments(source) == [1, 3, 7, 9, 13, 15]
