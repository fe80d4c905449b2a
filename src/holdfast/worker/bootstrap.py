# SPDX-License-Identifier: Apache-2.0
"""Runs the user's program inside a process of ours exactly as `python` itself would run it.

The program sees the argv, path, `__main__`, tracebacks and exit codes of plain Python. Ours is only
what it cannot see: the process ends with its agent, its imports are learned, its steps are counted.
"""

import builtins
import io
import json
import os
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

from holdfast.worker import ahead, imports, linux
from holdfast.worker.progress import ProgressCell

_OUR_FILES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
PROGRAM = f"{_OUR_FILES}__main__.py"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OPTIMIZER = "torch.optim.optimizer"
_COMMAND_NOT_FOUND = 127
_LOADER_SIGNAL_S = 1.0
_USAGE_EXIT = 2
"""The code with which argparse ends a program whose arguments it refuses."""
_WRONG_ARGUMENT = "ArgumentError"
"""As model.node has it: a worker imports nothing of ours but this package."""
_WITHOUT_TERMINAL = "NeedsTerminal"
"""As model.node has it, too."""


class RunMode(StrEnum):
    """What the first word of a worker's argv is."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


class Assignment(NamedTuple):
    """What the agent tells a process that is to become a worker."""

    mode: RunMode
    argv: tuple[str, ...]
    agent_pid: int
    line: int
    """Socket to the agent: it sends one byte when the worker may run; module names go back."""
    learn: bool
    progress: str
    excluded_roots: tuple[str, ...]
    memory: tuple[str, ...] = ()
    """Files with what it will probably load."""

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        fields = json.loads(text)
        fields["mode"] = RunMode(fields["mode"])
        fields["argv"] = tuple(fields["argv"])
        fields["excluded_roots"] = tuple(fields["excluded_roots"])
        fields["memory"] = tuple(fields["memory"])
        return cls(**fields)


def main(args: list[str]) -> None:
    """`worker ASSIGNMENT ARGV...`, or `spare SETTINGS`, which may turn into a worker later."""
    kind, settings = args[:2]
    if kind == "spare":
        from holdfast.worker import zygote

        assignment = zygote.serve(zygote.Settings(**json.loads(settings)))
        if assignment is None:
            return
    else:
        # The program's own arguments stand on the command line, where `ps` shows them.
        assignment = Assignment.from_json(settings)._replace(argv=tuple(args[2:]))
    run(assignment)


def run(assignment: Assignment) -> None:
    """Become the worker. Returns or raises as the user's program does."""
    _wait_until_registered(assignment)
    linux.die_with_parent(assignment.agent_pid)
    if assignment.mode is RunMode.COMMAND:
        _replace_by_command(assignment.argv)
    ahead.begin(assignment.memory)
    cell = ProgressCell.open(assignment.progress) if assignment.progress else None
    imports.observe(
        note=imports.NameSender(assignment.line) if assignment.learn else _note_nothing,
        excluded_roots=assignment.excluded_roots,
        after_import={_OPTIMIZER: _count_steps_in(cell)} if cell else {},
    )
    sys.argv = list(assignment.argv)
    _explain_breakpoints()
    try:
        load = _load_script if assignment.mode is RunMode.SCRIPT else _load_module
        module, code = load(assignment.argv[0])
        sys.modules["__main__"] = module
        if "__mp_main__" in sys.modules:  # Made by multiprocessing, for what its children send.
            sys.modules["__mp_main__"] = module
        if cell:
            cell.begin(time.monotonic())
        exec(code, module.__dict__)
    except BaseException as error:
        try:
            if isinstance(error, ConnectionError | EOFError) and _has_loader_processes():
                # A process that dies closes its pipes first: the signal is still to come.
                time.sleep(_LOADER_SIGNAL_S)
            _prepare_traceback(error)
        except RuntimeError as cause:
            # The program's signal handler raised this here: torch's, when a loader process dies,
            # whose broken pipe was the error before.
            _prepare_traceback(cause)
        raise


def _has_loader_processes() -> bool:
    """Whether torch has set its handler for the death of a DataLoader's processes."""
    torchs = sys.modules.get("torch.utils.data._utils.signal_handling")
    return bool(getattr(torchs, "_SIGCHLD_handler_set", False))


# The same text on every rank, so that the console shows it once.
_NEEDS_TERMINAL = "needs a terminal: use --nproc-per-node 1, or --debug-rank RANK, on a terminal"


def _explain_breakpoints() -> None:
    """A debugger at the end of an empty input ends the program with a traceback of its own."""
    is_pythons_own = sys.breakpointhook is sys.__breakpointhook__
    if is_pythons_own and "PYTHONBREAKPOINT" not in os.environ and not os.isatty(0):
        sys.breakpointhook = _refuse_breakpoint


def _refuse_breakpoint(*_args: object, **_options: object) -> None:
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    _exit_with(_WITHOUT_TERMINAL, f"{where}: breakpoint() {_NEEDS_TERMINAL}")


