"""A check of the file descriptors of a process, without which it accepts no connection."""

from __future__ import annotations

import logging
import os
import resource

log = logging.getLogger(__name__)

_MAX_SHARE = 0.9  # of the limit, at which a warning is logged


class DescriptorCheck:
    """A check that logs when the file descriptors of this process run out, and when they are free again.

    HAProxy answers 500 or 504 for a process that cannot accept, and no library logs it.
    """

    def __init__(self) -> None:
        self._is_short = False

    def run(self) -> None:
        """Compare the lowest free descriptor with the limit, which takes 2 µs: all below it are open."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest_free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.close(lowest_free)
        except OSError:
            lowest_free = limit
        is_short = lowest_free >= _MAX_SHARE * limit
        if is_short and not self._is_short:
            log.error(
                "This process (pid %d) has %d of at most %d file descriptors open, and soon accepts no "
                "connections. Raise the server's limit (`ulimit -n`, LimitNOFILE of systemd), or close idle "
                "connections",
                os.getpid(),
                lowest_free,
                limit,
            )
        elif self._is_short and not is_short:
            log.info("This process (pid %d) has free file descriptors again", os.getpid())
        self._is_short = is_short
