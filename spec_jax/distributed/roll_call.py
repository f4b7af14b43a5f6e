"""Waits for all processes before JAX does, and names the missing ones.

JAX 0.10.2 names none: each process aborts with the stack trace of a failed RPC, up to 8 s late.
"""

import contextlib
import os
import socket
import time

from spec_jax.errors import ConfigError, JoinError

_HELLO = b"spec-jax"
_HERE = b"here"
_LATE = "did not join", "did not answer"
"""What problems say that another try may not have."""
_MAX_LINE = 1 << 12
"""Bytes of a message."""
_SECONDS_TO_SPEAK = 2.0
"""The time for a process that has connected to send its number."""


def call_roll(address: str, number: int, count: int, seconds: float) -> None:
    """Waits until all processes of a run are there.

    Process 0 listens at the address where JAX will listen, and the others report to it.

    Args:
      address: host:port of process 0.
      number: this process.
      count: the number of processes.
      seconds: the time limit.

    Raises:
      JoinError: in every process: some are missing.
      ConfigError: in every process: two have the same number, or their runs differ.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS is {address!r}; give host:port of process 0.")
    end = time.monotonic() + seconds
    if number == 0:
        problem = _listen(address, int(port), count, seconds, end)
    else:
        problem = _report(host.strip("[]"), int(port), number, count, seconds, end)
    if problem:
        is_late = any(each in problem for each in _LATE)
        raise (JoinError if is_late else ConfigError)(
            f"{problem}. Start all processes of a run, each with the same JAX_COORDINATOR_ADDRESS "
            "and JAX_NUM_PROCESSES and its own JAX_PROCESS_ID, and see what the missing ones say; "
            "SPEC_JAX_JOIN_SECONDS is the time to wait."
        )


def _listen(address: str, port: int, count: int, seconds: float, end: float) -> str:
    """Waits for the reports and answers them; returns the problem, if there is one."""
    missing = set(range(1, count))
    peers: list[socket.socket] = []
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_server(port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"process 0 cannot listen at {address}: {error}; choose another port in "
                "JAX_COORDINATOR_ADDRESS, for all processes."
            ) from None
        while missing and not problem and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer = stack.enter_context(server.accept()[0])
                peer.settimeout(_SECONDS_TO_SPEAK)
                hello, peer_number, peer_count = _line(peer).split()
                number = int(peer_number)
            except (OSError, ValueError):  # a stranger, or gone
                continue
            if hello != _HELLO:
                continue
            peers.append(peer)
            if peer_count != b"%d" % count or not 0 < number < count:
                problem = f"process {number} of {peer_count.decode()} reports to a run of {count}"
            elif number not in missing:
                problem = f"two processes have the number {number}"
            missing.discard(number)
        if missing and not problem:
            several = "processes" if len(missing) > 1 else "process"
            numbers = ", ".join(map(str, sorted(missing)))
            problem = f"{several} {numbers} of {count} did not join within {seconds:g} s"
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall((problem.encode() or _HERE) + b"\n")
    return problem


def _report(host: str, port: int, number: int, count: int, seconds: float, end: float) -> str:
    """Reports to process 0 until it answers; returns the problem, if there is one."""
    while (left := end - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),  # it does not listen yet
            socket.create_connection((host, port), timeout=left) as server,
        ):
            server.sendall(b"%s %d %d\n" % (_HELLO, number, count))
            server.settimeout(max(0.0, end - time.monotonic()) + _SECONDS_TO_SPEAK)
            if answer := _line(server):
                return "" if answer == _HERE else answer.decode(errors="replace")
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))
    return f"process 0 did not answer at {host}:{port} within {seconds:g} s"


def _server(port: int) -> socket.socket:
    """Listens where JAX's coordinator will."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bind is not None:
        host = bind.rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _line(peer: socket.socket) -> bytes:
    """The first line from a peer; empty if it ends before."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LINE:
        part = peer.recv(_MAX_LINE)
        if not part:
            return b""
        line += part
    return line.strip()
