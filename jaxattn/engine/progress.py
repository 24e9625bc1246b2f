"""What a person sees of long work, and how Ctrl-C ends it."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from tqdm import tqdm

_STOP = (signal.SIGINT, signal.SIGTERM)
_LINES = 20  # of progress, where there is no terminal: one for each 5 %

Result = TypeVar("Result")
Tell = Callable[[int, str], None]  # how much is done by now, and where that is


class StoppedError(Exception):
    """Ctrl-C or SIGTERM came, and what there was to keep is kept; says where."""


@contextlib.contextmanager
def shown(
    name: str, total: int, done: int = 0, *, unit: str, silent: bool = False
) -> Iterator[Tell]:
    """A bar on a terminal; lines where stderr is a file, which a bar would fill.

    Args:
      name: what is at work.
      total: how much there is to do.
      done: how much was done before.
      unit: of what is done.
      silent: shows nothing.

    Yields:
      What to call when more is done.
    """
    if silent:
        yield lambda done, where: None
    elif sys.stderr.isatty():
        with tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True) as bar:

            def draw(done: int, where: str) -> None:
                bar.set_description(where, refresh=False)
                bar.update(done - bar.n)

            yield draw
    else:
        began, told = time.perf_counter(), _LINES * done // total

        def write(done: int, where: str) -> None:
            nonlocal told
            if _LINES * done // total > told:
                told = _LINES * done // total
                seconds = time.perf_counter() - began
                share = f"{100 * done // total} %"
                text = f"{name}: {share} {where}, {seconds:.0f} s"
                print(text, file=sys.stderr, flush=True)

        yield write


class Signals:
    """Ctrl-C and SIGTERM, answered at once and heeded where nothing is left in half.

    An exception raised wherever the program happens to be could be lost in a library,
    or leave something half done: so the work asks, or, where all that this thread does
    is wait for others, says with `at_once` that one may be raised. The second one ends
    the program as if nothing had kept the first.
    """

    def __init__(self, until: str):
        """None came yet.

        Args:
          until: when the work will ask, as the end of "stopping ...".
        """
        self.until = until
        self._came = self._raised = False

    def __bool__(self) -> bool:
        """Whether one came."""
        return self._came

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Waiting that may be broken off.

        Raises:
          StoppedError: one came, now or before. What was waited for is still at work:
            the process must end by `command.leave`.
        """
        try:
            self._raised = True
            if not self._came:
                yield
            self._raised = False
        except KeyboardInterrupt:
            pass
        finally:
            self._raised = False
        if self._came:  # also if a library lost the exception
            raise StoppedError

    def left_behind(self, work: Callable[[], Result]) -> Result:
        """Does work in a thread of its own, that nobody waits for once one came.

        Args:
          work: to do.

        Raises:
          StoppedError: see `at_once`.
        """
        future = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # raised to who waits
                future.set_exception(error)

        with self.at_once():
            threading.Thread(target=do, daemon=True).start()
            return future.result()

    def keep(self, *_) -> None:
        """Handles a signal, as `signal.signal` calls it."""
        self._came = True
        for name in _STOP:
            signal.signal(name, signal.SIG_DFL)
        if self._raised:
            raise KeyboardInterrupt
        line = f"stopping {self.until}; again to stop now\n"
        line = "\n" + line if sys.stderr.isatty() else line  # below the bar
        # Not print: the signal may have come while that was at work.
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


@contextlib.contextmanager
def signals_kept(until: str) -> Iterator[Signals]:
    """Signals that wait until the work asks; while it waits for others, it can't.

    Args:
      until: see `Signals`.

    Yields:
      What the work asks.
    """
    signals = Signals(until)
    before = {name: signal.signal(name, signals.keep) for name in _STOP}
    try:
        yield signals
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