def _exit_with(kind: str, sentence: str) -> NoReturn:
    """End as after an error, but with one sentence instead of a traceback."""
    _write_error_file(f"{kind}: {sentence}", "")
    sys.exit(f"holdfast: {sentence}")


def _wait_until_registered(assignment: Assignment) -> None:
    """No user code runs before the agent knows this process and can end it."""
    if not os.read(assignment.line, 1):
        os._exit(1)
    os.set_inheritable(assignment.line, False)
    os.set_blocking(assignment.line, False)


def _note_nothing(_name: str) -> None:
    pass


def _replace_by_command(argv: tuple[str, ...]) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"holdfast: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(_COMMAND_NOT_FOUND)


def _count_steps_in(cell: ProgressCell) -> Callable[[ModuleType], None]:
    def step_finished(*_optimizer_args: object) -> None:
        cell.advance(time.monotonic())

    def register(optimizer_module: ModuleType) -> None:
        optimizer_module.register_optimizer_step_post_hook(step_finished)

    return register


def _load_script(path: str) -> tuple[ModuleType, CodeType]:
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as source:
            text = source.read()
    except OSError as error:
        where = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {file!r}: {where}", file=sys.stderr)
        sys.exit(2)
    _put_first_on_path(os.path.dirname(os.path.realpath(file)))
    module = _new_main(file, SourceFileLoader("__main__", file))
    return module, compile(text, file, "exec", dont_inherit=True)


def _load_module(name: str) -> tuple[ModuleType, CodeType]:
    _put_first_on_path(os.getcwd())
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        # A package that is there may itself import a missing module: that error is shown instead.
        if error.name is None or not f"{name}.__main__".startswith(error.name):
            raise
        spec = None
    code = getattr(spec.loader, "get_code", _no_code)(spec.name) if spec else None
    if spec is None or code is None or spec.origin is None:
        _exit_with(ModuleNotFoundError.__name__, f"No module named {name}")
    module = _new_main(spec.origin, spec.loader)
    module.__spec__ = spec
    module.__package__ = spec.parent
    module.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin
    return module, code


def _no_code(_name: str) -> None:
    return None


def _put_first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _new_main(file: str, loader: Any) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = loader
    module.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    return module


def _prepare_traceback(error: BaseException) -> None:
    """Python prints the error itself after we are gone; it only gets the user's part to print."""
    if isinstance(error, SystemExit):
        if (refusal := _refused_arguments(error)) is not None:
            _write_error_file(f"{_WRONG_ARGUMENT}: {refusal[0]}", refusal[1])
        return
    kind, said = type(error).__name__, str(error)
    has_asked = (kind == "BdbQuit" or said == "EOF when reading a line") and not os.isatty(0)
    if has_asked:
        kind, said = _WITHOUT_TERMINAL, f"a program that asks you something {_NEEDS_TERMINAL}"
    if not isinstance(error, KeyboardInterrupt):
        import traceback

        stack = traceback.format_exception(type(error), error, _users_part(error.__traceback__))
        _write_error_file(f"{kind}: {said}", "".join(stack))
    show = sys.excepthook

    def show_users_part(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        trace = _users_part(trace)
        show(kind, value.with_traceback(trace), trace)
        if has_asked:
            print(f"holdfast: {said}", file=sys.stderr)

    sys.excepthook = show_users_part


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FILES):
        trace = trace.tb_next
    return trace


def _refused_arguments(error: SystemExit) -> tuple[str, str] | None:
    """What argparse refused, and the usage that it printed; None if it was not argparse."""
    argparse, trace = sys.modules.get("argparse"), error.__traceback__
    if error.code != _USAGE_EXIT or argparse is None:
        return None
    parser = argparse.ArgumentParser
    parses = (parser.parse_args.__code__, parser.parse_known_args.__code__)
    refused = None
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code in parses:
            # A parser may have an `error` of its own, which is then not found below.
            refused = "its arguments were refused", frame.f_locals["self"].format_usage()
        elif frame.f_code is parser.error.__code__:
            self, message = frame.f_locals["self"], frame.f_locals["message"]
            refused = message, f"{self.format_usage()}{self.prog}: error: {message}\n"
    return refused


def _write_error_file(message: str, stack: str) -> None:
    """The file by which torch elastic's tools learn the cause, unless the program wrote it."""
    path = os.environ.get(_ERROR_FILE)
    if not path or (os.path.exists(path) and os.path.getsize(path) > 0):
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            # When the file was opened is when the error happened.
            now_s = int(os.fstat(file.fileno()).st_mtime)
            details = {"py_callstack": stack, "timestamp": str(now_s)}
            file.write(json.dumps({"message": {"message": message, "extraInfo": details}}))
    except OSError as failure:
        print(f"holdfast: cannot write the error file {path}: {failure}", file=sys.stderr)
