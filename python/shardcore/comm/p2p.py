"""Messages from one rank to another: a channel per directed edge, in program order.

A message is a small note on the CPU (tag, description, sizes) and one flat payload on the device, so that shapes may
differ from message to message. Where the messages before had one size, the receive of the payload is posted together
with that of the note, before the sender has begun; one of another size follows the note. All go through groups of the
two ranks as broadcasts: unlike gloo's send and receive, whose wait breaks the connection when it times out, a broadcast
can be polled, which :mod:`watch` needs.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist

from shardcore import _torch_private as private
from shardcore.comm import watch
from shardcore.errors import RankMismatchError, StateError
from shardcore.mesh import Axis, Mesh

Tag = tuple[str, int, int]
"""What a message is: kind, stage, micro-batch. Both ends know it from their programs."""

_HEAD = struct.Struct("<8sqqqq")
_NOTE_NBYTES = 512
_ROOM = _NOTE_NBYTES - _HEAD.size
"""A longer description travels by itself, behind the note."""
_ALIGNMENT = 64
_MAX_UNDER_WAY = 4
"""Messages that a sender keeps in memory before it waits for the oldest."""


@dataclass(frozen=True, slots=True)
class Message:
    """What arrived: the sender's description, and its payload as a flat buffer of bytes on the device."""

    description: bytes
    payload: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Edge(Axis):
    """The two ranks of a channel. Messages have a history of their own: where the same two ranks share another axis,
    its collectives may come between other messages on one rank than on the other.
    """

    @cached_property
    def key(self) -> str:
        """Equal for the same sender and receiver."""
        return f"{self.ranks[0]}>{self.ranks[1]}"


class _Lane:
    """The sizes of the messages of one kind and stage, as both ends of the channel know them.

    What the last messages but one were, the next is expected to be: by then the receiver has seen them, since a program
    posts at most two receives of a lane ahead.
    """

    __slots__ = ("_nbytes", "num_started")

    def __init__(self) -> None:
        self.num_started = 0
        self._nbytes: dict[int, int] = {}

    def predict(self) -> tuple[int, int]:
        """(number of the message that starts now, bytes that its payload is expected to have; 0 if unknown)."""
        index = self.num_started
        self.num_started += 1
        before, earlier = self._nbytes.get(index - 2), self._nbytes.get(index - 3)
        return index, before if before is not None and before == earlier else 0

    def learn(self, index: int, nbytes: int) -> None:
        """A message's size is known."""
        self._nbytes[index] = nbytes
        self._nbytes.pop(index - 8, None)


class Receipt:
    """A message that is expected; ``wait()`` returns it, once."""

    __slots__ = (
        "_body",
        "_channel",
        "_description",
        "_entry",
        "_index",
        "_note",
        "_note_work",
        "_payload",
        "_predicted",
        "tag",
    )

    def __init__(self, channel: Channel, tag: Tag, entry: watch.Entry) -> None:
        self._channel = channel
        self._entry = entry
        self.tag = tag
        self._note = torch.empty(_NOTE_NBYTES, dtype=torch.uint8)
        self._note_work = channel.start(self._note, channel.notes)
        self._description = self._payload = torch.empty(0, dtype=torch.uint8)
        self._body: list[tuple[watch.Waitable, watch.Entry]] | None = None
        self._index, nbytes = channel.lane(tag).predict()
        self._predicted: tuple[watch.Waitable, torch.Tensor] | None = None
        if nbytes:
            payload = torch.empty(nbytes, dtype=torch.uint8, device=channel.device)
            self._predicted = (channel.start(payload, channel.payloads), payload)

    def has_note(self) -> bool:
        """Whether :meth:`start` would return at once."""
        return self._note_work.is_completed()

    def start(self) -> None:
        """Wait for the note, then start to receive what it announces and was not expected.

        Raises:
            RankMismatchError: the sender sent another message, has failed, or is gone.
        """
        channel = self._channel
        watch.wait(self._note_work, self._entry)
        kind, stage, microbatch, description_nbytes, nbytes = _HEAD.unpack_from(self._note.numpy().tobytes())
        self._check_tag((kind.rstrip(b"\0").decode(), stage, microbatch))
        channel.lane(self.tag).learn(self._index, nbytes)
        self._body = []
        if description_nbytes <= _ROOM:
            self._description = self._note[_HEAD.size : _HEAD.size + description_nbytes]
        else:
            self._description = torch.empty(description_nbytes, dtype=torch.uint8)
            self._body.append((channel.start(self._description, channel.others), self._entry))
        entry = channel.for_payload(self._entry)
        if self._predicted is not None:
            work, self._payload = self._predicted
            self._body.append((work, entry))
        if nbytes != self._payload.nbytes:
            self._payload = torch.empty(nbytes, dtype=torch.uint8, device=channel.device)
            if nbytes:
                self._body.append((channel.start(self._payload, channel.others), entry))

    def wait(self) -> Message:
        """The message, once it is here; on CUDA the payload is ordered behind the current stream.

        Raises:
            RankMismatchError: the sender sent another message, has failed, or is gone.
        """
        self._channel.start_until(self)
        for work, entry in self._body or ():
            watch.wait(work, entry)
        return Message(self._description.numpy().tobytes(), self._payload)

    def _check_tag(self, found: Tag) -> None:
        if found == self.tag:
            return
        sender, receiver = self._channel.axis.ranks
        raise RankMismatchError(
            f"rank {receiver} expected '{_text(self.tag)}' from rank {sender}, which sent '{_text(found)}': the two "
            "run different pipeline programs; every rank must build the same Pipeline and make the same calls"
        )


