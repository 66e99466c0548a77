"""`relay.py NAME MILLISECONDS MEGABITS` carries Ethernet frames between two devices that it makes, late and slowly.

The devices are `NAME-in` and `NAME-out`; MEGABITS per second pass in each direction, with 0 any number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x1002
LONGEST_FRAME = 65536
#: Seconds that a frame may wait for the line to be free; later ones are lost, as in a switch.
QUEUE_SECONDS = 0.5


@dataclass
class Line:
    """One direction: frames under way, and when the line is free for the next."""

    source: int
    target: int
    delay: float
    seconds_per_byte: float
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    free: float = 0.0

    def take(self) -> None:
        """Accept a frame from the source."""
        frame, now = os.read(self.source, LONGEST_FRAME), time.monotonic()
        if self.free < now + QUEUE_SECONDS:
            self.free = max(now, self.free) + len(frame) * self.seconds_per_byte
            self.under_way.append((self.free + self.delay, frame))

    def deliver(self) -> None:
        """Give the target what is due. A device that is not up yet loses it."""
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):
                os.write(self.target, self.under_way.popleft()[1])


def tap(name: str) -> int:
    """A new Ethernet device; what is sent to it is read from the file."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return device


def main(name: str, milliseconds: str, megabits: str) -> None:
    inner, outer = tap(f"{name}-in"), tap(f"{name}-out")
    pace = 8e-6 / float(megabits) if float(megabits) else 0.0
    lines = {a: Line(a, b, float(milliseconds) / 1000, pace) for a, b in ((inner, outer), (outer, inner))}
    print("ready", flush=True)
    while True:
        due = [line.under_way[0][0] for line in lines.values() if line.under_way]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for source in select.select(list(lines), [], [], timeout)[0]:
            lines[source].take()
        for line in lines.values():
            line.deliver()


if __name__ == "__main__":
    main(*sys.argv[1:])
