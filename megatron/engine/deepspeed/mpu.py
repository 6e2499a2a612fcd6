"""The axes under the names that DeepSpeed looks for; it calls such an object "mpu"."""

import torch.distributed as dist

from megatron.tensor_parallel.process_groups import Groups


class Mpu:
    """Answers DeepSpeed's questions about the axes. "Model parallel" is one whole replica.

    It is not told that some copies of a shard see parts of the same samples: it would sum their
    gradients at ZeRO stages 0 to 2 and average them at stage 3. So it averages always, and losses
    are made for that.
    """

    def __init__(self, groups: Groups):
        self._groups = groups

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place in its replica."""
        return dist.get_rank(self._groups.model)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a replica."""
        return self._groups.model.size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks of this replica."""
        return self._groups.model

    def get_tensor_model_parallel_rank(self) -> int:
        """Return this rank's place among those that share its layers."""
        return self._groups.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the number of ranks that share a layer."""
        return self._groups.tensor.size()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that share this rank's layers."""
        return self._groups.tensor

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self._groups.topology.pipeline

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among the replicas."""
        return self._groups.data_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self._groups.data.size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same shard of the model, one of each replica."""
        return self._groups.data

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's place among all that hold the same shard of the model."""
        return dist.get_rank(self._groups.data_and_sequence)

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of ranks that hold the same shard of the model."""
        return self._groups.data_and_sequence.size()

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """Return all ranks that hold the same shard of the model; ZeRO divides over them."""
        return self._groups.data_and_sequence
