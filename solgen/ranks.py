"""Runs an engine command on the ranks it was given: this process, ranks started from it, or torchrun's."""

from collections.abc import Callable, Sequence
from typing import Any

from solgen.engine.batch import Job
from solgen.errors import InputError, SolgenError
from solgen.parallel.world import World

Command = Callable[..., Any]
"""`command(jobs, listener, world=..., **options)`, as `solgen.engine.generate.generate`, importable by name."""


def run(
    command: Command, plan: Callable[[], Sequence[Job]], *, gpus: int | None, debug: bool, **options: Any
) -> tuple[Sequence[Job], Any]:
    """Plan once, then run the command on every rank.

    Args:
        command: Importable by name.
        plan: Resolves the jobs; called on one process only, so that a seed is chosen once.
        gpus: Ranks to start; None is 1, or as many as torchrun has started.
        debug: Let ranks show tracebacks.
        options: Passed to the command.

    Returns:
        The jobs and what the command returned on rank 0; elsewhere, no jobs.

    Raises:
        SolgenError: one line; no rank is left running.
    """
    world = World.from_environment()
    if world.size > 1:
        if gpus not in (None, world.size):
            raise InputError(f"--gpus {gpus}, but torchrun started {world.size} processes; leave --gpus out")
        from solgen.parallel.agree import joined, share
        from solgen.parallel.launch import RankError, failing_together

        try:
            with failing_together(), joined(world):
                jobs = share(world, plan)
                result = _work(command, jobs, options, world)
        except SolgenError as error:
            raise RankError(f"rank {world.rank}: {error}", error.exit_code) from error
        return (jobs, result) if world.rank == 0 else ([], None)
    jobs = plan()
    # Asked here already: without a GPU nobody waits for diffusers to be imported.
    from solgen.engine.machine import pick_device

    pick_device(jobs[0].request.preset_name)
    if gpus in (None, 1):
        return jobs, _work(command, jobs, options, world)
    return jobs, _launch(command, jobs, options, gpus, debug)


def run_counts(
    command: Command, plan: Callable[[], Sequence[Job]], *, counts: Sequence[int], debug: bool, **options: Any
) -> list[Any]:
    """Run the command on several numbers of ranks in turn, each in processes of its own: their memory is free again.

    Args:
        command: As for `run`.
        plan: As for `run`.
        counts: Ranks to start; all are checked before the first run.
        debug: As for `run`.
        options: As for `run`.

    Returns:
        What the command returned on every rank 0.
    """
    if (size := World.from_environment().size) > 1:
        raise InputError(
            f"--gpus lists {len(counts)} numbers, but torchrun started {size} processes; give one, or none"
        )
    jobs = plan()
    for count in counts:
        _refuse(jobs, count)
    return [_launch(command, jobs, options, count, debug) for count in counts]


def _launch(command: Command, jobs: Sequence[Job], options: dict[str, Any], gpus: int, debug: bool) -> Any:
    import rich.console

    from solgen.parallel.launch import launch

    _refuse(jobs, gpus)
    try:
        return launch(_rank, command, jobs, options, debug, num_ranks=gpus, debug=debug)
    finally:
        # A rank that was ended has not given the cursor back that its bars hid.
        rich.console.Console(stderr=True).show_cursor()


def _refuse(jobs: Sequence[Job], gpus: int) -> None:
    """Refuse what cannot work before any rank starts."""
    from solgen.engine.check import check
    from solgen.parallel.agree import require_gpus

    if gpus < 1:
        raise InputError(f"--gpus {gpus}; expected 1 or more")
    require_gpus(gpus)
    check(jobs, gpus)


def _rank(command: Command, jobs: Sequence[Job], options: dict[str, Any], debug: bool) -> Any:
    from solgen.__main__ import quiet_libraries
    from solgen.parallel.agree import joined

    if not debug:
        quiet_libraries()
    world = World.from_environment()
    with joined(world):
        return _work(command, jobs, options, world)


def _work(command: Command, jobs: Sequence[Job], options: dict[str, Any], world: World) -> Any:
    from solgen.console import Console
    from solgen.engine.stages import Silent

    if world.rank:
        return command(jobs, Silent(), world=world, **options)
    with Console() as console:
        return command(jobs, console, world=world, **options)
