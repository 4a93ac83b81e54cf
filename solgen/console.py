"""Progress on stderr: bars on a terminal, plain lines elsewhere. Results alone go to stdout."""

from types import TracebackType

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Console:
    """Shows the stages of a run; satisfies `solgen.engine.stages.Listener`. Use as a context manager."""

    def __init__(self) -> None:
        self._console = rich.console.Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, stage: str, total: int | None) -> None:
        """Open a bar; an undivided stage counts as one part."""
        self._task = self._progress.add_task(stage, total=total or 1)

    def advance(self) -> None:
        """Move the open bar by one part."""
        if self._task is not None:
            self._progress.advance(self._task)

    def finish(self, stage: str, seconds: float) -> None:
        """Complete the open bar, or print the stage's line where there are no bars."""
        if self._task is not None:
            task = self._progress.tasks[self._task] if self._progress.tasks else None
            self._progress.update(self._task, completed=task.total if task else None)
        if not self._console.is_terminal:
            self._console.print(f"{stage}: {seconds:.1f} s")

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True)
