"""Messages between ranks whose rows lie on a device: by the group itself (NCCL), or through host memory (gloo)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_FIRST_TAG = 18_601_000  # of the messages here, so that they are none of the program's own

# Host memory of messages that were under way when a call failed: gloo may still write to it.
_abandoned: list[Any] = []


class LostRank(RuntimeError):
    """A rank that failed, left, or did not answer in time.

    >>> from headway.torch.distributed import LostRank
    >>> try:
    ...     raise LostRank("attention: rank 2 has not answered rank 1 for 60 s")
    ... except LostRank as error:
    ...     print(error)
    attention: rank 2 has not answered rank 1 for 60 s
    """

    __module__ = "headway.torch.distributed"


def needs_host_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on this device have to be copied for the group's messages."""
    return device.type == "cuda" and "cuda:nccl" not in dist.get_backend_config(group)


class Direct:
    """The group reads and writes the tensors themselves: NCCL, and gloo in host memory."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.group, self.timeout = group, timeout
        self.rank = dist.get_rank(group)
        self.peers = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
        self.tags = {start: [_FIRST_TAG] * len(self.peers) for start in (dist.isend, dist.irecv)}
        self.works: list[Any] = []

    def beside(self) -> Any:
        """Where tensors for `begin` are made: after what the current stream has computed so far."""
        return contextlib.nullcontext()

    def begin(self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> None:
        """Starts messages: (memory, rank)."""
        operations = [
            dist.P2POp(start, memory, self.peers[rank], self.group, self.tag(start, rank))
            for start, messages in ((dist.isend, sends), (dist.irecv, receives))
            for memory, rank in messages
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def tag(self, start: Any, rank: int) -> int:
        """NCCL keeps the order of messages between two ranks; gloo goes by tags."""
        self.tags[start][rank] += 1
        return self.tags[start][rank]

    def flush(self) -> None:
        """Called after the step's work was queued."""

    def end(self) -> None:
        """What arrives is there for the current stream; with NCCL the host does not wait."""
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostRank(f"attention: a rank has left ({str(error).splitlines()[0]})") from error


class Staged(Direct):
    """Rows are copied to host memory and from it on a stream of their own, while the current one computes."""

    def __init__(self, group: dist.ProcessGroup, timeout: float, device: torch.device) -> None:
        super().__init__(group, timeout)
        self.device: Any = torch.get_device_module(device)  # on the CPU its streams do nothing
        self.stream = self.device.Stream()
        self.pinned = device.type == "cuda"
        self.copied = self.device.Event()
        self.sends: list[tuple[Tensor, int, Tensor]] = []  # host memory, rank, what it is copied from
        self.pending: list[tuple[Any, int, Tensor, Tensor | None]] = []

    @contextlib.contextmanager
    def beside(self) -> Any:
        self.stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.stream):
            yield

    def begin(self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> None:
        self.sends = [(self._host(memory).copy_(memory, non_blocking=True), rank, memory) for memory, rank in sends]
        self.copied.record(self.stream)
        for memory, rank in receives:
            self._start(dist.irecv, self._host(memory), rank, memory)

    def _host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.pinned)

    def _start(self, start: Any, host: Tensor, rank: int, memory: Tensor | None) -> None:
        try:
            work = start(host, self.peers[rank], group=self.group, tag=self.tag(start, rank))
        except RuntimeError as error:
            self._lose(rank, error)
        self.pending.append((work, rank, host, memory))

    def flush(self) -> None:
        """The host waits for the copies only when the device has work."""
        self.copied.synchronize()
        for host, rank, _ in self.sends:
            self._start(dist.isend, host, rank, None)
        self.sends = []

    def end(self) -> None:
        until = time.monotonic() + self.timeout
        current = self.device.current_stream()
        for work, rank, host, memory in self.pending:  # receives, then sends
            try:
                done = work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            except RuntimeError as error:
                self._lose(rank, error)
            if done is False:
                self._lose(rank, None)
            if memory is not None:
                with self.device.stream(self.stream):
                    memory.copy_(host, non_blocking=True)
                if self.pinned:
                    memory.record_stream(current)
        self.pending = []
        current.wait_stream(self.stream)

    def _lose(self, rank: int, error: Exception | None) -> NoReturn:
        _abandoned.extend(self.pending)
        reason = "" if error is None else f" ({str(error).splitlines()[0]})"
        raise LostRank(
            f"attention: rank {rank} has left or has not answered rank {self.rank} for {self.timeout:g} s{reason}"
        ) from error
