"""Print notes, tables and errors on the terminal, and turn user errors into exit codes."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elias import progress
from elias.errors import DataError, EliasError, RunError, escape_controls, quoted
from elias.progress import NOTE

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from elias.inference.predictor import Elias


USER_ERROR = 2
SIGNALLED = 128
"""Offset of exit codes for signals. A command that is ended by signal n exits with 128 + n."""
_SIGPIPE = 13  # Windows has no signal.SIGPIPE
STAGE_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@20", "R@100")
"""Metrics shown for each training stage."""
_FORMATS = {int: ",", float: ",.2f"}
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRAPPED = 10_000  # width in columns, so that no line is wrapped

_library_logger = logging.getLogger("elias")
_logger = logging.getLogger(__name__)


class _ConsoleHandler(logging.Handler):
    """Handler that writes log records above the progress bars, each on one line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname.lower()}: {text}"
            elif is_verbose():
                text = f"{record.name}: {text}"
            text = escape_controls(text)
            progress.console().print(text, markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


# The handler has a level because a run lowers the level of the logger for its own log file.
_handler = _ConsoleHandler(NOTE)


def set_up(*, verbose: bool, quiet: bool, log_steps: bool) -> None:
    """Show progress bars and log lines on stderr.

    Args:
        verbose: Show all messages, including those for debugging.
        quiet: Show only warnings and errors, and no progress bars.
        log_steps: Show the INFO messages of the library.
    """
    level = logging.INFO if log_steps else NOTE
    if verbose:
        level = logging.DEBUG
    elif quiet:
        level = logging.WARNING
    _handler.setLevel(level)
    _library_logger.addHandler(_handler)
    _library_logger.setLevel(level)
    progress.enable(not quiet)


def show_errors_only() -> None:
    """Hide all messages except errors. Ranks other than 0 call this, as rank 0 prints for all."""
    _handler.setLevel(logging.ERROR)
    progress.enable(False)


def is_verbose() -> bool:
    """Return whether ``--verbose`` was given."""
    return _handler.level <= logging.DEBUG


def is_quiet() -> bool:
    """Return whether ``--quiet`` was given."""
    return _handler.level > NOTE


def note(text: str) -> None:
    """Print one line on stderr, unless ``--quiet`` was given."""
    _logger.log(NOTE, "%s", text)


def warn(text: str) -> None:
    """Print one line on stderr, even with ``--quiet``."""
    _logger.warning("%s", text)


def show(renderable: RenderableType) -> None:
    """Print a table on stderr, unless ``--quiet`` was given."""
    if not is_quiet():
        progress.console().print(renderable)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON on stdout."""
    typer.echo(escape_controls(json.dumps(value, ensure_ascii=False)))


def print_out(*renderables: RenderableType) -> None:
    """Print on stdout. Long lines are wrapped only if stdout is a terminal."""
    from rich.console import Console

    console, buffer = Console(), io.StringIO()
    if not sys.stdout.isatty():
        console = Console(file=buffer, width=_UNWRAPPED, color_system=None)
    for renderable in renderables:
        # Do not break plain lines, because they may be commands to copy.
        is_line = isinstance(renderable, str)
        shown = escape_controls(renderable) if isinstance(renderable, str) else renderable
        console.print(shown, soft_wrap=is_line, highlight=False, markup=False)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def grid(rows: Iterable[tuple[str, Any]]) -> Table:
    """Return a borderless table of (name, value) rows. Rows with the value None are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            shown = escape_controls(format(value, _FORMATS.get(type(value), "")))
            table.add_row(Text(escape_controls(name)), Text(shown))
    return table


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, n_left: int = 1) -> Table:
    """Return a table with a header. Only the first ``n_left`` columns are left-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(header):
        table.add_column(
            Text(escape_controls(name)),
            justify="left" if i < n_left else "right",
            no_wrap=i >= n_left or not i,
        )
    for row in rows:
        table.add_row(*(Text(escape_controls(cell)) for cell in row))
    return table


def stage_table(model: Elias, split: str) -> list[RenderableType]:
    """Return headings and tables of a model's metrics on a split.

    The first table has one row per stage or component. The second has precision, recall and F1 at
    the model's threshold, if it has one. The heading has the number of points, if it is known, and
    the standard error of the last P@1. It names stages and components that were measured but not
    saved, because they did not help. A line below it says which stages score every label. Metrics
    that are the same for every ranking are left out.
    """
    from elias.metrics import depends_on_ranking
    from elias.report.report import COMPONENTS

    metadata = model.metadata
    metrics, probabilities = metadata.get("metrics", {}), metadata.get("probabilities", {})
    stages = {stage: splits[split] for stage, splits in metrics.items() if split in splits}
    shown_metrics = [name for name in STAGE_METRICS if depends_on_ranking(name, model.n_labels)]
    rows = [
        [COMPONENTS.get(stage, stage), *(_percent(values.get(name)) for name in shown_metrics)]
        for stage, values in stages.items()
    ]
    trained = [stage for stage in model.config.stages if stage.name in stages]
    saved = {*(stage.name for stage in trained), *model.components, "ensemble"}
    task = {True: "scores every label", False: "searches the index"}
    tasks = ", ".join(f"{stage.name} {task[stage.score_all]}" for stage in trained)
    about = "; rows above the ensemble show its first member" if "ensemble" in stages else ""
    left_out = [COMPONENTS.get(name, name) for name in stages if name not in saved]
    if left_out:
        about += f" ({', '.join(left_out)}: not saved)"
    n_points = metadata.get("data", {}).get("splits", {}).get(split, {}).get("points")
    counted = f" ({n_points:,} points)" if n_points else ""
    *_, last = {}, *stages.values()
    if n_points and "P@1" in shown_metrics and 0 < (p := last.get("P@1") or 0) < 100:
        error = math.sqrt(p * (100 - p) / n_points)
        counted = f" ({n_points:,} points, standard error of P@1 {error:.1f})"
    shown: list[RenderableType] = [
        f"On the {split} split{counted}, in percent{about}:",
        *([f"({tasks})"] if len(trained) > 1 else []),
        columns(["", *shown_metrics], rows),
    ]
    if at_threshold := probabilities.get("at_threshold", {}).get(split):
        best = probabilities["f1"]
        rule = describe_rule(best["threshold"], keep_best=best.get("keep_best", False))
        shown += ["", f"With the best F1 on held-out points ({rule}):", f1_table(at_threshold)]
    elif not probabilities:
        shown += ["", "No F1: the model has no probabilities, so no threshold was chosen."]
    return shown


def describe_rule(threshold: float, *, keep_best: bool) -> str:
    """Describe which labels a threshold assigns.

    >>> describe_rule(0.25, keep_best=False), describe_rule(1.0, keep_best=True)
    ('probability of at least 0.25', 'the best label')
    """
    others = f"probability of at least {threshold:g}"
    if not keep_best:
        return others
    return "the best label" + ("" if threshold == 1 else f", others: {others}")


def likelihood(probability: float | None, score: float) -> str:
    """Return a probability in percent, or the score if the probability is None.

    >>> likelihood(0.861, 1.87), likelihood(0.001, 0.2), likelihood(None, 0.2)
    ('86%', '<1%', '0.200')
    """
    if probability is None:
        return f"{score:.3f}"
    return "<1%" if 0 < probability < 0.005 else f"{probability:.0%}"


def program() -> str:
    """Return the command that starts this program, such as ``elias`` or ``.venv/bin/elias``."""
    script = Path(sys.argv[0])
    if script.name != "elias" or not script.is_file():
        return "elias"
    on_path = shutil.which("elias")
    is_on_path = on_path is not None and script.samefile(on_path)
    return "elias" if is_on_path else shlex.quote(str(script))


def one_line(text: str) -> str:
    """Return a text as one line that is safe to print on a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """Return a table with a row for each metric, such as ``P``, and a column for each k."""
    kinds = list(dict.fromkeys(name.partition("@")[0] for name in metrics))
    ks = sorted({int(name.partition("@")[2]) for name in metrics})
    rows = [[kind, *(_percent(metrics.get(f"{kind}@{k}")) for k in ks)] for kind in kinds]
    return columns(["%", *(f"@{k}" for k in ks)], rows)


