"""Model-parallel unit (mpu): process groups under the method names that DeepSpeed calls."""

import torch.distributed as dist

from megatron.tensor_parallel.process_groups import Groups


class Mpu:
    """Process groups and ranks for DeepSpeed. "Model parallel" is one full replica.

    DeepSpeed does not learn about sequence-parallel ranks: it would sum their gradients at ZeRO
    stages 0 to 2 and average them at stage 3. So it averages always, and losses are scaled for
    that.
    """

    def __init__(self, groups: Groups):
        self._groups = groups

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index in its replica."""
        return dist.get_rank(self._groups.model)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a replica."""
        return self._groups.model.size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks of this replica."""
        return self._groups.model

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the tensor-parallel rank."""
        return self._groups.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the tensor-parallel size."""
        return self._groups.tensor.size()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the tensor-parallel group."""
        return self._groups.tensor

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self._groups.topology.pipeline

    def get_data_parallel_rank(self) -> int:
        """Return the data-parallel rank."""
        return self._groups.data_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self._groups.data.size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same shard of the model, one of each replica."""
        return self._groups.data

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's index among all that hold the same shard of the model."""
        return dist.get_rank(self._groups.data_and_sequence)

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of ranks that hold the same shard of the model."""
        return self._groups.data_and_sequence.size()

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """Return all ranks that hold the same shard of the model; ZeRO partitions over them."""
        return self._groups.data_and_sequence
