"""Small changes of a module's source, by the operators of cosmic-ray. Runs no test.

Changes of type annotations, which cannot matter, are left out, and those that are no Python (the
`*` before keyword arguments is taken for an operator), and what gives the same text as another.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[tuple[int, int], tuple[int, int]]  # begin and end, each (line, column)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        module: path of the file, relative to the repository.
        operator: name of cosmic-ray's operator.
        occurrence: which of the places in the file where the operator can do something.
        line: of the change, from 1.
        definition: function or class around it.
        source: text of the whole changed file.
    """

    module: str
    operator: str
    occurrence: int
    line: int
    definition: str
    source: str

    def changed_lines(self) -> list[str]:
        """The lines before (-) and after (+)."""
        before = Path(self.module).read_text().splitlines()
        difference = difflib.unified_diff(before, self.source.splitlines(), lineterm="", n=0)
        return [line for line in difference if not line.startswith(("---", "+++", "@@"))]


def draw(modules: Sequence[str], count: int, seed: int) -> tuple[list[Mutant], int]:
    """A sample without replacement, over all modules together.

    Args:
        modules: paths of files, relative to the working folder.
        count: most mutants that are drawn.
        seed: of the draw.

    Returns:
        The mutants in order of place, and how many places there are to draw from.
    """
    places = [place for module in modules for place in _places(module)]
    order = random.Random(seed).sample(range(len(places)), len(places))
    drawn: list[tuple[int, Mutant]] = []
    texts: set[tuple[str, str]] = set()
    for index in order:
        if len(drawn) == count:
            break
        mutant = _mutate(*places[index])
        if mutant is None or (mutant.module, mutant.source) in texts:
            continue
        texts.add((mutant.module, mutant.source))
        drawn.append((index, mutant))
    return [mutant for _, mutant in sorted(drawn, key=lambda item: item[0])], len(places)


def _places(module: str) -> Iterator[tuple[str, str, int, int, str]]:
    """(module, operator, occurrence, line, definition) of every change outside annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.ast.ast_query import ASTQuery

    source = Path(module).read_text()
    spans = annotation_spans(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in _operators():
        occurrence = 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if not any(first <= tuple(start) < last for first, last in spans):
                    definition = ASTQuery(node).get_definition_name() or "the module"
                    yield module, name, occurrence, start[0], definition
                occurrence += 1


def _operators() -> Iterator[tuple[str, Any]]:
    """Those that need no arguments."""
    from cosmic_ray.plugins import get_operator, operator_names

    for name in sorted(operator_names()):
        operator = get_operator(name)
        if not operator.arguments():
            yield name, operator()


def _mutate(
    module: str, operator: str, occurrence: int, line: int, definition: str
) -> Mutant | None:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    before = Path(module).read_text()
    after = mutate_code(before, get_operator(operator)(), occurrence)
    if after is None or after == before:
        return None
    try:
        compile(after, module, "exec")
    except SyntaxError:
        return None
    return Mutant(module, operator, occurrence, line, definition, after)


def annotation_spans(source: str) -> list[Span]:
    """Where annotations are; changes there change nothing."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            found.append(node.returns)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in found
    ]
