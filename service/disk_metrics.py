"""How much room saved slots take, and how much the disk that they lie on has left."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LOG = logging.getLogger("kvarts.service")


class SlotDiskCollector(Collector):
    """The folder of slot files at the moment of a scrape; a folder that is gone has no figures."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._was_readable = True

    def collect(self) -> Iterable[Metric]:
        """Returns the gauges, none while the folder cannot be read."""
        try:
            used = _bytes_below(self._root)
            disk = os.statvfs(self._root)
        except OSError as error:
            if self._was_readable:
                _LOG.warning("no figures of the slot folder: %s", error)
            self._was_readable = False
            return
        self._was_readable = True
        yield _gauge("slot_disk_bytes", "Bytes of all saved slots.", used)
        yield _gauge("slot_disk_free_bytes", "Bytes free for them.", disk.f_bavail * disk.f_frsize)
        yield _gauge("slot_disk_size_bytes", "Bytes of that disk.", disk.f_blocks * disk.f_frsize)


def _bytes_below(folder: str) -> int:
    """The regular files of a folder and, one level down, of its tenants' folders."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _bytes_in(entry.path)
            else:
                total += _size(entry)
    return total


def _bytes_in(folder: str) -> int:
    with os.scandir(folder) as entries:
        return sum(_size(entry) for entry in entries)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        is_file = entry.is_file(follow_symlinks=False)
        return entry.stat(follow_symlinks=False).st_size if is_file else 0
    except FileNotFoundError:
        return 0  # deleted since it was listed


def _gauge(name: str, doc: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvarts_{name}", doc, value=value)
