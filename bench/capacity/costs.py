"""What an image costs, and what a machine has."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ImageCosts:
    """Seconds and bytes of one image.

    ``decode_s`` and ``front_s``: CPU-seconds of one core, for decoding and of the server's own process. A forward of n
    rows takes ``forward_base_s`` + n × ``forward_row_s`` of a device (of a core, on a machine without devices), and has
    at most ``max_rows``. ``device_bytes`` go to the device; ``image_bytes`` come and ``reply_bytes`` leave by network;
    ``index_bytes`` are written to an index that all machines share.
    """

    decode_s: float
    front_s: float
    forward_base_s: float
    forward_row_s: float
    max_rows: int = 32
    image_bytes: float = 0.0
    reply_bytes: float = 0.0
    device_bytes: float = 0.0
    index_bytes: float = 0.0

    def get_forward_s(self, rows: float) -> float:
        """Of one row, in a forward of so many."""
        return self.forward_base_s / rows + self.forward_row_s

    def slow_down(self, factor: float) -> ImageCosts:
        """What they are where each second of a core or device takes ``factor`` seconds."""
        return replace(
            self,
            decode_s=self.decode_s * factor,
            front_s=self.front_s * factor,
            forward_base_s=self.forward_base_s * factor,
            forward_row_s=self.forward_row_s * factor,
        )


@dataclass(frozen=True)
class Machine:
    """``servers`` processes that speak HTTP, one for each device as a rule; without devices the cores run forwards.

    Bytes a second: of the network in each direction, and to each device.
    """

    cores: int
    devices: int = 0
    servers: int = 1
    network_bytes_s: float = 1.25e9
    device_bytes_s: float = 12e9

    @property
    def decode_cores(self) -> int:
        """Those that are left for decoding beside the servers' own processes, on a machine with devices."""
        return max(self.cores - self.servers, 1)


@dataclass(frozen=True)
class Fleet:
    """Machines of one kind behind a balancer, and an index that takes so many bytes a second in all; None: no index."""

    machine: Machine
    machines: int = 1
    index_bytes_s: float | None = None
