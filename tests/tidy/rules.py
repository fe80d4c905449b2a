# SPDX-License-Identifier: Apache-2.0
"""The style rules as functions: a parsed file in, findings out.

They look at the syntax tree, never at the text, wherever a string or a comment could fool them.
Which files a rule applies to, and the exceptions, are in test_tidy.py.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

SPDX = "# SPDX-License-Identifier: Apache-2.0"
FUNCTION_LINES_MAX = 80
CLASS_LINES_MAX = 400
MODULE_LINES_MAX = 800
LINE_LENGTH_MAX = 100

UNSAFE_FORMATS = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
)
NAMED_TUPLE_API = frozenset({"_asdict", "_fields", "_make", "_replace"})
WITH_TRACEBACK = frozenset(
    {"exception", "print_exc", "print_exception", "format_exc", "format_exception"}
)
DIRECTIVE = re.compile(r"#(!|:|\s*(SPDX|noqa|type:|mypy:|ruff:|fmt:|pragma|isort:))")
PROMISE = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
ISSUE_NUMBER = re.compile(r"#\d+")
NO_ACTOR = re.compile(r"\b(nobody|somebody|whoever|those who|shall|anew)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule."""

    line: int
    what: str


@dataclass(frozen=True)
class File:
    """One Python file as the rules see it."""

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in tokens if token.type == tokenize.COMMENT]

    @cached_property
    def modules(self) -> dict[str, str]:
        """Local names of imported modules: {"t": "time"} after `import time as t`."""
        return {
            alias.asname or alias.name: alias.name
            for node in self.nodes
            if isinstance(node, ast.Import)
            for alias in node.names
        }

    def uses(self, module: str, names: frozenset[str]) -> Iterator[Finding]:
        """Every way to reach one of `names` in `module`: through the module or imported from it."""
        for node in self.nodes:
            match node:
                case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                    if self.modules.get(owner) == module and attr in names:
                        yield Finding(node.lineno, f"{module}.{attr}")
                case ast.ImportFrom(module=source, names=aliases) if source == module:
                    for alias in aliases:
                        if alias.name in names:
                            yield Finding(node.lineno, f"{module}.{alias.name}")


def sizes_over_limit(file: File) -> dict[str, int]:
    """Sizes by name of what is too large; the module itself has the name "" (see the ratchet)."""
    over: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                limit = CLASS_LINES_MAX if isinstance(child, ast.ClassDef) else FUNCTION_LINES_MAX
                lines = (child.end_lineno or child.lineno) - child.lineno + 1
                if lines > limit:
                    over[name] = lines
            visit(child, name)

    visit(file.tree, "")
    lines = len(file.text.splitlines())
    if lines > MODULE_LINES_MAX:
        over[""] = lines
    return over


def long_lines(file: File) -> Iterator[Finding]:
    for number, line in enumerate(file.text.splitlines(), start=1):
        if len(line) > LINE_LENGTH_MAX:
            yield Finding(number, f"line of {len(line)} characters (at most {LINE_LENGTH_MAX})")


def broad_handlers(file: File) -> Iterator[Finding]:
    """Handlers that catch everything; outside the borders the reaction to that is never known."""
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node.type):
            yield Finding(node.lineno, "catches everything outside a border file")


def silent_broad_handlers(file: File) -> Iterator[Finding]:
    """Handlers that catch everything and neither re-raise nor log the traceback: never allowed."""
    for node in file.nodes:
        match node:
            case ast.ExceptHandler(type=kind) if _catches_everything(kind):
                if not any(_keeps_the_error(inner) for inner in _own_nodes(node)):
                    yield Finding(node.lineno, "swallows everything: re-raise or log the traceback")
            case ast.Call(func=function, args=kinds) if _last_name(function) == "suppress":
                if any(_catches_everything(kind) for kind in kinds):
                    yield Finding(node.lineno, "suppresses everything")


def wall_clock(file: File) -> Iterator[Finding]:
    yield from file.uses("time", frozenset({"time", "time_ns"}))
    for node in file.nodes:
        match node:
            case ast.Attribute(attr="now" | "utcnow" | "today" as reading, value=owner):
                if _last_name(owner) in {"datetime", "date"}:
                    yield Finding(node.lineno, f"datetime {reading}")


def environment(file: File) -> Iterator[Finding]:
    names = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
    yield from file.uses("os", names)


def unsafe_formats(file: File) -> Iterator[Finding]:
    """Imports of formats that execute code when read, and options that switch such a format on."""
    for node in file.nodes:
        match node:
            case ast.Import(names=aliases):
                sources = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(source)):
                sources = [source]
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield Finding(node.value.lineno, "allow_pickle=True")
                continue
            case ast.keyword(arg="weights_only", value=ast.Constant(value=False)):
                yield Finding(node.value.lineno, "weights_only=False")
                continue
            case _:
                continue
        for source in sources:
            if source.split(".")[0] in UNSAFE_FORMATS:
                yield Finding(node.lineno, f"import of {source}")


def sleeps(file: File) -> Iterator[Finding]:
    for node in file.nodes:
        if isinstance(node, ast.Call) and _last_name(node.func) == "sleep":
            yield Finding(node.lineno, "sleep: wait for what you wait for (tests/waiting.py)")


def mocks(file: File) -> Iterator[Finding]:
    """Patching of any kind: a pure core is tested by events and commands alone."""
    for node in file.nodes:
        match node:
            case ast.Import(names=aliases):
                if any(alias.name.split(".")[-1] == "mock" for alias in aliases):
                    yield Finding(node.lineno, "import of mock")
            case ast.ImportFrom(module=source, names=aliases):
                if (source or "").split(".")[-1] == "mock" or any(
                    a.name == "mock" for a in aliases
                ):
                    yield Finding(node.lineno, "import of mock")
            case ast.arg(arg="monkeypatch" | "mocker"):
                yield Finding(node.lineno, f"fixture {node.arg}")


