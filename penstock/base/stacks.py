"""What the threads of this process are doing: for the log of a wait that has ended by its deadline."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks_of_threads() -> str:
    """Return the Python stack of every thread, the main one first, each below its name."""
    frames, main = sys._current_frames(), threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident])).rstrip()}"
        for thread in threads
        if thread.ident in frames
    )
