"""The command line: `deltafl COMMAND [OPTIONS]`.

Bad input is one line on standard error and exit code 2, never a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from rich.markup import escape

from deltafl.cli import compare, data, federate, paper, partition, report, run, stopping, tune
from deltafl.cli.command import console
from deltafl.errors import UserError, explained, unknown
from deltafl.version import __version__

COMMANDS = {
    command.name: command
    for command in (
        run.COMMAND,
        federate.COMMAND,
        compare.COMMAND,
        report.COMMAND,
        tune.COMMAND,
        paper.COMMAND,
        partition.COMMAND,
        data.COMMAND,
    )
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = sys.argv[1:] if words is None else words
    try:
        with stopping.at_once():
            _dispatch(words)
    except UserError as error:
        print(f"deltafl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        # torch has no error of its own for it.
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        print("deltafl: out of memory: ask for less (clients, samples, width)", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("deltafl: stopped; the same command goes on where it stopped", file=sys.stderr)
        return 128 + (stop.number if isinstance(stop, stopping.Stopped) else signal.SIGINT)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"deltafl: {explained(error)}", file=sys.stderr)
        return 2
    return 0


def _dispatch(words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        _help()
    elif words[0] == "--version":
        print(__version__)
    elif words[0] in COMMANDS:
        COMMANDS[words[0]](words[1:])
    else:
        raise unknown("command", words[0], COMMANDS)


def _help() -> None:
    console.print("[bold]deltafl COMMAND \\[OPTIONS][/]\n")
    console.print("Federated learning whose clients tune their own step sizes.\n")
    for command in COMMANDS.values():
        console.print(f"  [cyan]{command.name:<10}[/] {escape(command.summary.split('. ')[0])}")
    console.print("\nStart with [bold]deltafl run[/]; every command has --help.")
