"""Control messages between the ranks of a replica: objects broadcast between hosts, over gloo.

They are pickled, as by `torch.distributed.broadcast_object_list`, but need one message where that
takes two. Pickled bytes come from ranks of the same job alone, never from a file or a client.
"""

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")

_PACKET_BYTES = 16384
_LENGTH_BYTES = 8


def broadcast_object(value: Value, *, source: int, group: dist.ProcessGroup) -> Value:
    """Return the `value` of the global rank `source` on every rank of `group`.

    Communication: one broadcast of a packet from host memory over `group`, which must include gloo; a
        second one of the rest if the pickled value does not fit.
    """
    is_source = dist.get_rank() == source
    packet = torch.empty(_PACKET_BYTES, dtype=torch.uint8)
    rest = bytearray()
    if is_source:
        pickled = pickle.dumps(value)
        message = len(pickled).to_bytes(_LENGTH_BYTES, "little") + pickled
        first = message[:_PACKET_BYTES]
        packet[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        rest = bytearray(message[_PACKET_BYTES:])
    dist.broadcast(packet, src=source, group=group)
    received = packet.numpy().tobytes()
    length = int.from_bytes(received[:_LENGTH_BYTES], "little")
    if (remaining := length + _LENGTH_BYTES - _PACKET_BYTES) > 0:
        rest = rest or bytearray(remaining)
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src=source, group=group)
    if is_source:
        return value
    own: Value = pickle.loads((received + rest)[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return own
