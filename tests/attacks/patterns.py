"""Measure each regular expression of the packages on hostile texts that are built from the expression.

As a module it prints each expression whose time grows faster than its text. Python's `re` holds the interpreter while
it matches, so such an expression stops the whole process.

The expressions are found in the calls of `re` in the packages' syntax trees, so a new expression needs no entry. A text
consists of a beginning that leads to a repetition, a part that repeats, and an end that does not match.
"""

from __future__ import annotations

import ast
import gc
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import SimpleNamespace
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("cache", "commands", "connector", "formats", "metaserver")
CALLS = frozenset({"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"})
METHODS = frozenset({"match", "fullmatch", "search", "finditer"})
"""The methods that are measured. Calls of other methods are measured as `finditer`."""
VARIABLES: dict[str, dict[str, Any]] = {
    "connector/spark/query/name_positions.py": {"alternatives": "first|second"},
    "formats/index/keys/case_folding.py": {"spans": ("\u0378-\u0379", "\ud800-\udfff")},
    "connector/trino/rewriter.py": {"self": SimpleNamespace(_catalogs=("iceberg", "seamark"))},
    "metaserver/access/certificates/rules.py": {
        "pieces": ["spiffe://", "(?P<a>[^/]+)", "/", "(?P<b>[^/]+)"],
        "kind": "uri",
    },
    "metaserver/settings/sources.py": {"metadata": {"pattern": "[a-z0-9-]{1,40}"}},
}
"""Examples for the variables of functions that expressions of a file use."""
TEXT_CHARACTERS = 8_000
LINEAR_S = 0.004
"""An expression that needs less time for the whole text counts as linear: 0.5 µs for each character."""
GROWTH_MAX = 3.0
"""The largest growth of the time for twice the text. It is 2 for a linear expression, and 4 for a quadratic one."""
_REPEATS = frozenset({codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT})
_ENDS = ("", "\0", "!x")
_PARTS_MAX, _BEGINNINGS_MAX = 14, 8


@dataclass(frozen=True)
class PatternUse:
    """A regular expression, its place in the code, and the methods that are called on it."""

    place: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]


def find_uses() -> Iterator[PatternUse]:
    """Yield each call of `re` in the packages.

    Raises:
        LookupError: The expression depends on variables of a function and has no entry in `VARIABLES`.
    """
    for package in PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            file = path.relative_to(REPO).as_posix()
            if ".compile(" in (source := path.read_text()) or re.search(r"\bre\.", source):
                yield from _find_uses_in(file, ast.parse(source))


