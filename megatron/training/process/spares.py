"""Spare processes of an elastic run: ranks beyond the last replica, which wait for its end."""

import logging
import select
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from torch.distributed import DistError

from megatron.common.errors import ExitCode, TrainingError
from megatron.engine.deepspeed.distributed import rendezvous_timeout
from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.rendezvous import rendezvous, set_key
from megatron.training.guards.stop import Signals
from megatron.training.process.environment import Launch, master_address

log = logging.getLogger(__name__)

_END = "end of the run"
_PAUSE_S = 0.5
_CONNECT_S = 30.0


def wait_for_end(
    launch: Launch, look: Callable[[], None], met: Callable[[], None] = lambda: None
) -> ExitCode:
    """Meet the ranks as one of them would, and wait until their run ends; return the exit code.

    If a spare process left earlier, its launcher would end the other ranks, or take the run for
    finished.

    Args:
        look: called about twice a second while this process waits for the rendezvous; may raise.
        met: called after the rendezvous.

    Raises:
        TrainingError: the processes do not meet, or the launcher that hosts their store is gone.

    Communication: reads from the rendezvous store.
    """
    signals, master = Signals(), master_address(launch)
    store = rendezvous(master, rendezvous_timeout(), look=look)
    met()
    if launch.rank == launch.world_size or launch.local_rank == 0:  # the first on its host
        host = socket.gethostname()
        print(f"[rank {launch.rank}] a spare: waits on {host} for the end of the run", flush=True)
    has_key = partial(store.check, [_END])
    is_over = _is_announced(master, has_key) if master.is_hosted else rank_0_is_gone(master)
    while not signals.is_made():
        if is_over():
            return ExitCode.FINISHED
        time.sleep(_PAUSE_S)
    return ExitCode.RESUMABLE


def release_spares(launch: Launch) -> None:
    """Let the spare processes leave where the launcher hosts the store, which outlives rank 0.

    The run has ended well: that the store is gone is only a warning.
    """
    master = master_address(launch)
    if not master.is_hosted:
        return
    try:
        set_key(master, _END)
    except DistError as error:
        cause = str(error).partition("\n")[0]
        log.warning(
            "the launcher of rank 0 at %s did not take the end of the run (%s): spare processes that "
            "still wait have to be ended by hand",
            master,
            cause,
        )


def _is_announced(master: MasterAddress, has_key: Callable[[], bool]) -> Callable[[], bool]:
    """Return whether rank 0 has announced the end in a store of its launcher."""

    def is_over() -> bool:
        try:
            return has_key()
        except DistError as error:
            raise TrainingError(f"the launcher of rank 0 at {master} is gone") from error

    return is_over


def rank_0_is_gone(master: MasterAddress) -> Callable[[], bool]:
    """Return whether rank 0, which hosts the store, has closed a connection that nothing else uses.

    Its exit code is the run's. A lost host closes no connection: TCP keepalive detects it.
    """
    try:
        connection = socket.create_connection((master.host, master.port), _CONNECT_S)
    except ConnectionError:  # the rendezvous took place, so that rank 0 was there and has ended
        return lambda: True
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return lambda: bool(select.select([connection], [], [], 0)[0])
