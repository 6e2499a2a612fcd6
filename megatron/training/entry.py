"""What the entry scripts share: from a command line to the training of one objective."""

from collections.abc import Sequence

from megatron.config.config import parse_config
from megatron.plan.objective_plan import ObjectiveName


def train_from(argv: Sequence[str], objective: ObjectiveName, *, description: str | None) -> None:
    """Train what the command line `argv` asks for.

    Args:
        description: the first lines of `--help`.

    Raises:
        MegatronError: something that the user can mend.
    """
    config, notices = parse_config(argv, description=description or "")
    # After the flags are read: torch takes seconds to import, a wrong flag is told at once.
    from megatron.training.device import prepare_process

    launch, device = prepare_process(config.parallel)
    from megatron.training.objective import OBJECTIVES
    from megatron.training.pretrain import pretrain

    pretrain(config, notices, launch, device, OBJECTIVES[objective])
