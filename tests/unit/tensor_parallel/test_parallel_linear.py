"""The tensor-parallel layers under the name that tutorials import."""


def test_tutorials_import_the_layers_that_the_model_has():
    from megatron.model import parallel_linear
    from megatron.tensor_parallel import embedding, linear

    assert parallel_linear.ColumnParallelLinear is linear.ColumnParallelLinear
    assert parallel_linear.RowParallelLinear is linear.RowParallelLinear
    assert parallel_linear.VocabParallelEmbedding is embedding.VocabParallelEmbedding
