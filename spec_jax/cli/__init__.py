"""The command line: flags -> config objects; the only place that prints."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence

from spec_jax import __version__
from spec_jax.cli import streams
from spec_jax.cli.interrupts import INTERRUPTED, raised_until_acknowledged
from spec_jax.cli.overview import COMMANDS, OVERVIEW
from spec_jax.errors import (
    PEER_LOST,
    ConfigError,
    DisagreementError,
    GenerationError,
    JoinError,
    SpecJaxError,
    did_you_mean,
    is_out_of_memory,
)

BROKEN_PIPE = 141
"""Exit code of a program that SIGPIPE ended, as shells report it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `spec-jax` and returns its exit code.

    Args:
      argv: the arguments; by default the ones of the process.

    Returns:
      0; 1 if an audit fails or answers are of another quality; 2 after a mistake in a flag, a
      prompt or a checkpoint, if memory is full and if a request failed; 3 if a test saw nothing or
      another process of the same run was lost; 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = _guarded(arguments)
    if code:
        _leave_peers(code)
    return code


def _guarded(arguments: list[str]) -> int:
    """Runs a command; whatever goes wrong becomes a message and an exit code."""
    try:
        streams.open_closed()
        with raised_until_acknowledged():
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        streams.discard()
        return BROKEN_PIPE
    except (SpecJaxError, OSError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if isinstance(error, OSError):  # a full disk, say; Python would report it again at exit
            streams.discard()
        number, count = _process()
        # If only one process met an error, only that process can report it.
        if number == 0 or not isinstance(error, DisagreementError):
            which = f"process {number} of {count}: " if count > 1 else ""
            streams.report_error(f"{which}{streams.message_of(error)}")
        return PEER_LOST if isinstance(error, JoinError) else 2
    except Exception as error:
        number, count = _process()
        full = is_out_of_memory(error)
        if type(error).__name__ != "JaxRuntimeError" or (count == 1 and not full):
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        reason = str(error).strip().splitlines()[0]
        if full:
            streams.report_error(
                f"a device's memory is full ({reason}); decode fewer prompts at once "
                "(--max-num-seqs, or --sample-batch of train-draft), lower --max-model-len, or use "
                "--dtype bfloat16, --offload host or a --layout of more devices."
            )
            return 2
        from spec_jax.distributed.watch import MAX_SILENCE, end_process  # loaded, with JAX

        # An ended peer closes its connections before it has been silent for long. The watch knows
        # which one ended first, and ends this process when it does.
        time.sleep(MAX_SILENCE)
        end_process(
            f"process {number} of {count} ends: another one has died or cannot be reached, unless "
            f"this one failed by itself: {reason}"
        )
        return PEER_LOST


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(OVERVIEW, file=sys.stderr)
        return 2
    command, *flags = arguments
    if command in ("-h", "--help"):
        print(OVERVIEW)
        return 0
    if command == "--version":
        print(f"spec-jax {__version__}")
        return 0
    if command not in COMMANDS:
        if command.startswith("-"):
            raise ConfigError(f"the command comes first: spec-jax generate {command} ...")
        raise ConfigError(f"unknown command {command!r}.{did_you_mean(command, COMMANDS)}")
    from spec_jax.cli import commands

    try:
        return commands.run(command, flags)
    except GenerationError as error:
        raise error.__cause__ or error from None
    except SystemExit as exit:  # argparse, after --help
        return exit.code if isinstance(exit.code, int) else 2


def _process() -> tuple[int, int]:
    """This process's number and the number of processes, as far as they are known."""
    distributed = sys.modules.get("spec_jax.distributed")
    return distributed.process() if distributed else (0, 1)


def _leave_peers(code: int) -> None:
    """Ends one of several processes at once: JAX's own exit waits for the others to end too."""
    if _process()[1] > 1:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
