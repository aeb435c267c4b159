"""The progress bar of a batch. rich is imported only when one is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvloom.engine.outputs import Generation

Update = Callable[[Sequence[Generation]], None]


@contextmanager
def progress_bar(num_prompts: int, is_shown: bool) -> Iterator[Update]:
    """Yield a function that redraws the bar from the state of all generations."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prompts", total=num_prompts, num_tokens=0)

        def update(generations: Sequence[Generation]) -> None:
            choices = [choice for g in generations for choice in g.output.outputs]
            progress.update(
                task,
                completed=sum(g.output.is_finished for g in generations),
                num_tokens=sum(len(choice.token_ids) for choice in choices),
            )

        yield update