class Channel:
    """Messages from ``axis.ranks[0]`` to ``axis.ranks[1]``, received in the order in which they are sent."""

    def __init__(self, axis: Axis, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self.axis = axis
        self.device = device
        self.notes, self.payloads, self.others = groups
        """For notes; for payloads of the size that the receiver expects; for what it learns of by the note."""
        self._note_axis = replace(axis, group=self.notes, mesh=None)  # on the CPU: its waits are polled on every device
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._is_broken = False
        self._under_way: deque[tuple[watch.Waitable, watch.Entry, torch.Tensor]] = deque()
        self._expected: deque[Receipt] = deque()

    def send(self, tag: Tag, description: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send copies of ``tensors`` (any shapes and dtypes); they may be changed once this returns."""
        entry = self._record(tag)
        payload = pack(tensors, self.device)
        lane = self.lane(tag)
        index, expected_nbytes = lane.predict()
        lane.learn(index, payload.nbytes)
        head = _HEAD.pack(tag[0].encode(), tag[1], tag[2], len(description), payload.nbytes)
        inline = description if len(description) <= _ROOM else b""
        note = torch.zeros(_NOTE_NBYTES, dtype=torch.uint8)
        note[: len(head) + len(inline)] = torch.frombuffer(bytearray(head + inline), dtype=torch.uint8)
        self._put(note, entry, self.notes)
        if len(inline) != len(description):
            self._put(torch.frombuffer(bytearray(description), dtype=torch.uint8), entry, self.others)
        on_payload = self.for_payload(entry)
        if expected_nbytes not in (0, payload.nbytes):  # what the receiver waits for is not what comes
            self._put(payload.new_zeros(expected_nbytes), on_payload, self.payloads)
        if payload.nbytes:
            self._put(payload, on_payload, self.payloads if expected_nbytes == payload.nbytes else self.others)

    def lane(self, tag: Tag) -> _Lane:
        """What is known of the messages of this kind and stage."""
        return self._lanes.setdefault(tag[:2], _Lane())

    def expect(self, tag: Tag) -> Receipt:
        """Post a receive; receives of one channel are posted in the order of the sends."""
        receipt = Receipt(self, tag, self._record(tag))
        self._expected.append(receipt)
        return receipt

    def progress(self) -> None:
        """Start what the notes that are here announce. Does not wait."""
        while self._expected and self._expected[0].has_note():
            self._expected.popleft().start()

    def start_until(self, receipt: Receipt) -> None:
        """Start the payloads of all messages up to this one, waiting for their notes."""
        while receipt in self._expected:
            self._expected.popleft().start()

    def for_payload(self, entry: watch.Entry) -> watch.Entry:
        """The same message where its payload is waited for: on CUDA that orders the stream only."""
        return watch.Entry(self.axis, entry.sequence, entry.label)

    def check(self) -> None:
        """Raise :class:`StateError` if a step has failed over this channel."""
        if self._is_broken:
            raise StateError(
                f"{self.axis.name}: a pipeline's step has failed on this mesh, and its ranks are out of step; end the "
                "job and resume from a checkpoint"
            )

    def flush(self) -> None:
        """Wait until everything sent has left this rank's memory."""
        while self._under_way:
            self._wait_for_oldest()

    def abandon(self) -> None:
        """The step has failed: messages may be under way that never end. The channel cannot be used again.

        Its groups are kept for ever, since ending one waits for what is under way, while the other rank may wait in the
        same way for one of ours.
        """
        if self._is_broken:
            return
        self._is_broken = True
        for group in (self.notes, self.payloads, self.others):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def start(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> watch.Waitable:
        """Start one broadcast from the sender; collective over the two ranks."""
        work = dist.broadcast(tensor, self.axis.ranks[0], group=group, async_op=True)
        if work is None:  # only for a process outside the group, which cannot hold the channel
            raise RuntimeError("this process is not in the channel's process group")
        return work

    def _put(self, tensor: torch.Tensor, entry: watch.Entry, group: dist.ProcessGroup) -> None:
        while self._under_way and (self._under_way[0][0].is_completed() or len(self._under_way) >= 2 * _MAX_UNDER_WAY):
            self._wait_for_oldest()
        self._under_way.append((self.start(tensor, group), entry, tensor))

    def _wait_for_oldest(self) -> None:
        work, entry, _ = self._under_way[0]
        watch.wait(work, entry)
        self._under_way.popleft()

    def _record(self, tag: Tag) -> watch.Entry:
        return watch.record(self._note_axis, "message", f"{tag[0]} of stage {tag[1]}, micro-batch", tag[2])


def channels(mesh: Mesh, axis_name: str, edges: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Channel]:
    """The channels between this rank and others along an axis, by (sender, receiver) in global ranks.

    Made once per mesh and edge. Collective over all ranks of the job: torch counts the groups that a process has been
    asked for, and the counts must agree. Rounds of disjoint edges let many pairs connect at the same time.

    Args:
        edges: (sender, receiver) as positions along the axis, for every row of ranks.
    """
    known: dict[tuple[int, int], Channel | None] = mesh.attached.setdefault("channels", {})
    mine: dict[tuple[int, int], Channel] = {}
    everywhere = [(row[a], row[b]) for row in mesh.rows(axis_name) for a, b in edges]
    for edge in _in_rounds(everywhere):
        if edge not in known:
            known[edge] = _connect(mesh, edge)
        channel = known[edge]
        if channel is not None:
            channel.check()
            mine[edge] = channel
    return mine


def axes_over(mesh: Mesh, axis_name: str, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Axis]:
    """Axes over some ranks of another axis, by the positions along it. Collective over all ranks of the job.

    Args:
        sets: ascending positions of each new axis, two at least; those without this rank are made, not returned.
    """
    known: dict[tuple[int, ...], Axis | None] = mesh.attached.setdefault("axes", {})
    mine: dict[tuple[int, ...], Axis] = {}
    for positions in sorted(set(sets)):
        for row in mesh.rows(axis_name):
            ranks = tuple(row[i] for i in positions)
            if ranks not in known:
                group = _group(ranks)
                known[ranks] = None if group is None else Axis("tied", ranks, ranks.index(mesh.rank), group, mesh)
            axis = known[ranks]
            if axis is not None:
                mine[positions] = axis
    return mine


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All tensors in one flat buffer of bytes, each from a multiple of 64 bytes on."""
    offsets, total = _offsets([tensor.numel() * tensor.element_size() for tensor in tensors])
    flat = torch.empty(total, dtype=torch.uint8, device=device)
    for tensor, offset in zip(tensors, offsets, strict=True):
        _view(flat, offset, tensor.dtype, tensor.shape).copy_(tensor)
    return flat


def unpack(flat: torch.Tensor, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
    """Views of what :func:`pack` made, for the tensors' dtypes and shapes."""
    shapes = [torch.Size(shape) for _, shape in kinds]
    offsets, _ = _offsets([shape.numel() * dtype.itemsize for (dtype, _), shape in zip(kinds, shapes, strict=True)])
    return [_view(flat, offset, dtype, shape) for offset, (dtype, _), shape in zip(offsets, kinds, shapes, strict=True)]


def _view(flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """The bytes from ``offset`` on as a tensor with a version counter of its own: an in-place change of one must not
    look like a change of the others.
    """
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.insert(0, step)
        step *= max(length, 1)
    view = torch.empty(0, dtype=dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), offset // dtype.itemsize, shape, tuple(stride))


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    offsets, total = [], 0
    for nbytes in sizes:
        offsets.append(total)
        total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _connect(mesh: Mesh, edge: tuple[int, int]) -> Channel | None:
    """A channel with its groups; None on ranks that are no end of it. Collective over all ranks of the job."""
    groups = [group for group in (_group(edge) for _ in range(3)) if group is not None]
    if not groups:
        return None
    axis = _Edge(f"edge {edge[0]} to {edge[1]}", edge, edge.index(mesh.rank), groups[1], mesh)
    return Channel(axis, groups, mesh.device)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    return private.new_group(sorted(ranks))


def _in_rounds(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges in rounds in which no rank occurs twice, the same on every rank."""
    left = sorted(set(edges))
    ordered: list[tuple[int, int]] = []
    while left:
        busy: set[int] = set()
        now = []
        for edge in left:
            if busy.isdisjoint(edge):
                now.append(edge)
                busy.update(edge)
        ordered += now
        left = [edge for edge in left if edge not in now]
    return ordered


def _text(tag: Tag) -> str:
    return f"{tag[0]} of stage {tag[1]}, micro-batch {tag[2]}"