def _find_uses_in(file: str, tree: ast.Module) -> Iterator[PatternUse]:
    """Yield each regular expression that the module compiles or passes to a function of `re`.

    Raises:
        LookupError: The expression has a variable that has no example.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_call_of_re(node)]
    if not calls:
        return
    assigned_names = {id(value): name for name, value in _find_assignments(tree)}
    module = importlib.import_module("seamark." + file.removesuffix(".py").replace("/", "."))
    values_by_name = {**vars(module), **VARIABLES.get(file, {})}
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        expression, *_ = call.args
        context = f"{file}:{call.lineno}"
        flag_values = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
        if call.func.attr == "compile":
            flag_values += call.args[1:]
        try:
            text, flags = (
                _evaluate(expression, values_by_name),
                sum(int(_evaluate(flag_value, values_by_name)) for flag_value in flag_values),
            )
        except NameError:
            raise LookupError(
                f"{context}: add examples of the variables in this call to VARIABLES in {__file__}"
            ) from None
        methods = _find_methods(tree, assigned_names.get(id(call))) if call.func.attr == "compile" else {call.func.attr}
        yield PatternUse(context, re.compile(text, flags), frozenset(_choose_method(method) for method in methods))


def _is_call_of_re(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
        and function.attr in CALLS
    )


def _evaluate(node: ast.expr, values_by_name: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "pattern", "eval"), values_by_name)


def _find_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name to which a module assigns a value, with the value, also in `a, b = …`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(name, ast.Name):
                        yield name.id, value


def _find_methods(tree: ast.Module, name: str | None) -> set[str]:
    """Return the methods that a module calls on the regular expression in the variable `name`.

    Return all methods if `name` is None, if the variable is used in another way, or if no method is called.
    """
    methods: set[str] = set()
    called_ids: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            called_ids.add(id(node.value))
            if node.attr != "pattern":
                methods.add(node.attr)
    other_uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called_ids
    ]
    return set(METHODS) if name is None or other_uses or not methods else methods


def _choose_method(name: str) -> str:
    return name if name in METHODS else "finditer"


def build_hostile_texts(pattern: re.Pattern[Any], characters: int) -> Iterator[Any]:
    """Yield texts of about `characters` characters that make the expression try many ways."""
    source = pattern.pattern
    tree = parser.parse(source, pattern.flags & ~re.DEBUG)
    parts = _take_first(_list_parts(tree), _PARTS_MAX)
    beginnings = _take_first(("", *_generate_beginnings(tree, "")), _BEGINNINGS_MAX)
    for beginning in beginnings:
        for part in parts:
            for end in _ENDS:
                text = beginning + part * (characters // len(part)) + end
                yield text.encode("utf-8", "surrogatepass") if isinstance(source, bytes) else text


def _take_first(texts: Iterable[str], count: int) -> list[str]:
    return list(dict.fromkeys(texts))[:count]


def _list_parts(tree: Any) -> Iterator[str]:
    """Yield parts to repeat in a text.

    These are an example of the expression and of each part of it that it repeats, an example of each of its characters,
    and some common characters.
    """
    for code, argument in tree:
        for inner in _list_inner_trees(code, argument):
            if code in _REPEATS and argument[1] > 1:
                yield from filter(None, (_build_example(inner), *(_build_example([item]) for item in inner)))
            yield from _list_parts(inner)
    if example := _build_example(tree):
        yield example
    yield from _list_characters(tree)
    yield from (" ", "1", "a", ".")


def _list_characters(tree: Any) -> Iterator[str]:
    for code, argument in tree:
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY):
            yield _build_example([(code, argument)])
        for inner in _list_inner_trees(code, argument):
            yield from _list_characters(inner)


def _generate_beginnings(tree: Any, beginning: str) -> Iterator[str]:
    """Yield an example of the text that a regular expression matches before each repetition in it.

    Args:
        tree: The parsed expression, or a part of it.
        beginning: An example of the text before this part.
    """
    for node in tree:
        code, argument = node
        if code in _REPEATS:
            yield beginning
        for inner in _list_inner_trees(code, argument):
            yield from _generate_beginnings(inner, beginning)
        beginning += _build_example([node])


def _list_inner_trees(code: Any, argument: Any) -> list[Any]:
    """Return the trees inside a node of the syntax tree of an expression.

    Python's `re._parser` defines the layout of `argument` for each `code`.
    """
    if code in _REPEATS:
        return [argument[2]]
    if code is codes.BRANCH:
        return list(argument[1])
    if code is codes.SUBPATTERN:
        return [argument[3]]
    if code is codes.ATOMIC_GROUP:
        return [argument]
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [argument[1]]
    return []


def _build_example(tree: Any) -> str:
    """Return a short text that the tree matches, without regard to assertions about its surroundings."""
    text = ""
    for code, argument in tree:
        if code is codes.LITERAL:
            text += chr(argument)
        elif code is codes.NOT_LITERAL:
            text += "a" if argument != ord("a") else "b"
        elif code is codes.ANY:
            text += "a"
        elif code is codes.IN:
            text += _choose_member(argument)
        elif code in _REPEATS:
            text += _build_example(argument[2]) * max(argument[0], 1 if argument[1] > 1 else 0)
        elif code is codes.BRANCH:
            text += _build_example(argument[1][0])
        elif code is codes.SUBPATTERN:
            text += _build_example(argument[3])
        elif code is codes.ATOMIC_GROUP:
            text += _build_example(argument)
    return text


def _choose_member(members: Any) -> str:
    """Return a character that a set `[…]` matches, or "a" if none of the tried characters matches."""
    character_set = _Set(members)
    for code, argument in members:
        if code not in (codes.LITERAL, codes.RANGE):
            continue
        character = chr(argument if code is codes.LITERAL else argument[0])
        if character in character_set:
            return character
    return next((character for character in " a1_-.\0é~\n" if character in character_set), "a")


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdigit,
    codes.CATEGORY_NOT_DIGIT: lambda character: not character.isdigit(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    codes.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    codes.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}


class _Set:
    """The characters that `[…]` in a regular expression matches."""

    def __init__(self, members: Any) -> None:
        self._members = members

    def __contains__(self, character: str) -> bool:
        negated, is_member = False, False
        for code, argument in self._members:
            if code is codes.NEGATE:
                negated = True
            elif code is codes.LITERAL:
                is_member |= ord(character) == argument
            elif code is codes.RANGE:
                is_member |= argument[0] <= ord(character) <= argument[1]
            elif code is codes.CATEGORY:
                is_member |= _CATEGORIES[argument](character)
        return is_member != negated


def measure_cpu_s(work: Callable[[], object], rounds: int = 1) -> float:
    """Call `work` `rounds` times, and return the shortest CPU time in seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def measure_excessive_growth(work: Callable[[Any], object], texts: dict[int, Any]) -> float | None:
    """Return the factor by which the CPU time of `work` grows for a text of twice the size, or None if it is linear.

    Args:
        work: A function of a text.
        texts: The text by its size, as `generate_by_size` makes it. If the work is slow for the shortest text, the
            growth is measured from this text to the text of twice its size, and otherwise between the two longest.
    """
    shortest, _, normal, _ = sorted(texts)
    size = shortest if measure_cpu_s(lambda: work(texts[shortest])) > LINEAR_S else normal
    # The second pass of three rounds confirms the growth, because other processes may have disturbed the first pass.
    for rounds in (1, 3):
        short_s = measure_cpu_s(lambda: work(texts[size]), rounds)
        if short_s < LINEAR_S:
            return None
        growth = measure_cpu_s(lambda: work(texts[2 * size]), rounds) / short_s
        if growth < GROWTH_MAX:
            return None
    return growth


