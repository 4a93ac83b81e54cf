"""Ranks of one machine, started and watched by torch.distributed's elastic agent, and how they end together."""

import json
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from solgen.errors import SolgenError, describe
from solgen.parallel.agree import LostRankError

AGENT_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that the agent takes over while it runs."""

AGENT_LOGS = ("torch.distributed.elastic", "torch.multiprocessing")
"""Loggers under which the agent tells what it does to the ranks."""

HEAD_START = 5.0
"""Seconds that a rank which only follows another's failure waits, so that the agent sees the other one first."""


class RankError(SolgenError):
    """A rank failed; carries its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(function: Callable[..., Any], *arguments: Any, num_ranks: int, debug: bool = False) -> Any:
    """Run a function on several processes of this machine until all return or one fails.

    Args:
        function: Importable by name; finds its rank in the environment, as under torchrun.
        arguments: Pickled once for every rank.
        num_ranks: Processes to start.
        debug: Let ranks print their tracebacks and the agent its log.

    Returns:
        What rank 0 returned.

    Raises:
        RankError: with the failed rank's message and exit code, or the signal that stopped this process.
        KeyboardInterrupt: on Ctrl-C. Whatever is raised, every rank is gone by then.
    """
    others = set(multiprocessing.active_children())
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in AGENT_SIGNALS}
    with tempfile.TemporaryDirectory(prefix="solgen-ranks-") as folder, _agent_log(shown=debug), _deaf_ranks():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(AGENT_SIGNALS),
        )
        try:
            return elastic_launch(config, _run_rank)(function, arguments, debug)[0]
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                hint = "; is there enough memory?" if failure.signal_name() == "SIGKILL" else ""
                raise RankError(f"rank {rank} was ended by {failure.signal_name()}{hint}", 1) from None
            raise RankError(f"rank {rank}: {failure.message}", failure.exitcode) from None
        except SignalException as error:
            raise RankError(f"stopped by {error.sigval.name}", 128 + error.sigval) from None
        finally:
            # An interrupt between the start of two ranks leaves the first unknown to the agent.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            for name, handler in handlers.items():
                signal.signal(getattr(signal, name), handler)


def _run_rank(function: Callable[..., Any], arguments: tuple[Any, ...], debug: bool) -> Any:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does: ranks that each take every core slow one another down
    try:
        with failing_together():
            return function(*arguments)
    except BaseException as error:
        if debug:
            traceback.print_exc()
        message, code = describe(error)
        # The file in which the agent looks for a failed rank's reason.
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's teardown, which gloo's threads may abort while the other ranks are not there.
        os._exit(code)


@contextmanager
def failing_together() -> Iterator[None]:
    """Surrounds the work of a rank: it can be ended in a collective, and leaves the word to the rank that failed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Python's own handler would wait for the collective to return, which it never may.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    except (LostRankError, SystemExit):
        time.sleep(HEAD_START)
        raise


@contextmanager
def unwinding() -> Iterator[None]:
    """Let signals that would end a rank at once unwind the body, whose temporary files then go.

    The body must not wait for other ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: Any) -> None:
        for other in ending:
            signal.signal(other, signal.SIG_IGN)  # Ctrl-C and the agent's own signal come one after the other
        raise KeyboardInterrupt

    ending = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ending:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _deaf_ranks() -> Iterator[None]:
    """Start ranks with SIGINT blocked, so that Ctrl-C while they import does not make each print a traceback.

    They inherit the mask of this thread; the signal reaches this process through another one, and Python raises
    KeyboardInterrupt here all the same.
    """
    multiprocessing.resource_tracker.ensure_running()  # whose start would unblock the signal again
    done = threading.Event()
    hearing = threading.Thread(target=done.wait, daemon=True)
    hearing.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        done.set()
        hearing.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def _agent_log(*, shown: bool) -> Iterator[None]:
    """Keep the agent's own log off the terminal: the failed rank's message says it all."""
    logs = [] if shown else [logging.getLogger(name) for name in AGENT_LOGS]
    handler, propagated = logging.NullHandler(), [log.propagate for log in logs]
    for log in logs:
        log.addHandler(handler)
        log.propagate = False
    try:
        yield
    finally:
        for log, propagate in zip(logs, propagated, strict=True):
            log.removeHandler(handler)
            log.propagate = propagate
