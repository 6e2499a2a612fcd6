"""Broadcast and all-gather of Python objects as JSON; received bytes never run as code.

`torch.distributed.broadcast_object_list` and `all_gather_object` load pickles. Control messages of
inference, once per decode step, need one message here where torch sends two.
"""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.common.codeless import decode, encode_or_refuse

Value = TypeVar("Value")

_PACKET_BYTES = 16384
_LENGTH_BYTES = 8


def broadcast_object(value: Value, *, source: int, group: dist.ProcessGroup | None = None) -> Value:
    """Return the `value` of the global rank `source` on every rank of `group`; default: of all.

    Communication: one broadcast of a packet over `group`, from host memory with gloo; a second one of
        the rest if the encoded value does not fit.

    Raises:
        MessageError: what arrives is no message of this program.
        UnsendableError: on all ranks, `value` cannot be sent.
    """
    device = _device(group)
    is_source = dist.get_rank() == source
    message, refusal = b"", None
    if is_source:
        content, refusal = encode_or_refuse(value)
        message = len(content).to_bytes(_LENGTH_BYTES, "little") + content
    packet = _pad(message[:_PACKET_BYTES], _PACKET_BYTES).to(device)
    dist.broadcast(packet, src=source, group=group)
    received = _bytes_of(packet)
    length = int.from_bytes(received[:_LENGTH_BYTES], "little")
    if (remaining := length + _LENGTH_BYTES - _PACKET_BYTES) > 0:
        rest = _pad(message[_PACKET_BYTES:], remaining).to(device)
        dist.broadcast(rest, src=source, group=group)
        received += _bytes_of(rest)
    if refusal:
        raise refusal
    if is_source:
        return value
    own: Value = decode(received[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return own


def all_gather_objects(own: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the objects of all ranks of `group`, in their order.

    Communication: an all-gather of a number, then one of as many bytes as the longest has.

    Raises:
        MessageError: what arrives is no message of this program.
        UnsendableError: on all ranks, one of them cannot send its object.
    """
    device, count = _device(group), dist.get_world_size(group)
    content, _ = encode_or_refuse(own)
    length = torch.tensor([len(content)], device=device)
    lengths = [torch.empty_like(length) for _ in range(count)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(each) for each in lengths]
    padded = _pad(content, max(sizes)).to(device)
    contents = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(contents, padded, group=group)
    return [decode(_bytes_of(each)[:size]) for each, size in zip(contents, sizes, strict=True)]


def agree_on_failure(reason: str | None) -> str | None:
    """Return why something failed on any rank, with that rank's number unless all have that reason.

    Args:
        reason: why it failed on this rank; None if it did not.

    Communication: an all-gather of the reasons over all ranks, if there are several.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons = all_gather_objects(reason)
    if all(each == reason for each in reasons):
        return reason
    return next(f"on rank {rank}: {each}" for rank, each in enumerate(reasons) if each)


def _device(group: dist.ProcessGroup | None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _pad(content: bytes, size: int) -> Tensor:
    """Return a tensor of `size` bytes that starts with `content`."""
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)


def _bytes_of(packet: Tensor) -> bytes:
    return packet.cpu().numpy().tobytes()