def generate_by_size(generate: Callable[[int], Iterable[Any]], size: int) -> Iterator[dict[int, Any]]:
    """Yield each text in the four sizes that `measure_excessive_growth` needs: from a quarter of `size` to its double.

    Args:
        generate: Returns all texts in a size, in the same order for each size.
    """
    sizes = (size // 4, size // 2, size, 2 * size)
    for texts in zip(*map(generate, sizes), strict=True):
        yield dict(zip(sizes, texts, strict=True))


def shorten_text(texts: dict[int, Any]) -> str:
    """Return the beginning and the end of the shortest of the texts, for messages."""
    text = min(texts.values(), key=len)
    return f"{text[:30]!r}…{text[-12:]!r}"


def _apply(pattern: re.Pattern[Any], method: str, text: Any) -> None:
    if method == "finditer":
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, method)(text)


def find_superlinear_texts(use: PatternUse) -> Iterator[str]:
    """Yield a description of the first text for which the regular expression needs more than linear time."""
    for texts in generate_by_size(partial(build_hostile_texts, use.pattern), TEXT_CHARACTERS):
        for method in sorted(use.methods):
            growth = measure_excessive_growth(partial(_apply, use.pattern, method), texts)
            if growth is not None:
                yield f"{use.place}: {method} of {use.pattern.pattern!r} on {shorten_text(texts)}: ×{growth:.1f}"
                return


def main() -> None:
    """Print each regular expression whose time is not linear in the text, and the number of all expressions."""
    count = 0
    gc.disable()  # A garbage collection in one of two measurements looks like growth.
    for use in find_uses():
        count += 1
        print(f"begins {use.place}", file=sys.stderr, flush=True)
        for fault in find_superlinear_texts(use):
            print(fault, flush=True)
    print(f"{count} expressions")


if __name__ == "__main__":
    main()