def private_access(file: File) -> Iterator[Finding]:
    """Private attributes of other objects and private imports from our package."""
    for node in file.nodes:
        match node:
            case ast.Attribute(attr=attr) if _is_private(attr) and attr not in NAMED_TUPLE_API:
                owner = _last_name(node.value)
                if owner not in {"self", "cls", "super"} and (owner, attr) != ("os", "_exit"):
                    yield Finding(node.lineno, f"private attribute {attr}")
            case ast.ImportFrom(module=str(source), names=aliases) if source.startswith("holdfast"):
                for name in (*source.split("."), *(alias.name for alias in aliases)):
                    if _is_private(name):
                        yield Finding(node.lineno, f"private import {source}.{name}")


def mutable_dataclasses(file: File) -> Iterator[Finding]:
    """Dataclasses that are not frozen with slots. State is exempt: `_Private` or `...State`."""
    for node in file.nodes:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if node.name.endswith("State"):
            continue
        for decorator in node.decorator_list:
            if _last_name(decorator) == "dataclass" and not (
                _keyword_is_true(decorator, "frozen") and _keyword_is_true(decorator, "slots")
            ):
                yield Finding(node.lineno, f"{node.name} is not frozen=True, slots=True")


def promises(file: File) -> Iterator[Finding]:
    for comment in file.comments:
        if PROMISE.search(comment.string) and not ISSUE_NUMBER.search(comment.string):
            yield Finding(comment.start[0], "TODO without an issue number")


def sentences_without_actor(file: File) -> Iterator[Finding]:
    """Words that hide who acts, in docstrings and comments. Messages are not looked at."""
    for node in file.nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                for word in NO_ACTOR.findall(text):
                    yield Finding(node.lineno, f"{word!r}: name the actor (the master, a worker)")
    for comment in file.comments:
        for word in NO_ACTOR.findall(comment.string):
            yield Finding(comment.start[0], f"{word!r}: name the actor (the master, a worker)")


def commented_out_code(file: File) -> Iterator[Finding]:
    """Comment lines, or blocks of them, that are statements and cannot be meant as prose."""
    blocks: list[list[tokenize.TokenInfo]] = []
    for comment in file.comments:
        if DIRECTIVE.match(comment.string):
            continue
        stands_alone = not comment.line[: comment.start[1]].strip()
        follows = blocks and blocks[-1][-1].start == (comment.start[0] - 1, comment.start[1])
        if stands_alone and follows:
            blocks[-1].append(comment)
        else:
            blocks.append([comment])
    for block in blocks:
        lines = [comment.string.lstrip("#") for comment in block]
        for line, comment in zip(lines, block, strict=True):
            if _is_code(line.strip()):
                yield Finding(comment.start[0], "commented-out code")
                break
        else:
            indent = min(len(line) - len(line.lstrip()) for line in lines)
            if _is_code("\n".join(line[indent:] for line in lines)):
                yield Finding(block[0].start[0], "commented-out code")


def missing_licence(file: File) -> Iterator[Finding]:
    lines = file.text.splitlines()
    start = 1 if lines and lines[0].startswith("#!") else 0
    if lines and lines[start : start + 1] != [SPDX]:
        yield Finding(start + 1, f"the first line must be: {SPDX}")


def missing_docstring(file: File) -> Iterator[Finding]:
    if file.tree.body and ast.get_docstring(file.tree) is None:
        yield Finding(1, "no module docstring that says why the file exists")


def wrong_exports(file: File) -> Iterator[Finding]:
    """`__all__` of a public package must name its public names, no more and no fewer."""
    listed: set[str] = set()
    bound: set[str] = set()
    for node in file.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                listed = set(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                listed = set(ast.literal_eval(value))
            case ast.Assign(targets=targets):
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                bound.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(node.name)
            case ast.ImportFrom(module=source, level=level, names=aliases):
                if level or (source or "").split(".")[0] == "holdfast":
                    bound |= {alias.asname or alias.name for alias in aliases}
    is_lazy = "__getattr__" in bound
    public = {name for name in bound if not name.startswith("_")}
    for name in sorted(public - listed):
        yield Finding(1, f"{name} is public but not in __all__")
    for name in sorted(set() if is_lazy else listed - bound):
        yield Finding(1, f"{name} is in __all__ but not there")


def _last_name(node: ast.AST | None) -> str:
    """`c` of `a.b.c`, `c()` or `c(...)`; empty for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return _last_name(function)
    return ""


def _catches_everything(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches_everything(part) for part in kind.elts)
    return kind is None or _last_name(kind) in {"Exception", "BaseException"}


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run as part of this one: a nested function or lambda is only defined by it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            yield child
            yield from _own_nodes(child)


def _keeps_the_error(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    if _last_name(node.func) in WITH_TRACEBACK:
        return True
    return any(
        keyword.arg == "exc_info"
        and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        for keyword in node.keywords
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _keyword_is_true(decorator: ast.expr, name: str) -> bool:
    return isinstance(decorator, ast.Call) and any(
        keyword.arg == name
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in decorator.keywords
    )


def _is_code(text: str) -> bool:
    """Whether this parses as statements, one of which is neither a word nor a `label: word`."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    for statement in statements:
        match statement:
            case ast.AnnAssign(value=None):
                continue
            case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()):
                return True
            case ast.Expr():
                continue
            case _:
                return True
    return False