def f1_table(metrics: Mapping[str, float]) -> Table:
    """Return a table of `f1_metrics`, with a row for micro and one for macro averages."""
    kinds = ("precision", "recall", "F1")
    rows = [
        [average, *(_percent(metrics.get(f"{average}-{kind}")) for kind in kinds)]
        for average in ("micro", "macro")
    ]
    return columns(["%", *kinds], rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors that the user can fix, each on one line, and exit. Let other exceptions pass."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(SIGNALLED + _SIGPIPE) from None
    except EliasError as error:
        report_error(error)
        raise typer.Exit(USER_ERROR) from error
    except MemoryError as error:
        problem = f"out of memory ({quoted(error)}); close other programs, or give smaller files"
        report_error(RunError(problem))
        raise typer.Exit(USER_ERROR) from error
    except OSError as error:
        if error.filename is None:
            if error.errno not in _DISK_ERRORS:  # the error is not about a file of the user
                raise
            _discard_stdout()
        report_error(DataError(f"{error.filename or 'output'}: {error.strerror}"))
        raise typer.Exit(USER_ERROR) from error
    except KeyboardInterrupt as interrupt:
        typer.echo(": ".join(["interrupted", *map(str, interrupt.args)]), err=True)
        number = getattr(interrupt, "signal_number", signal.SIGINT)
        raise typer.Exit(SIGNALLED + number) from None


def _discard_stdout() -> None:
    """Redirect stdout, so that the flush at interpreter exit cannot fail."""
    with suppress(OSError, ValueError):  # stdout may not be a file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report_error(error: BaseException) -> None:
    """Print an `EliasError` immediately, unless it was printed before.

    `torchrun` kills all processes as soon as one exits, so an error printed at exit may be lost.
    """
    if isinstance(error, EliasError) and not error.reported:
        error.reported = True
        if is_verbose():
            typer.echo(escape_controls(traceback.format_exc()), err=True)
        message = " ".join(name_options(str(error)).split())
        typer.echo(f"error: {escape_controls(message)}", err=True)


_READING = "text|labels|separator|group|encoding|language"


def name_options(message: str) -> str:
    """Replace Python arguments in an error message by the options of the command line.

    >>> name_options("holds a finished run; use overwrite=True or another out=")
    'holds a finished run; use --overwrite or another --out'
    >>> name_options("not UTF-8; pass encoding=cp1252, or choose a column (text=)")
    'not UTF-8; pass --encoding cp1252, or choose a column (--text)'
    """
    message = message.replace("overwrite=True", "--overwrite").replace(
        "header=False", "--no-header"
    )
    message = message.replace("ignore_memory=True", "--ignore-memory")
    message = re.sub(rf"\b({_READING}|out)=(?=[\s,;)]|$)", r"--\1", message)
    message = re.sub(rf"(?<= )({_READING})=", r"--\1 ", message)
    message = re.sub(r"\bdevice='(\w+)'", r"--device \1", message)
    return re.sub(r"\btest_size(?= must|$)", "--test-size", message)
