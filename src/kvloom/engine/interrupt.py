"""Ctrl-C between steps instead of within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the block has ended; a second one goes through at once.

    A step that is cut short leaves blocks whose content nobody knows. Only Python's own handler is
    replaced, and only in the main thread, where signals arrive. A block of many steps calls the
    function it is given between them: that raises what is held back.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    is_pending = False

    def raise_pending() -> None:
        nonlocal is_pending
        if is_pending:
            is_pending = False
            raise KeyboardInterrupt

    def remember(_signum: int, _frame: FrameType | None) -> None:
        nonlocal is_pending
        if is_pending:
            raise KeyboardInterrupt
        is_pending = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield raise_pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_pending()
