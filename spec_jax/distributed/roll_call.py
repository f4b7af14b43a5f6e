"""Who is there, before JAX's processes join: JAX waits for all of them, and cannot say for whom."""

import contextlib
import os
import socket
import time

from spec_jax.errors import ConfigError

_HELLO = b"spec-jax"
_HERE = b"here"
_LONGEST = 1 << 12
"""Bytes of a message."""
_AT_ONCE = 2.0
"""Seconds in which a process that has connected says who it is."""


def call_roll(address: str, number: int, count: int, seconds: float) -> None:
    """Waits until all processes of a run are there.

    Process 0 listens at the address that it will listen at for JAX, and the others report to it.

    Args:
      address: host:port of process 0.
      number: this process.
      count: how many there should be.
      seconds: the longest wait.

    Raises:
      ConfigError: in every process that is there: some are missing, or two have one number.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS is {address!r}; give host:port of process 0.")
    end = time.monotonic() + seconds
    if number == 0:
        _listen(address, int(port), count, seconds, end)
    else:
        _report(host.strip("[]"), int(port), number, count, seconds, end)


def _listen(address: str, port: int, count: int, seconds: float, end: float) -> None:
    there: set[int] = set()
    peers: list[socket.socket] = []
    problem = ""
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(_server(port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"process 0 cannot listen at {address}: {error}; choose another port in "
                "JAX_COORDINATOR_ADDRESS, for all processes."
            ) from None
        while len(there) < count - 1 and not problem and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer = opened.enter_context(server.accept()[0])
                peer.settimeout(_AT_ONCE)
                name, its_number, its_count = _line(peer).split()
                number = int(its_number)
            except (OSError, ValueError):  # not one of ours, or gone
                continue
            if name != _HELLO:
                continue
            peers.append(peer)
            if its_count != b"%d" % count or not 0 < number < count:
                problem = f"process {number} of {its_count.decode()} reports to a run of {count}"
            elif number in there:
                problem = f"two processes have the number {number}"
            there.add(number)
        missing = [str(each) for each in range(1, count) if each not in there]
        if missing and not problem:
            several = "processes" if len(missing) > 1 else "process"
            problem = f"{several} {', '.join(missing)} of {count} did not join within {seconds:g} s"
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall((problem.encode() or _HERE) + b"\n")
    if problem:
        raise _absent(problem)


def _report(host: str, port: int, number: int, count: int, seconds: float, end: float) -> None:
    answer = b""
    while not answer and (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as server:
                server.sendall(b"%s %d %d\n" % (_HELLO, number, count))
                server.settimeout(max(0.0, end - time.monotonic()) + _AT_ONCE)
                answer = _line(server)
        except OSError:  # it does not listen yet
            pass
        if not answer:
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
    if not answer:
        raise _absent(f"process 0 did not answer at {host}:{port} within {seconds:g} s")
    if answer != _HERE:
        raise _absent(answer.decode(errors="replace"))


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
    """The first line that a peer sends; less if it stops before."""
    found = b""
    while not found.endswith(b"\n") and len(found) < _LONGEST:
        part = peer.recv(_LONGEST)
        if not part:
            return b""
        found += part
    return found.strip()


def _absent(problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}. Start all processes of a run, each with the same JAX_COORDINATOR_ADDRESS and "
        "JAX_NUM_PROCESSES and its own JAX_PROCESS_ID, and see what the missing ones say; "
        "SPEC_JAX_JOIN_SECONDS is the time to wait."
    )
